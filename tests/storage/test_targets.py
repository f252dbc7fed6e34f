"""Folders that commands write to: theirs are renewed, those of others are left alone."""

import os
import signal
from pathlib import Path

import pytest

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.storage import targets
from fedkace_flwr.storage.targets import MARK, claim, renewed


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MARK
    }


def write(folder: Path, files: dict[str, str]) -> None:
    with renewed(folder, "a model") as new:
        for name, text in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_text(text)


def test_a_folder_is_replaced_but_for_the_files_of_others(tmp_path: Path) -> None:
    target = tmp_path / "made" / "target"
    write(target, {"a": "1", "b/c": "1", "d/e": "1", "d/f/g": "1"})
    assert (target.stat().st_mode & 0o777, target.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    (target / "d" / "mine").write_text("mine")
    write(target, {"a": "2", "b/h": "2"})
    assert contents(target) == {"a": "2", "b/h": "2", "d/mine": "mine"}
    assert not (target / "d" / "f").exists()
    write(target, {})
    assert contents(target) == {"d/mine": "mine"}


def test_what_others_put_there_is_never_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write(target, {"a": "1", "b/c": "1"})
    (target / "new").write_text("mine")
    with pytest.raises(ConfigError, match="new: is in the way"):
        write(target, {"a": "2", "new": "2"})
    (target / "a").write_text("edited")
    with pytest.raises(ConfigError, match="a: was changed"):
        write(target, {"a": "2"})
    assert contents(target) == {"a": "edited", "b/c": "1", "new": "mine"}


@pytest.mark.parametrize("name", ["a", "b", "b/c"])
def test_links_in_it_are_not_followed(name: str, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    write(target, {"a": "1", "b/c": "1"})
    (target / name).rename(elsewhere)
    (target / name).symlink_to(elsewhere)
    before = elsewhere.read_text() if elsewhere.is_file() else contents(elsewhere)
    for files in ({"a": "2", "b/c": "2"}, {"d": "2"}):
        with pytest.raises(ConfigError, match=f"{name}: (was changed|is in the way)"):
            write(target, files)
    assert (elsewhere.read_text() if elsewhere.is_file() else contents(elsewhere)) == before


def test_a_folder_with_another_mark_or_none_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_text("mine")
    claim(tmp_path / "run", "a run")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name, said in (
        ("mine", f"holds files, and no {MARK} of a model"),
        ("run", "holds a run, not a model"),
        ("file", "cannot be written"),
        ("file/in", "cannot be written"),
        ("nowhere", "cannot be written"),
    ):
        before = contents(tmp_path)
        with pytest.raises(ConfigError, match=f"{name}: {said}"):
            write(tmp_path / name, {"a": "2"})
        assert contents(tmp_path) == before and not (tmp_path / "gone").exists()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mark",
    ["", "[]", '{"holds": "a model"}', "[" * 9999]
    + [f'{{"holds": "a model", "files": {{"{name}": ["x"]}}}}' for name in ("/etc/passwd", "b/../../mine", MARK)],
)
def test_a_mark_that_nobody_here_wrote_is_none(mark: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / MARK).write_text(mark)
    with pytest.raises(ConfigError, match="holds files, and no"):
        write(tmp_path / "target", {"a": "2"})
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_failure_leaves_an_earlier_content_and_no_new_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "old", {"a": "1"})
    for name in ("new", "empty", "old"):
        with pytest.raises(RuntimeError), renewed(tmp_path / name, "a model") as new:
            (new / "a").write_text("2")
            raise RuntimeError
    assert not (tmp_path / "new").exists() and not list((tmp_path / "empty").iterdir())
    assert {path.name for path in (tmp_path / "old").iterdir()} == {"a", MARK}
    assert contents(tmp_path / "old") == {"a": "1"}


@pytest.mark.parametrize("step", range(7))
def test_wherever_it_is_killed_each_file_is_whole_and_the_next_one_puts_it_right(step: int, tmp_path: Path) -> None:
    """Killed at its first, second, ... call that changes the folder; the process is a real one."""
    target = tmp_path / "target"
    write(target, {"a": "1", "b": "1", "c": "1"})
    if not (child := os.fork()):
        left = step

        def dying(path: str | Path, *arguments: object, **keywords: object) -> None:
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            replace(path, *arguments, **keywords)  # type: ignore[arg-type]

        replace, os.replace = os.replace, dying  # type: ignore[assignment]
        write(target, {"a": "2", "b": "2", "d": "2"})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert (os.WTERMSIG(status) == signal.SIGKILL) == (step < 5)
    found = contents(target)
    assert {text for name, text in found.items() if not name.startswith(MARK)} <= {"1", "2"}
    if step == 0:
        assert {name: found[name] for name in "abc"} == dict.fromkeys("abc", "1")
    write(target, {"a": "3", "c": "3"})
    assert contents(target) == {"a": "3", "c": "3"}


def test_a_folder_known_without_a_mark_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("of version 1.0")
    claim(tmp_path, "a run", known=True)
    targets.check(tmp_path, "a run")
    assert contents(tmp_path) == {"a": "of version 1.0"}


def test_two_processes_may_claim_a_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim_twice(path: Path) -> None:
        monkeypatch.undo()
        claim(path.parent, "a study")
        (path.parent / "made").touch()
        claim(path.parent, "a study")

    def both(new: Path, old: Path) -> None:
        claim_twice(old)
        replace(new, old)

    replace = os.replace
    monkeypatch.setattr(os, "replace", both)
    claim(tmp_path / "target", "a study")
    assert contents(tmp_path / "target") == {"made": ""}
