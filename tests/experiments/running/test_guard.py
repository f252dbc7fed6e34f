"""What belongs to a runner, told by a mark in the environment, and its end."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedkace_flwr.experiments.running.guard import all_of, end_all_of

MARK = "FEDKACE_TEST_MARK"
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
        env={**os.environ, MARK: str(tmp_path)},
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
    assert set(all_of(MARK, str(tmp_path))) == set(family)
    assert all_of(MARK, "another") == []


def test_it_all_ends_together(family: tuple[psutil.Process, psutil.Process], tmp_path: Path) -> None:
    end_all_of(MARK, str(tmp_path))
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
