"""Flower's commands and the scripts of ``deploy/`` from Python, and the processes that they leave behind."""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

import fedkace_flwr
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.storage.targets import renewed

_PACKAGE = Path(fedkace_flwr.__file__).resolve().parent
ROOT = _PACKAGE.parent
"""Where Python finds the package: the project's folder in a checkout, otherwise where it is installed."""

_BESIDE = ("clients", "strategies", "experiments")  # in the app as in a checkout; in a wheel they are in the package

_END_SECONDS = 20
_LOOPBACK = "localhost,127.0.0.1,::1"  # never reached through a proxy
_APP = Path(__file__).parent / "app"  # what the app has beside packages; a wheel has no other copy


def staged_app(folder: Path) -> Path:
    """Copy only the files of the Flower app to a folder, and return the folder.

    ``flwr run`` visits every file below its folder, which in a checkout includes the virtual environment and all
    results. The bundle that it builds is identical for both folders.

    Parameters
    ----------
    folder : Path
        The folder: new, empty, or that of an earlier app, which is replaced.

    Raises
    ------
    ConfigError
        The folder holds something, or cannot be written.
    """
    copies = {"pyproject.toml": _APP / "description.toml", "LICENSE": _APP / "LICENSE"}
    description = copies["pyproject.toml"].read_text(encoding="utf-8")
    for pattern in set(tomllib.loads(description)["tool"]["flwr"]["app"]["fab-include"]) - copies.keys():
        root = _PACKAGE if pattern.startswith(_BESIDE) else ROOT
        places = {path.relative_to(root): path for path in root.glob(pattern)}
        copies |= {place.as_posix(): path for place, path in places.items() if place.parts[1] not in _BESIDE}
    try:
        with renewed(folder, "an app", private=False) as new:
            for name, path in copies.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, new / name)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror or error}); choose a writable folder"
        ) from error
    return folder


def flower_environment(home: Path, outside: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that puts this Python first and gives Flower a folder of its own, without telemetry.

    Parameters
    ----------
    home : Path
        Folder of Flower's settings and files.
    outside : mapping
        The environment variables to start from.
    """
    return {
        **outside,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{outside.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "NO_COLOR": "1",
        **{
            name: f"{outside[name]},{_LOOPBACK}" if outside.get(name) else _LOOPBACK
            for name in ("no_proxy", "NO_PROXY")
        },
    }


def finish(
    command: Sequence[str], environment: Mapping[str, str], seconds: float | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command and wait for it, but not for processes that it leaves behind.

    The output goes to files. A SuperNode's SuperExec inherits the output and lives until the SuperNode has been
    reaped. A pipe is read to its end before the process is reaped, so with pipes the two would wait for each other.

    Parameters
    ----------
    command : sequence of str
        Program and arguments.
    environment : mapping
        All environment variables of the command.
    seconds : float, optional
        Time limit.

    Raises
    ------
    subprocess.TimeoutExpired
        The command exceeds the time limit.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            command, env=dict(environment), stdout=output, stderr=errors, timeout=seconds, check=False
        )
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, output.read(), errors.read())


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
    """Kill every process with this environment variable and all their descendants."""
    found = all_of(name, value)
    for process in found:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=_END_SECONDS)
