"""The folder of a study that runs in the background: its checkout, environment, command, results and lock."""

import fcntl
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from experiments.running.guard import all_of
from fedkace_flwr.errors import RunError
from fedkace_flwr.storage.files import read_text, write_text

LOWEST, NORMAL = "lowest", "normal"
MARK = "FEDKACE_BACKGROUND"
"""The environment variable by which the processes of a folder are recognised; its value is the folder."""


@dataclass(frozen=True)
class Command:
    """What runs in a folder.

    Attributes
    ----------
    commit : str
        The commit that the checkout is pinned to.
    python : str
        The interpreter.
    arguments : list of str
        The arguments of ``python -m experiments run``.
    directory : str
        The working directory, against which relative paths are resolved.
    priority : {"lowest", "normal"}
        Whether other work on the machine comes first.
    """

    commit: str
    python: str
    arguments: list[str]
    directory: str
    priority: str = LOWEST


class Folder:
    """Names and reads what lies in such a folder.

    Parameters
    ----------
    path : Path
        Outside of every checkout.

    Raises
    ------
    RunError
        The folder lies in a checkout, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        for parent in (self.path, *self.path.parents):
            try:
                in_checkout = (parent / ".git").exists()
            except OSError as error:
                raise RunError(
                    f"{path}: cannot be read ({error.strerror or error}); name one that you may read"
                ) from error
            if in_checkout:
                raise RunError(f"{path}: lies in the checkout {parent}; name a folder outside of it")
        self.source = self.path / "source"
        self.environment = self.path / "venv"
        self.results = self.path / "results"
        self.log = self.path / "runner.log"

    def lock(self) -> int | None:
        """Take the folder's lock and return its file descriptor; None where another process holds it.

        Every process that inherits the descriptor holds the lock until it ends.

        Raises
        ------
        RunError
            The folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return self._take(os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self.unwritable(error) from error

    def unwritable(self, error: OSError) -> RunError:
        """What to raise where the system refuses to write in the folder."""
        return RunError(f"{self.path}: cannot be written ({error.strerror or error}); choose a writable folder")

    def _take(self, flags: int) -> int | None:
        descriptor = os.open(self.path / "lock", flags, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    @property
    def locked(self) -> bool:
        """Whether the study runs, or is being prepared."""
        path = self.path / "lock"
        if not path.exists():
            return False
        descriptor = self._take(
            os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
        )  # NFS locks only what is written
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def processes(self) -> list[psutil.Process]:
        """All processes of the study."""
        return all_of(MARK, str(self.path))

    def command(self) -> Command | None:
        """What runs here; None before the first start.

        Raises
        ------
        RunError
            The record is damaged.
        """
        told = self.read("command.json")
        try:
            return None if told is None else Command(**told)
        except TypeError as error:
            raise RunError(f"{self.path / 'command.json'}: is damaged ({error}); start in another folder") from error

    def known_command(self) -> Command:
        """What runs here.

        Raises
        ------
        RunError
            Nothing was ever started here, or the record is damaged.
        """
        command = self.command()
        if command is None:
            raise RunError(f"{self.path}: holds no study; start one with: start {self.path} -- STUDY")
        return command

    def keep(self, command: Command) -> None:
        """Record what runs here."""
        self.write("command.json", asdict(command))

    def read(self, name: str) -> dict[str, Any] | None:
        """Read a JSON object; None where there is none."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            content = json.loads(read_text(path))
        except (OSError, RecursionError, ValueError) as error:
            raise RunError(f"{path}: cannot be read ({error})") from error
        return dict(content)

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON object, whole or not at all."""
        write_text(self.path / name, json.dumps(content, indent=1) + "\n")


def now() -> str:
    """The present local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def shown(arguments: Sequence[str]) -> str:
    """A command's arguments in an error message."""
    return " ".join(["run", *arguments])
