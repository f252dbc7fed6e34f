"""The operator's command for alarms (key ``on-alarm``): it mails, posts or rings, as a person is to be told."""

import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.storage.names import printable

logger = logging.getLogger(__name__)

_SECONDS = 60.0  # until the command is ended; the next round waits for it
_SAID = 200  # characters of what a command that fails says last


def check_command(config: Config) -> None:
    """Check that the command can be run.

    Raises
    ------
    ConfigError
        It cannot be split into words, or there is no such program.
    """
    try:
        words = shlex.split(config.run.on_alarm)
    except ValueError as fault:
        raise ConfigError(
            f"on-alarm = {config.run.on_alarm!r:.200}: must be a command line ({str(fault).lower()})"
        ) from fault
    if words and shutil.which(words[0]) is None:
        raise ConfigError(f"on-alarm = {config.run.on_alarm!r:.200}: {words[0]!r} must be a program that can be run")


def tell(config: Config, folder: Path, alarms: Sequence[Mapping[str, Any]]) -> None:
    """Run the command, if there is one, with a round's alarms as JSON in its input; log in one line if it fails.

    A server that is killed meanwhile may run it again for the same round, but not leave it out.

    Parameters
    ----------
    config : Config
        A configuration that has passed :func:`check_command`.
    folder : Path
        The run's folder.
    alarms : sequence of mapping
        The alarms, JSON-ready.
    """
    command = shlex.split(config.run.on_alarm)
    if not command:
        return
    told = json.dumps({"folder": str(folder.resolve()), "alarms": list(alarms)}).encode()
    try:
        failure = _run(command, told)
    except (OSError, ValueError) as fault:
        failure = str(fault)
    if failure:
        logger.warning("on-alarm: %s: %s", printable(command[0]), printable(failure))


def _run(command: Sequence[str], told: bytes) -> str:
    """Run a command with this input; how it failed, empty if it did not."""
    # A file for what it says: a pipe would be waited for as long as any process that the command leaves holds it.
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            process.communicate(told, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"was ended after {_SECONDS:g} seconds"
        output.seek(max(0, output.seek(0, os.SEEK_END) - _SAID))
        said = output.read().decode(errors="replace").strip()
        return f"ended with status {process.returncode}: {said}" if process.returncode else ""
