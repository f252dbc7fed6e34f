"""A missing program skips a test, and fails it where all programs have to be there."""

import pytest
from support.tools import REQUIRE, need_modules, need_tools


@pytest.fixture(autouse=True)
def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(REQUIRE, raising=False)


def test_a_missing_program_skips_and_names_its_package() -> None:
    with pytest.raises(pytest.skip.Exception) as caught:
        need_tools("openssl", "ssh-keygen")
    assert str(caught.value) == "openssl, ssh-keygen not installed: apt-get install openssl openssh-client"


def test_a_missing_program_fails_where_all_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="shellcheck not installed"):
        need_tools("shellcheck")


def test_a_missing_module_skips_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.skip.Exception) as caught:
        need_modules("no_such_module", "pytest")
    assert str(caught.value) == "no_such_module not installed: pip install -e '.[dev]'"
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="no_such_module not installed"):
        need_modules("no_such_module")


def test_nothing_is_needed_where_nothing_is_named() -> None:
    need_tools()
    need_modules()
