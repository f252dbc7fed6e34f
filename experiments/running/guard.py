"""End the processes of a runner that could not end them itself because it was killed or crashed.

A guard process waits on a pipe whose other end only the runner holds. The kernel closes that end when the runner
exits, whatever the cause. Every process that the runner starts carries a mark in its environment, and so does
everything that Flower and Ray start on its behalf, detached or not.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from fedkace_flwr.experiments.running.processes import CHECKOUT

MARK = "FEDKACE_RUNNER"
_END_SECONDS = 20
_SETTLE_SECONDS = 1.0
_ORDERLY = b"."


class Guard:
    """Watches the processes of one runner.

    Attributes
    ----------
    environment : dict of str to str
        Environment variables for everything that the runner starts.
    home : Path
        A temporary folder, deleted with the guard.
    """

    def __enter__(self) -> Self:
        token = secrets.token_hex(16)
        self.environment = {**os.environ, MARK: token}
        self.home = Path(tempfile.mkdtemp(prefix="fedkace-runner-"))
        end, self._held = os.pipe()
        command = [sys.executable, "-m", "fedkace_flwr.experiments.running.guard", token, str(self.home)]
        # A separate session, so that Ctrl-C at the terminal reaches the runner only.
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=end, stdout=quiet, stderr=quiet, cwd=CHECKOUT, start_new_session=True
        )
        os.close(end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._held, _ORDERLY)
        os.close(self._held)
        self._process.wait()


def all_of(name: str, value: str) -> list[psutil.Process]:
    """Return every process with this environment variable and all their descendants, except this process.

    A process that sets its title, as Ray's do, may overwrite its environment, and is then found only through its
    parents.
    """
    found: dict[int, psutil.Process] = {}
    parents: dict[psutil.Process, int] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid():
                marked = process.environ().get(name) == value  # raises for zombies
                parents[process] = process.ppid()
                if marked:
                    found[process.pid] = process
    while below := [process for process, parent in parents.items() if parent in found and process.pid not in found]:
        found |= {process.pid: process for process in below}
    return list(found.values())


def end_all_of(name: str, value: str) -> None:
    """End every process with this environment variable and all their descendants."""
    left = []
    for process in all_of(name, value):
        with suppress(psutil.Error):
            process.terminate()
            left.append(process)
    for process in psutil.wait_procs(left, timeout=_END_SECONDS)[1]:
        with suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    orderly = sys.stdin.buffer.read()
    end_all_of(MARK, sys.argv[1])
    if not orderly:  # a process that was being started may not have shown the mark yet
        time.sleep(_SETTLE_SECONDS)
        end_all_of(MARK, sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
