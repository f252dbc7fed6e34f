"""The process of a run on Flower's simulation engine, seen from the runner.

What imports PyTorch is not imported here, so that the process is started before the runner's own imports.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.running.guard import end_all_of
from fedkace_flwr.experiments.running.processes import CHECKOUT, flower_environment
from fedkace_flwr.storage.files import LARGEST_LOG, read_text

if TYPE_CHECKING:
    from fedkace_flwr.config import Config


class Simulation:
    """A process for one run on Flower's simulation engine, which makes its imports while it waits for the run.

    Its output goes to a file in a folder of its own until the run begins. The folder is also Flower's home, by which
    the processes that Ray detaches are found.

    Parameters
    ----------
    environment : mapping
        Environment variables.
    place : Path, optional
        Where to create the folder; by default in the system's temporary folder.
    """

    def __init__(self, environment: Mapping[str, str], place: Path | None = None) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="fedkace-flower-", dir=place))
        self._environment = dict(environment)
        self._early = self._log = self._home / "simulation.log"
        with self._early.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fedkace_flwr.experiments.running.simulation"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=CHECKOUT,
                env=flower_environment(self._home, environment),
            )

    def begin(
        self, config: "Config", log: Path, resources: Mapping[str, float], environment: Mapping[str, str] | None = None
    ) -> None:
        """Begin the run, whose output goes to ``log``.

        Parameters
        ----------
        config : Config
            The run.
        log : Path
            A file for its output, which is emptied.
        resources : mapping
            ``workers``, ``gpu_fraction`` and ``gpus`` of :func:`fedkace_flwr.experiments.running.simulation.run_simulation`.
        environment : mapping, optional
            Environment variables, where they have changed since the process was started.
        """
        changed = {name: value for name, value in (environment or {}).items() if self._environment.get(name) != value}
        what = {"config": config.flat(), "supernodes": config.stream.clients, **resources}
        line = json.dumps({"log": str(log.resolve()), "environment": changed, "run": what})
        log.write_text("")
        self._log = log
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as told:  # if it has ended, `check` says why
            told.write(line.encode() + b"\n")

    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def check(self) -> None:
        """Wait for the end of the run; raise RunError with the app's error message if it failed."""
        if self._process.wait() != 0:
            if not self._log.read_bytes():
                shutil.copyfile(self._early, self._log)
            raise RunError(f"{last_error(self._log)} (log: {self._log})")

    def stop(self) -> None:
        """End it now, with everything that it has started."""
        if self.running():  # else its processes have ended with it
            end_all_of("FLWR_HOME", str(self._home))
        self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)


def last_error(log: Path) -> str:
    """The last line of a log that names an error, or else its last line; frames of Flower's messages do not count."""
    text = read_text(log, LARGEST_LOG, "replace").splitlines()
    lines = [line.strip("│ \t") for line in text if not line.lstrip().startswith(("╭", "╰"))]
    lines = [line for line in lines if line]
    named = [line for line in lines if "Error" in line]
    return (named or lines or ["it left no output"])[-1]
