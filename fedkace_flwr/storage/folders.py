"""Folders: made for their owner alone, synchronised, and held open so that no name in them leads elsewhere."""

import contextlib
import os
import shutil
import stat
from pathlib import Path
from typing import Self

from fedkace_flwr.errors import ConfigError

EARLIER = "earlier"
PAST = "past"
"""The folder in a client's folder that holds the files of earlier runs, ``earlier/RUN/``."""

_WRITERS = 0o022


def absolute(path: str, what: str) -> Path:
    """Return a path that a user has given, or that is the default of ``what``, without ``~`` and links.

    Raises
    ------
    ConfigError
        It begins with ``~``, and there is no such home.
    """
    try:
        return Path(path).expanduser().resolve()
    except RuntimeError as error:
        raise ConfigError(f"{path}: this user has no such home folder; set {what}, or HOME") from error


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each for its owner only; on disk before this returns."""
    if folder.is_dir():
        return
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):  # one by one: `parents=True` would give those above the usual permissions
        path.mkdir(mode=0o700, exist_ok=True)
    sync_above(folder)


def sync_above(folder: Path) -> None:
    """Synchronise all folders above a folder, as far as this user may read them."""
    for above in folder.parents:
        with contextlib.suppress(PermissionError):
            sync_folder(above)


def sync_folder(folder: Path) -> None:
    """Synchronise a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class OpenFolder:
    """A folder that is held open: names are looked up in it, whatever takes the place of its path meanwhile.

    No method follows a symbolic link. Use it in a ``with`` block, which closes it.

    Parameters
    ----------
    path : Path
        Where it is, for messages.
    descriptor : int
        Its file descriptor, which now belongs to this object.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open a folder by its path, which may be a link.

        Raises
        ------
        OSError
            It is no folder, or cannot be read.
        """
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY))

    def within(self, name: str) -> Self:
        """Open a folder in this one.

        Raises
        ------
        OSError
            It is no folder, or cannot be read; ENOTDIR or ELOOP for a link.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        return type(self)(self.path / name, os.open(name, flags, dir_fd=self.descriptor))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.descriptor)

    @property
    def device(self) -> int:
        """The number of the file system that it is on."""
        return os.fstat(self.descriptor).st_dev

    @property
    def longest(self) -> int:
        """Most bytes of a name in it."""
        return os.fpathconf(self.descriptor, "PC_NAME_MAX")

    def entries(self) -> list[tuple[str, bool]]:
        """Names in it, in order, each with whether it is a folder."""
        with os.scandir(self.descriptor) as found:
            return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in found)

    def has(self, name: str) -> bool:
        """Whether there is anything of that name."""
        return self._mode(name) is not None

    def has_folder(self, name: str) -> bool:
        """Whether there is a folder of that name."""
        return stat.S_ISDIR(self._mode(name) or 0)

    def make(self, name: str) -> bool:
        """Make a folder for its owner only, unless something of that name is there; return whether it was made."""
        try:
            os.mkdir(name, 0o700, dir_fd=self.descriptor)
        except FileExistsError:
            return False
        return True

    def open_as(self, other: "OpenFolder") -> None:
        """Give this folder the permissions of another."""
        os.fchmod(self.descriptor, stat.S_IMODE(os.fstat(other.descriptor).st_mode))

    def move(self, name: str, target: "OpenFolder", new: str) -> None:
        """Rename an entry into another folder of the same file system."""
        os.rename(name, new, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def create(self, name: str, content: bytes) -> None:
        """Write a new file, readable by its owner only; FileExistsError if anything of that name is there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)

    def remove(self, name: str) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=self.descriptor)

    def remove_tree(self, name: str) -> None:
        """Remove a folder with everything in it."""
        shutil.rmtree(name, dir_fd=self.descriptor)

    def close_to_writers(self) -> bool:
        """Take other users' permission to write away; return whether they had it and have it no more."""
        mode = stat.S_IMODE(os.fstat(self.descriptor).st_mode)
        if not mode & _WRITERS:
            return False
        with contextlib.suppress(PermissionError):
            os.fchmod(self.descriptor, mode & ~_WRITERS)
        return not stat.S_IMODE(os.fstat(self.descriptor).st_mode) & _WRITERS

    def sync(self) -> None:
        """Synchronise its entries to the disk."""
        os.fsync(self.descriptor)

    def _mode(self, name: str) -> int | None:
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return None
