"""The process of a run ends with its runner, and takes along what it has started."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.running.jobs import Job, last_error

# Starts a process that never ends by itself, as Ray's do.
PROGRAM = """
import signal, subprocess, sys
from fedkace_flwr.experiments.running.jobs import Orders
orders = Orders()
if "told" in sys.argv:
    orders.wait()
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("told", [False, True], ids=["waiting", "running"])
def test_when_the_pipe_is_closed_a_run_ends_with_all_that_it_has_started(told: bool, tmp_path: Path) -> None:
    """As the kernel closes it when the runner is killed."""
    home, log = tmp_path / "home", tmp_path / "log"
    home.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(home), *(["told"] if told else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    if told:
        process.stdin.write(f'{{"log": "{log}", "environment": {{}}, "run": {{}}}}\n'.encode())
        process.stdin.flush()
        while not (log.exists() and log.read_text().endswith("\n")):
            assert process.poll() is None
        child = psutil.Process(int(log.read_text()))
    else:
        child = psutil.Process(int(process.stdout.readline()))
    process.stdin.close()
    process.wait()
    assert psutil.wait_procs([child], timeout=60)[1] == []
    assert not home.exists()


def test_a_run_that_cannot_begin_says_why_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "no number")  # Python refuses to start
    job = Job("inline")
    job.begin({}, tmp_path / "app.log")
    with pytest.raises(RunError, match=r"log: .*app\.log"):
        job.check()
    assert "PYTHONHASHSEED" in (tmp_path / "app.log").read_text()


@pytest.mark.parametrize(
    ("log", "quoted"),
    [
        ("", "it left no output"),
        ("one\n\ntwo\n", "two"),
        ("Traceback\n  line 3\nValueError: no\nmore\n", "ValueError: no"),
    ],
)
def test_the_line_that_says_why(log: str, quoted: str, tmp_path: Path) -> None:
    (tmp_path / "app.log").write_text(log)
    assert last_error(tmp_path / "app.log") == quoted
