"""Files that are either whole or absent: arrays and one JSON record, versioned, checksummed, atomically replaced.

A file is a SHA-256 of the rest, followed by an archive in NumPy's format without pickled content; or, if the
environment holds a key, the archive encrypted (:mod:`fedkace_flwr.storage.encryption`). Files are readable by their
owner only, unless a group is named. :func:`write_text` and :func:`write_bytes` replace any other file in the same way.
"""

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.errors import StateError, UnreadableStateError
from fedkace_flwr.storage import encryption, npz
from fedkace_flwr.storage.npz import Array

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of files of which nothing else is said."""

Migrate = Callable[[dict[str, Array], dict[str, Any], int], tuple[dict[str, Array], dict[str, Any]]]
"""Map arrays, record and version of an older file to what the present version would hold."""

_DIGEST_BYTES = 32


def write(
    path: Path,
    arrays: Mapping[str, Array],
    record: Mapping[str, Any],
    *,
    version: int = VERSION,
    group: int | None = None,
    secret: bytes | None = None,
) -> None:
    """Replace a file; it is on disk before this returns.

    Parameters
    ----------
    path : Path
        Its folder is made if necessary.
    arrays : mapping
        By any name but ``record``.
    record : mapping
        JSON-ready; without a key ``version``.
    version : int
        Version of the content.
    group : int, optional
        Number of a group that may read the file.
    secret : bytes, optional
        Key to encrypt it with, in place of the one in the environment.
    """
    text = json.dumps({"version": version, **record}, allow_nan=False).encode()
    body = npz.pack({"record": np.frombuffer(text, dtype=np.uint8), **arrays})
    secret = secret or encryption.key()
    make_folder(path.parent)
    if secret is None:
        write_bytes(path, hashlib.sha256(body).digest(), body, mode=0o600, group=group)
    else:
        write_bytes(path, encryption.seal(body, secret), mode=0o600, group=group)


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace a text file, in UTF-8; see :func:`write_bytes`."""
    write_bytes(path, text.encode(), mode=mode)


def write_bytes(path: Path, *parts: bytes | memoryview, mode: int = 0o666, group: int | None = None) -> None:
    """Replace a file: write beside it, synchronise, rename, synchronise the folder.

    At any moment the file is the old one or the new one; the new one is on disk before this returns.

    Parameters
    ----------
    path : Path
        In an existing folder. The file beside it is ``NAME.partial``.
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
    partial = path.with_name(f"{path.name}.partial")
    # A file that an earlier process left there may be open to others, or a link to elsewhere.
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
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
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def read(
    path: Path, newest: int = VERSION, migrate: Migrate | None = None
) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Arrays and record of a file; None if there is none.

    Parameters
    ----------
    path : Path
        The file.
    newest : int
        The newest version that the caller knows.
    migrate : callable, optional
        Brings the content of older versions to the newest.

    Raises
    ------
    UnreadableStateError
        The file may be intact, but this process cannot read it: it has a newer version, is encrypted with another
        key, or the system refuses.
    StateError
        The file is damaged.
    """
    with _explained():
        content = _content(path)
        if content is None:
            return None
        body = _body(path, content)
        record, version = _record(npz.unpack(io.BytesIO(body), len(body), only="record"), newest)
        arrays = npz.unpack(io.BytesIO(body), len(body))
        del arrays["record"]
        if version < newest and migrate is not None:
            return migrate(arrays, record, version)
        return arrays, record


def read_record(path: Path, newest: int = VERSION) -> dict[str, Any] | None:
    """A file's record alone, as it was written; None if there is no file.

    Neither the arrays nor a plain file's checksum are checked.

    Raises
    ------
    UnreadableStateError, StateError
        As :func:`read`.
    """
    with _explained():
        try:
            file = open(_open(path), "rb")  # noqa: SIM115  # closed below
        except FileNotFoundError:
            return None
        with file:
            if encryption.is_sealed(file.read(_DIGEST_BYTES)):
                file.seek(0)
                body = encryption.unseal(file.read())
                return _record(npz.unpack(io.BytesIO(body), len(body), only="record"), newest)[0]
            size = os.fstat(file.fileno()).st_size
            return _record(npz.unpack(file, size, only="record"), newest)[0]


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, for their owner only; on disk before this returns."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def path_of(folder: Path, kind: str, number: int) -> Path:
    """A folder's file ``KIND-NUMBER.npz``."""
    return folder / f"{kind}-{number:06d}.npz"


def numbered(folder: Path, kind: str) -> list[int]:
    """Numbers of a folder's files ``KIND-NUMBER.npz``, descending."""
    numbers = [path.stem.removeprefix(f"{kind}-") for path in folder.glob(f"{kind}-*.npz")]
    # Only numbers as this package writes them: otherwise two files could have the same number.
    ours = [text for text in numbers if text.isascii() and text.isdecimal() and text == f"{int(text):06d}"]
    return sorted((int(text) for text in ours), reverse=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged file, to an unused name, so that it is not read again; return the new name."""
    aside, number = path.with_suffix(".corrupt"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_suffix(f".corrupt-{number}")
    os.replace(path, aside)
    sync_folder(path.parent)
    return aside


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Distinguish a damaged file from one that cannot be read at the moment."""
    try:
        yield
    except OSError as error:
        raise UnreadableStateError(f"it cannot be read ({error.strerror or error})") from error
    except MemoryError as error:
        raise UnreadableStateError("it does not fit into memory") from error


def _open(path: Path) -> int:
    """Open a regular file only: a pipe of that name would block the reader for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StateError("it is not a regular file")
    return descriptor


def _content(path: Path) -> bytes | None:
    try:
        with open(_open(path), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _body(path: Path, content: bytes) -> bytes | memoryview:
    if encryption.is_sealed(content):
        return encryption.unseal(content)
    body = memoryview(content)[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != content[:_DIGEST_BYTES]:
        raise StateError("its checksum does not match")
    if encryption.key() is not None:
        _tell_of_plain_files(path.parent)
    return body


def _record(arrays: Mapping[str, Array], newest: int) -> tuple[dict[str, Any], int]:
    """The record and its version, which this program must know."""
    try:
        record = json.loads(arrays["record"].tobytes(), parse_constant=_refuse)
        version = record.pop("version")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise StateError(f"its record cannot be read ({type(error).__name__})") from error
    if type(version) is not int or version < 1:
        raise StateError(f"it has version {version!r}, which does not exist")
    if version > newest:
        raise UnreadableStateError(f"it has version {version}, this program reads up to {newest}; update the program")
    assert isinstance(record, dict)
    return record, version


def _refuse(name: str) -> None:
    raise ValueError(name)


@functools.cache
def _tell_of_plain_files(folder: Path) -> None:
    logger.warning(
        "%s holds files that are not encrypted although %s is set; each is encrypted when it is next written",
        folder,
        encryption.VARIABLE,
    )
