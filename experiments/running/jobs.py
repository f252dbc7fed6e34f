"""The process of a run, seen from the runner and from itself.

The runner tells the process its run in one line of JSON and then holds the pipe: when it closes, because the runner
stops the run or has itself ended, for whatever cause, the process ends with everything that it has started.
What imports PyTorch is not imported here, so that the process is started before the runner's own imports.
"""

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

import psutil

from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.running.processes import ROOT, flower_environment
from fedkace_flwr.storage.files import LARGEST_LOG, read_text

_STOP_SECONDS = 20


class Job:
    """A process for one run, which makes its imports while it waits for the run.

    Its output goes to a file in a folder of its own until the run begins. The folder is also Flower's home.

    Parameters
    ----------
    kind : {"simulation", "inline"}
        The module of this package that the process runs.
    environment : mapping, optional
        Environment variables, in addition to those of this process.
    """

    def __init__(self, kind: Literal["simulation", "inline"], environment: Mapping[str, str] | None = None) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="fedkace-run-"))
        self._early = self._log = self._home / "early.log"
        self._ended: Callable[[], object] = lambda: None
        with self._early.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"fedkace_flwr.experiments.running.{kind}", str(self._home)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=flower_environment(self._home, {**os.environ, **(environment or {})}),
            )

    def begin(
        self,
        run: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str] | None = None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin the run.

        Parameters
        ----------
        run : mapping
            The arguments of the module's function, as JSON.
        log : Path
            A file for the output, which is emptied.
        environment : mapping, optional
            Environment variables to set before the run.
        ended : callable, optional
            Called once when the process has been stopped.
        """
        line = json.dumps({"log": str(log.resolve()), "environment": dict(environment or {}), "run": run})
        log.write_text("")
        self._log, self._ended = log, ended
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # if it has ended, `check` says why
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def check(self) -> None:
        """Wait for the end of the run; raise RunError with the app's error message if it failed."""
        failed = self._process.wait() != 0
        if failed and self._early.exists() and not self._log.read_bytes():
            shutil.copyfile(self._early, self._log)
        self.stop()
        if failed:
            raise RunError(f"{last_error(self._log)} (log: {self._log})")

    def stop(self) -> None:
        """End it now, with everything that it has started."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)
        self._ended()
        self._ended = lambda: None


class Orders(threading.Thread):
    """What the process hears from its runner; it ends the process when the runner closes the pipe."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._pipe = os.fdopen(os.dup(0))
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()
        with Path(os.devnull).open() as nothing:  # for the processes that this one starts
            os.dup2(nothing.fileno(), 0)
        self.start()

    def run(self) -> None:
        """Read the line, and then wait for the end."""
        if line := self._pipe.readline():
            self._told.put(line)
            self._pipe.read()
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        leave(1)

    def wait(self) -> dict[str, Any]:
        """Wait for the run, go over to its log and its environment, and return its arguments."""
        told: dict[str, Any] = json.loads(self._told.get())
        os.environ.update(told["environment"])
        with Path(told["log"]).open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        arguments: dict[str, Any] = told["run"]
        return arguments


def leave(status: int) -> NoReturn:
    """End this process and those that it has started; some of Ray's would notice only after a minute."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def last_error(log: Path) -> str:
    """The last line of a log that names an error, or else its last line."""
    lines = [line.strip() for line in read_text(log, LARGEST_LOG, "replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return (named or lines or ["it left no output"])[-1]
