"""Encrypting stored files anew: under another key, or for the first time.

Each file is read, checked, and replaced as a whole, one after the other. A process that is killed leaves every file
either as it was or done; started again, it goes on with those that are not done. Meanwhile the files can be used by
whoever has both keys.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from fedkace_flwr.errors import ConfigError, StateError
from fedkace_flwr.storage import atomic, encryption
from fedkace_flwr.storage.files import read_bytes, remove_partials, write_bytes
from fedkace_flwr.storage.ledger import NAME, Ledger
from fedkace_flwr.storage.places import home_of, place_of

_OURS = re.compile(r"((answer|checkpoint|state)-\d{6,}\.npz|models-\d{6,}\.safetensors)|" + re.escape(NAME), re.ASCII)
_STARTS = ("answer-", "checkpoint-", "models-", "state-", NAME)
_LARGEST = 2**40  # what this machine has written it can read


@dataclass
class Resealed:
    """What became of the files.

    Attributes
    ----------
    done, before : int
        Files that were encrypted now, and those that already were as wanted.
    aside : int
        Damaged files that were set aside earlier (``*.corrupt``); they are left as they are.
    faults : list of str
        One line for each file or folder that could not be used.
    """

    done: int = 0
    before: int = 0
    aside: int = 0
    faults: list[str] = field(default_factory=list)


def reseal(roots: Iterable[Path], *, migrate: bool) -> Resealed:
    """Encrypt the stored files below folders with the present key, in the present version.

    Parameters
    ----------
    roots : iterable of Path
        Folders of clients or of runs, or any above them.
    migrate : bool
        Whether plain files, and those of version 1, are encrypted too; otherwise they are reported.

    Raises
    ------
    ConfigError
        A root is no folder, or the environment does not hold the keys.
    """
    secret = encryption.key()
    if secret is None:
        raise ConfigError(f"{encryption.VARIABLE}: is not set; set it to the key that files are to have")
    encryption.key(variable=encryption.FORMER)
    result = Resealed()
    homes: dict[Path, set[Path]] = {}
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"{root}: is not a folder; must hold the state of clients or of runs")
        for path in _files(root.resolve()):
            homes.setdefault(home_of(path), set()).add(path.parent)
    for home, folders in sorted(homes.items()):
        try:
            with _alone(home):
                for folder in sorted(folders):
                    _reseal_folder(folder, secret, migrate, result)
                if migrate and any(home.glob("state-*.npz")):
                    Ledger(home).adopt()
        except (OSError, StateError) as error:
            result.faults.append(f"{home}: {error}")
    return result


def _reseal_folder(folder: Path, secret: bytes, migrate: bool, result: Resealed) -> None:
    remove_partials(folder, *_STARTS)
    for path in sorted(folder.iterdir()):
        if ".corrupt" in path.suffix:
            result.aside += 1
        elif _OURS.fullmatch(path.name):
            try:
                content = read_bytes(path, _LARGEST)
                group = _reading_group(path)
                wanted = secret if group is None else encryption.key_of_models() or secret
                if encryption.is_current(content, wanted):
                    result.before += 1
                    continue
                body, stamp = atomic.body_of(content, place_of(path), migrate)
                write_bytes(path, encryption.seal(body, wanted, place_of(path), stamp), mode=0o600, group=group)
                result.done += 1
            except (OSError, StateError) as error:
                result.faults.append(f"{path}: {error}")


def _reading_group(path: Path) -> int | None:
    """The group that a client has let read its models; None for any other file."""
    facts = path.stat()
    return facts.st_gid if path.name.startswith("models-") and facts.st_mode & stat.S_IRGRP else None


def _files(root: Path) -> Iterator[Path]:
    """The stored files below a root; links to folders are not followed."""
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names if _OURS.fullmatch(name))


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Keep the client or the run of a folder out."""
    lock = FileLock(home / ".lock", mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StateError("a process is at work on it; stop the SuperNode or the run, and try again") from None
    try:
        yield
    finally:
        lock.release()
