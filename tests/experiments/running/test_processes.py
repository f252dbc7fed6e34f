"""What programs start of Flower, and the end of what it leaves behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedkace_flwr.experiments.running.processes import all_of, end_all_of, staged_app
from fedkace_flwr.storage.targets import MARK

ROOT = Path(__file__).resolve().parents[3]


def bundle(app: Path, place: Path) -> bytes:
    """What Flower makes of a folder and sends to a SuperLink."""
    place.mkdir()
    command = [str(Path(sys.executable).with_name("flwr")), "build", "--app", str(app)]
    subprocess.run(command, cwd=place, check=True, capture_output=True)
    (made,) = place.glob("*.fab")
    return made.read_bytes()


@pytest.mark.slow
def test_the_staged_app_is_the_checkouts(tmp_path: Path) -> None:
    staged = staged_app(tmp_path / "app")
    packages = {"fedkace_flwr", "strategies", "clients"}
    assert {path.name for path in staged.iterdir()} == {MARK, "pyproject.toml", "LICENSE", *packages}
    assert bundle(staged, tmp_path / "of-staged") == bundle(ROOT, tmp_path / "of-checkout")


NAME = "FEDKACE_TEST_NAME"
# Starts a process without any environment, as one seems to have none that writes its title over it, and another that
# has ended by the time the parent tells of the first. Parent and first child then wait for the end of one pipe.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], env={})
ended = subprocess.Popen([sys.executable, "-c", ""])
os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env={**os.environ, NAME: str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    yield psutil.Process(parent.pid), child
    parent.communicate()  # closes the pipe


def test_what_a_marked_process_has_started_belongs_to_it_without_a_mark(
    family: tuple[psutil.Process, psutil.Process], tmp_path: Path
) -> None:
    assert set(all_of(NAME, str(tmp_path))) == set(family)
    assert all_of(NAME, "another") == []


def test_it_all_ends_together(family: tuple[psutil.Process, psutil.Process], tmp_path: Path) -> None:
    end_all_of(NAME, str(tmp_path))
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
