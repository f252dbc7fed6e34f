"""The federation of a simulated year: real processes on the loopback, by the scripts of ``deploy/``."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.experiments.running.processes import ROOT, finish, flower_environment, staged_app

CLIENT, SERVERAPP = "flwr-clientapp", "flwr-serverapp"
"""Words of the command lines of processes that Flower starts for a message, and for a run."""

HUB = ("superlink", "superexec", "run")
"""The members on the hub's machine."""

_MEMBER = "FEDKACE_MEMBER"
_STEP_SECONDS = 300.0
_DEPLOY = ROOT / "deploy"
_TRY_AGAIN = 5.0  # seconds between two attempts to start what has ended, as under systemd

Processes = dict[str, list[tuple[psutil.Process, str]]]
"""The processes of each member, with their command lines."""


class Federation:
    """SuperLink, SuperExec and SuperNodes with TLS and keys, and the service that keeps a run going.

    Parameters
    ----------
    folder : Path
        For everything that it writes.
    nodes : int
        SuperNodes at the start.
    test : Path
        The folder of their test images.
    hurried : bool
        Whether Flower's processes wait for shorter times than they usually do.

    Attributes
    ----------
    meant : list of str
        The members that are meant to run.

    Raises
    ------
    ConfigError
        This is no checkout.
    """

    def __init__(self, folder: Path, nodes: int, test: Path, *, hurried: bool = True) -> None:
        if not (_DEPLOY / "federation.sh").exists():
            raise ConfigError(f"soak: there is no {_DEPLOY / 'federation.sh'}; run it in a checkout of the project")
        self.root, self.folder = folder, folder / "federation"
        self.run = self.folder / "results" / "living"
        self.app = staged_app(folder / "app")
        hurry = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3", "PYTHONPATH": str(Path(__file__).parent / "compressed")}
        left_out = ("FLWR", "RAY", "PYTHONDONTWRITEBYTECODE")  # without compiled files, each message compiles the app
        kept = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
        self._env = flower_environment(folder / "flwr", kept | (hurry if hurried else {}))
        self.meant = [f"node-{number}" for number in range(1, nodes + 1)]
        self._starts: dict[str, subprocess.Popen[bytes]] = {}
        self._next = 0.0
        options = ["--nodes", str(nodes), "--port", "0", "--connection", "soak", "--inboxes"]
        self.script("setup", *options, "--node-config", f'test="{test}"')

    def begin(self, config: Path) -> None:
        """Start all members, and a run with this configuration, a TOML file."""
        self.script("service", str(self.app), str(config))
        self.script("start")
        self.meant = [*HUB, *self.meant]

    def renew(self, app: Path, config: Path) -> None:
        """Let the run go on with another app."""
        self.app = app
        self.script("service", str(app), str(config))

    def add(self) -> str:
        """Add a node and start it; return its name."""
        number = 1 + max(int(home.name.removeprefix("node-")) for home in self.folder.glob("node-*"))
        self.script("add-node")
        self.meant.append(f"node-{number}")
        return self.meant[-1]

    def script(self, task: str, *arguments: str) -> None:
        """Run ``federation.sh TASK FOLDER ...``.

        Raises
        ------
        RunError
            It fails.
        """
        command = [str(_DEPLOY / "federation.sh"), task, str(self.folder), *arguments]
        try:
            done = finish(command, self._env, _STEP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"federation.sh {task}: has not ended after {_STEP_SECONDS:g} seconds") from error
        if done.returncode:
            raise RunError(f"federation.sh {task}: {(done.stderr or done.stdout).strip()[-500:]}")

    def tend(self) -> None:
        """Start what has ended and is meant to run, without waiting for it, as systemd does on real machines."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _TRY_AGAIN
        running = self.processes()
        ended = [name for name in self.meant if not self._is_up(name, running)]
        for name in ["superlink"] if "superlink" in ended else ended:  # which the others need at their start
            if name not in self._starts or self._starts[name].poll() is not None:
                command = [str(_DEPLOY / "federation.sh"), "start", str(self.folder), name]
                with (self.root / "starts.log").open("ab") as log:
                    self._starts[name] = subprocess.Popen(
                        command, env=self._env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
                    )

    def processes(self) -> Processes:
        """Return the processes of each member with their command lines."""
        found: Processes = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                member = Path(process.environ().get(_MEMBER, ""))
                if member.parent == self.folder:
                    found.setdefault(member.name, []).append((process, " ".join(process.cmdline())))
        return found

    def kill(self, members: Iterable[str], words: str = "") -> bool:
        """Kill the processes of members whose command line contains the words; return whether there were any."""
        running, killed = self.processes(), False
        for process, line in [each for name in members for each in running.get(name, ())]:
            if words in line:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
                    killed = True
        return killed

    def start(self, *members: str) -> None:
        """Mean members to run; :meth:`tend` starts them."""
        self.meant += members

    def stop(self, *members: str) -> None:
        """Stop members, which are then not meant to run."""
        self.meant = [name for name in self.meant if name not in members]
        self._settle(members)
        self.script("stop", *members)

    def last_words(self, lines: int = 12) -> str:
        """Return the end of each member's log, and of what came of its starts."""
        logs = [*sorted(self.folder.glob("*/log")), self.root / "starts.log"]
        ends = [(log, log.read_text(errors="replace").splitlines()[-lines:]) for log in logs if log.exists()]
        return "\n".join("\n  ".join([f"{log.relative_to(self.root)}:", *end]) for log, end in ends)

    def end(self) -> None:
        """End every process, whatever state the federation is in."""
        self.meant = []
        self._settle(tuple(self._starts))
        with suppress(RunError, OSError):
            self.script("stop")
        self.kill(self.processes())

    def _settle(self, members: Iterable[str]) -> None:
        for name in members:
            if name in self._starts:
                self._starts.pop(name).wait()

    def _is_up(self, name: str, running: Mapping[str, Any]) -> bool:
        with suppress(OSError, ValueError):
            number = int((self.folder / name / "pid").read_text())
            return any(process.pid == number for process, _ in running.get(name, ()))
        return False
