"""NVIDIA's Multi-Process Service, which lets the clients on a GPU compute at the same time instead of in turn.

It is a daemon that comes with NVIDIA's driver for Linux. The one started here listens in a folder of its own, so that it
neither uses nor disturbs another one, and ends with this object; if the runner is killed, the guard ends it.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.experiments.running.machine import VISIBLE

_CONTROL = "nvidia-cuda-mps-control"
_SECONDS = 60


class MultiProcessService:
    """The service for everything that is started with its environment.

    Parameters
    ----------
    environment : mapping
        Environment variables to start from.
    home : Path
        A folder for the service's pipes and logs; its path must be short, as the pipes are sockets.

    Attributes
    ----------
    environment : dict of str to str
        Environment variables for the processes that use the service.

    Raises
    ------
    ConfigError
        The service is not installed.
    RunError
        It does not start.
    """

    def __init__(self, environment: Mapping[str, str], home: Path) -> None:
        self._program = program(environment)
        folders = {"CUDA_MPS_PIPE_DIRECTORY": home / "mps", "CUDA_MPS_LOG_DIRECTORY": home / "mps-log"}
        for folder in folders.values():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = folders["CUDA_MPS_LOG_DIRECTORY"] / "control.log"
        self.environment = {**environment, **{name: str(folder) for name, folder in folders.items()}}

    def __enter__(self) -> Self:
        # The service would number the GPUs that are visible to it anew; it sees all, and each client says which it uses.
        own = {name: value for name, value in self.environment.items() if name != VISIBLE}
        try:
            done = subprocess.run([self._program, "-d"], env=own, capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"--mps: {_CONTROL} -d did not start ({error}); run without --mps") from error
        if done.returncode != 0:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            reason = lines[-1] if lines else f"exit status {done.returncode}"
            raise RunError(f"--mps: {_CONTROL} -d did not start ({reason}); run without --mps")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # If it has ended already there is nothing to end; what hangs is left to the guard.
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [self._program], input="quit\n", env=self.environment, capture_output=True, text=True, timeout=_SECONDS
            )


def program(environment: Mapping[str, str] = os.environ) -> str:
    """The path of the service's control program.

    Raises
    ------
    ConfigError
        It is not installed.
    """
    found = shutil.which(_CONTROL, path=environment.get("PATH"))
    if found is None:
        raise ConfigError(
            f"--mps: {_CONTROL} is not installed; it comes with NVIDIA's driver for Linux; run without --mps"
        )
    return found
