"""Running Flower's commands and the scripts of ``deploy/`` from a program."""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder of the project."""


def staged_app(folder: Path) -> Path:
    """Put what makes up the Flower app alone into a new folder, and return it.

    ``flwr run`` visits every file below the folder that it is told, in a checkout also those of a virtual environment
    and of all results; what it makes of either folder is the same to the last byte.

    Parameters
    ----------
    folder : Path
        Does not exist yet.
    """
    description = CHECKOUT / "pyproject.toml"
    patterns = tomllib.loads(description.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["fab-include"]
    for path in [description, *(path for pattern in patterns for path in CHECKOUT.glob(pattern))]:
        target = folder / path.relative_to(CHECKOUT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return folder


def flower_environment(home: Path, outside: Mapping[str, str]) -> dict[str, str]:
    """An environment in which this Python comes first and Flower keeps to a folder of its own and to itself.

    Parameters
    ----------
    home : Path
        For Flower's settings and files.
    outside : mapping
        What else the processes shall see.
    """
    return {
        **outside,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{outside.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "NO_COLOR": "1",
    }


def finish(
    command: Sequence[str], environment: Mapping[str, str], seconds: float | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, and no longer.

    A SuperNode's SuperExec inherits its output and lives until the SuperNode's entry is gone from the process table.
    With pipes, which are read to their end before the entry is taken out, the two would wait for each other.

    Parameters
    ----------
    command : sequence of str
        Program and arguments.
    environment : mapping
        The whole of it.
    seconds : float, optional
        How long at most.

    Raises
    ------
    subprocess.TimeoutExpired
        It takes longer.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            command, env=dict(environment), stdout=output, stderr=errors, timeout=seconds, check=False
        )
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, output.read(), errors.read())
