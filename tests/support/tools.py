"""Programs from outside Python that some tests need, and what happens where one is missing."""

import os
import shutil

import pytest

REQUIRE = "FEDKACE_REQUIRE_TOOLS"
"""The environment variable under which a missing program fails a test, where it skips it otherwise."""

_PACKAGES = {
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "git": "git",
    "openssl": "openssl",
    "shellcheck": "shellcheck",
    "ssh-keygen": "openssh-client",
    "systemd-analyze": "systemd",
}


def need_tools(*names: str) -> None:
    """Skip the test where a program is missing, with the Debian package that holds it; fail under :data:`REQUIRE`."""
    missing = [name for name in names if shutil.which(name) is None]
    if not missing:
        return
    packages = " ".join(_PACKAGES[name] for name in missing)
    reason = f"{', '.join(missing)} not installed: apt-get install {packages}"
    if os.environ.get(REQUIRE, "") not in ("", "0"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
