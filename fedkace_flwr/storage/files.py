"""Files that others may have written, or may be reading: read with a bound, and replaced as a whole.

Every file that this package replaces is written by :func:`write_bytes`, so that links and leftovers at its place are
neither followed nor overwritten.
"""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from fedkace_flwr.storage.folders import sync_folder

PARTIAL = ".partial"
"""How the names of half-written files end."""

LARGEST_TEXT = 2**24
"""Most bytes of a text file that holds one record, such as a configuration or a summary."""

LARGEST_LOG = 2**30
"""Most bytes of a text file that grows with a run."""


class IrregularFileError(OSError):
    """Something that is not a regular file: a pipe, a device, a folder."""

    def __init__(self) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file")


class LargeFileError(OSError):
    """A file that has more bytes than are read.

    Parameters
    ----------
    size, most : int
        The bytes that it has, and those that would be read.
    """

    def __init__(self, size: int, most: int) -> None:
        super().__init__(errno.EFBIG, f"it has {size} bytes; at most {most} are read")
        self.size = size


def open_regular(path: Path | str, *, at: int | None = None, follow: bool = True) -> int:
    """Open a regular file for reading, without waiting for anything.

    Parameters
    ----------
    path : path-like
        The file.
    at : int, optional
        Descriptor of the folder that a relative path starts from.
    follow : bool
        Whether the path's last part may be a symbolic link.

    Returns
    -------
    int
        A file descriptor, to be closed by the caller. What it refers to has been checked, and does not change.

    Raises
    ------
    IrregularFileError
        It is something else. A pipe without a writer would block its reader for ever.
    OSError
        It cannot be opened; ELOOP for a link that is not to be followed.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=at)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IrregularFileError
    return descriptor


def read_open(descriptor: int, most: int) -> bytes:
    """Read an open file from its start; the descriptor stays open.

    Of a file that grows meanwhile, what it held at first is returned.

    Raises
    ------
    LargeFileError
        It has more than ``most`` bytes; nothing has been read.
    """
    size = os.fstat(descriptor).st_size
    if size > most:
        raise LargeFileError(size, most)
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read(size)


def read_bytes(path: Path, most: int, *, follow: bool = True) -> bytes:
    """Read a regular file of at most so many bytes; ``follow`` as for :func:`open_regular`.

    Raises
    ------
    IrregularFileError, LargeFileError, OSError
        As :func:`open_regular` and :func:`read_open`.
    """
    descriptor = open_regular(path, follow=follow)
    try:
        return read_open(descriptor, most)
    finally:
        os.close(descriptor)


def read_text(path: Path, most: int = LARGEST_TEXT, errors: str = "strict") -> str:
    """Read a regular file of at most so many bytes as UTF-8.

    Raises
    ------
    IrregularFileError, LargeFileError, OSError
        As :func:`read_bytes`.
    UnicodeDecodeError
        It is not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8", errors)


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace a text file, in UTF-8; see :func:`write_bytes`."""
    write_bytes(path, text.encode(), mode=mode)


def write_bytes(path: Path, *parts: bytes | memoryview, mode: int = 0o666, group: int | None = None) -> None:
    """Replace a file: write beside it, synchronise, rename, synchronise the folder.

    At any moment the file is the old one or the new one; the new one is on disk before this returns. Any number of
    processes may do so at once. The file beside it, ``NAME.RANDOM.partial``, is always a new one: a link that was put
    there is not followed, and one that was put in the file's place is replaced and not followed either.

    Parameters
    ----------
    path : Path
        In an existing folder.
    parts : bytes-like
        The content, one part after the other.
    mode : int
        Permissions, less the umask.
    group : int, optional
        Number of a group that may read the file, whatever the umask.

    Raises
    ------
    OSError
        The system refuses; the old file is left as it was.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        try:
            if group is not None:
                os.fchown(descriptor, -1, group)
                os.fchmod(descriptor, mode | stat.S_IRGRP)
            for part in parts:
                _write_all(descriptor, memoryview(part))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def append_text(path: Path, text: str) -> None:
    """Append to a text file, in UTF-8, or begin it; it is on disk before this returns.

    Raises
    ------
    OSError
        The system refuses, or the path is a link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe's reader is not waited for
    descriptor = os.open(path, flags, 0o666)
    try:
        _write_all(descriptor, memoryview(text.encode()))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partials(folder: Path, *starts: str) -> None:
    """Remove what killed processes left half-written of files whose names begin like this; by default, of all.

    Nobody else may be writing such files: the caller holds the folder's lock.
    """
    for path in folder.glob(f"*{PARTIAL}"):
        if path.name.startswith(starts or ("",)):
            with contextlib.suppress(OSError):  # a folder, for example, which this package did not make
                path.unlink()


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
