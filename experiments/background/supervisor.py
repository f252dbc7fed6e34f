"""Runs a command, by default at the lowest priority, passes SIGTERM on to it, and records how it ended.

Where the kernel groups processes by session (``/proc/self/autogroup``), nice values and idle scheduling count only
within a session. Flower and Ray open sessions of their own, so the group of every session is lowered, again and again.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from experiments.background.folder import Folder, now

_LOWEST = 19
_SECONDS = 5.0


def lower_own_priority() -> None:
    """Idle scheduling and the highest nice value, for this process and what it starts."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
    lower_session(os.getpid())


def lower_session(process: int) -> None:
    """Lower the group of a process's session, where the kernel has such groups."""
    path = Path("/proc") / str(process) / "autogroup"
    with suppress(OSError):
        if not path.read_text(encoding="ascii").rstrip().endswith(f" nice {_LOWEST}"):
            path.write_text(str(_LOWEST), encoding="ascii")


def supervise(folder: Folder, command: list[str], directory: str, lock: int, lowest: bool) -> int:
    """Run a command to its end and return its exit status, negative for a signal."""
    if lowest:
        lower_own_priority()
    ending = False

    def forward(*_: object) -> None:
        nonlocal ending
        ending = True
        if runner is not None:
            runner.send_signal(signal.SIGTERM)

    runner: subprocess.Popen[bytes] | None = None
    signal.signal(signal.SIGTERM, forward)
    runner = subprocess.Popen(command, cwd=directory, pass_fds=(lock,))
    if ending:
        runner.send_signal(signal.SIGTERM)
    while runner.poll() is None:
        for process in folder.processes() if lowest else ():
            lower_session(process.pid)
        with suppress(subprocess.TimeoutExpired):
            runner.wait(_SECONDS)
    folder.write("ended.json", {"status": runner.returncode, "ended": now()})
    return runner.returncode


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    supervise(Folder(Path(told["folder"])), told["command"], told["directory"], told["lock"], told["lowest"])
