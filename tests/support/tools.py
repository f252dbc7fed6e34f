"""External programs that some tests need, and what happens if one is missing."""

import importlib.util
import os
import shutil

import pytest

REQUIRE = "FEDKACE_REQUIRE_TOOLS"
"""The environment variable with which a missing program fails a test; otherwise the test is skipped."""

_PACKAGES = {
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "git": "git",
    "nginx": "nginx",
    "openssl": "openssl",
    "shellcheck": "shellcheck",
    "ssh-keygen": "openssh-client",
    "systemd-analyze": "systemd",
}


def need_tools(*names: str) -> None:
    """Skip the test if a program is missing, and name its Debian package; with :data:`REQUIRE` set, fail instead."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        packages = " ".join(_PACKAGES[name] for name in missing)
        _report(f"{', '.join(missing)} not installed: apt-get install {packages}")


def need_modules(*names: str) -> None:
    """As :func:`need_tools`, for modules of the extra ``dev`` that only a release needs."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        _report(f"{', '.join(missing)} not installed: pip install -e '.[dev]'")


def _report(reason: str) -> None:
    if os.environ.get(REQUIRE, "") not in ("", "0"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
