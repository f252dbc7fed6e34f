"""Commands write to new, empty or their own folders: what a user has there is neither changed nor deleted."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.common import SMALL
from support.made.models import constant
from support.made.results import write_run, write_study

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.export.folder import write_folder
from fedkace_flwr.storage.targets import MARK

THEIRS = [
    *("config.json", "environment.json", "summary.json", "accuracy.png", "study.json", "notes.partial"),
    *("rounds.parquet.partial", "classes.parquet", "index.html", "tables.md", "runs.csv", "classes.csv"),
    *("README.md", "model.safetensors", "model.onnx", "pyproject.toml", "clients/base.py", "server/main.py"),
    *("client-0/new/chunk-000001.npz", "client-0/test/test.npz", "one/clients/client-000/state-000001.npz"),
]
COMMANDS = ["keep", "report", "export", "app", "feed"]


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str, Path], list[str]]:
    """Arguments of a command that writes to a folder."""
    study, model = tmp_path / "results" / "study", tmp_path / "model"
    write_run(study, "one", [0.5, 0.6])
    write_study(study, {"one": {"seed": "0"}}, axes=["seed"], paper=None)
    write_folder(model, constant(1, 2))
    given = {
        "keep": ["keep", str(study)],
        "report": ["report", str(study), "--output"],
        "export": ["export", str(model)],
        "app": ["app"],
        "feed": ["feed", "--set", "clients=1", "rounds=1", "--every", "0"],
    }
    return lambda name, target: [*given[name], str(target)]


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_with_a_users_files_is_refused_and_left_as_it_was(
    name: str, command: Callable[[str, Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    for path in THEIRS:
        (mine / path).parent.mkdir(parents=True, exist_ok=True)
        (mine / path).write_text("mine")
    before = tree(tmp_path)
    assert refused(capsys, command(name, mine)).startswith(f"error: {mine}: holds files, and no {MARK} of ")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_its_own_folder_is_renewed_and_a_users_file_in_it_stays(
    name: str, command: Callable[[str, Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    target.mkdir()  # an empty one will do
    assert main(command(name, target)) == 0
    before = tree(target)
    (target / "mine.txt").write_text("mine")
    assert main(command(name, target)) == 0
    assert tree(target) == {**before, "mine.txt": b"mine"}
    capsys.readouterr()
    for other in COMMANDS:
        if other != name:
            assert str(target) in refused(capsys, command(other, target))
    assert tree(target) == {**before, "mine.txt": b"mine"}


@pytest.mark.parametrize("link", ["client-0", "client-0/new"])
def test_feed_follows_no_link_in_its_folder(link: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["feed", str(tmp_path / "inboxes"), "--set", "clients=1", "rounds=1"]
    assert main(arguments) == 0
    path = tmp_path / "inboxes" / link
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert refused(capsys, arguments).startswith(f"error: {path}: is a link")
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def test_a_run_does_not_begin_in_a_users_folder(tmp_path: Path) -> None:
    (tmp_path / "mine" / "server").mkdir(parents=True)
    for name in ("config.json", "notes.partial", "server/checkpoint-000001.npz"):
        (tmp_path / "mine" / name).write_text("mine")
    before = tree(tmp_path)
    for resume in (False, True):
        with pytest.raises(RunError, match=r"results-dir: .*mine: holds files"):
            run_inline(Config.parse({**SMALL, "results-dir": str(tmp_path), "run-name": "mine", "resume": resume}))
    assert tree(tmp_path) == before


def test_a_study_does_not_begin_in_a_users_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results" / "quickstart").mkdir(parents=True)
    for name in ("study.json", "accuracy.png"):
        (tmp_path / "results" / "quickstart" / name).write_text("mine")
    before = tree(tmp_path)
    arguments = ["run", "quickstart", "--engine", "inline", "--results", str(tmp_path / "results")]
    assert "results/quickstart: holds files" in refused(capsys, arguments)
    assert tree(tmp_path) == before
