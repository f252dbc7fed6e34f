"""The federation of a simulated year: real processes on the loopback, by the scripts of ``deploy/``."""

import json
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

HUB = ("superlink", "superexec")

_CONNECTION = "soak"
_MEMBER = "FEDKACE_MEMBER"
_STEP_SECONDS = 300.0
_SCRIPT = ROOT / "deploy" / "federation.sh"
_TRY_AGAIN = 8.0  # seconds between two attempts to start what has ended, as under systemd


class Federation:
    """SuperLink, SuperExec and SuperNodes with TLS and keys, and one run that is meant to go on.

    Parameters
    ----------
    folder : Path
        For everything that it writes.
    nodes : int
        SuperNodes at the start.
    test : Path
        The folder of their test images.
    """

    def __init__(self, folder: Path, nodes: int, test: Path) -> None:
        if not _SCRIPT.exists():
            raise ConfigError(f"soak: there is no {_SCRIPT}; run it in a checkout of the project")
        self.root = folder
        self.folder = folder / "federation"
        self.results = folder / "results"
        self.app = staged_app(folder / "app")
        left_out = ("FLWR", "RAY", "PYTHONDONTWRITEBYTECODE")  # without compiled files, each message compiles the app
        kept = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
        self.env = flower_environment(folder / "flwr", kept)
        self.meant = [*HUB, *(f"node-{number}" for number in range(1, nodes + 1))]
        self._run = ""
        self._config: Path | None = None
        self._starting: subprocess.Popen[bytes] | None = None
        self._next = 0.0
        options = ["--nodes", str(nodes), "--port", "0", "--connection", _CONNECTION, "--inboxes"]
        self.script("setup", *options, "--node-config", f'test="{test}"')

    @property
    def run(self) -> Path:
        """The folder of the run's results."""
        return self.results / "year"

    def script(self, task: str, *arguments: str) -> str:
        """Run ``federation.sh TASK FOLDER ...`` and return what it prints.

        Raises
        ------
        RunError
            It fails.
        """
        done = finish([str(_SCRIPT), task, str(self.folder), *arguments], self.env, _STEP_SECONDS)
        if done.returncode:
            raise RunError(f"federation.sh {task}: {(done.stderr or done.stdout).strip()[-500:]}")
        return done.stdout

    def submit(self, config: Mapping[str, Any]) -> None:
        """Submit the run, which :meth:`tend` then submits again whenever it has failed."""
        path = self.root / "year.toml"
        told = {**config, "results-dir": str(self.results), "run-name": self.run.name, "resume": True}
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items()))
        self._config = path
        self._run = str(self._flwr("run", str(self.app), _CONNECTION, "--run-config", str(path))["run-id"])

    def status(self) -> str:
        """Return the SuperLink's word on the run."""
        return str(self._flwr("list", _CONNECTION, "--run-id", self._run)["runs"][0]["status"])

    def replace(self, app: Path) -> None:
        """Stop the run; :meth:`tend` submits it with another app."""
        self.app = app
        self._flwr("stop", self._run, _CONNECTION)

    def tend(self) -> None:
        """Start what has ended and is meant to run, without waiting for it; submit the run again if it has failed.

        This is what systemd does for real machines.
        """
        if (self._starting is not None and self._starting.poll() is None) or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _TRY_AGAIN
        running = self.processes()
        ended = [name for name in self.meant if not self._is_up(name, running)]
        if ended:
            with (self.root / "starts.log").open("ab") as log:
                command = [str(_SCRIPT), "start", str(self.folder), *ended]
                self._starting = subprocess.Popen(
                    command, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
                )
            return
        if self._config and not any(SERVERAPP in words for _, words in running.get("superexec", ())):
            with suppress(RunError):  # the SuperLink may not answer yet
                if self.status().startswith("finished"):
                    self._run = str(
                        self._flwr("run", str(self.app), _CONNECTION, "--run-config", str(self._config))["run-id"]
                    )

    def processes(self) -> dict[str, list[tuple[psutil.Process, str]]]:
        """Return the processes of each member with their command lines."""
        found: dict[str, list[tuple[psutil.Process, str]]] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                member = Path(process.environ().get(_MEMBER, ""))
                if member.parent == self.folder:
                    found.setdefault(member.name, []).append((process, " ".join(process.cmdline())))
        return found

    def kill(self, members: Iterable[str], words: str = "") -> int:
        """Kill the processes of members whose command line contains the words; return how many there were."""
        running, killed = self.processes(), 0
        for process, line in [each for name in members for each in running.get(name, ())]:
            if words in line:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
                    killed += 1
        return killed

    def stop(self, *members: str) -> None:
        """Stop members, which are then not meant to run."""
        self._settle()
        self.meant = [name for name in self.meant if name not in members]
        self.script("stop", *members)

    def end(self) -> None:
        """End every process, whatever state the federation is in."""
        self.meant, self._config = [], None
        self._settle()
        with suppress(RunError, OSError):
            self.script("stop")
        self.kill(self.processes())

    def _settle(self) -> None:
        if self._starting is not None:
            self._starting.wait()

    def _is_up(self, name: str, running: Mapping[str, Any]) -> bool:
        with suppress(OSError, ValueError):
            number = int((self.folder / name / "pid").read_text())
            return any(process.pid == number for process, _ in running.get(name, ()))
        return False

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        done = finish(["flwr", *arguments, "--format", "json"], self.env, _STEP_SECONDS)
        try:
            answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            answer = {}
        if done.returncode or not answer:
            raise RunError(f"flwr {' '.join(arguments[:1])}: {(done.stderr or done.stdout).strip()[-500:]}")
        return answer
