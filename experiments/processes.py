"""Running Flower's commands and the scripts of ``deploy/`` from a program."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


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
