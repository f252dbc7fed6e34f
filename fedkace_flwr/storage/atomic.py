"""Files that are whole or not there: arrays and one JSON record, versioned, checksummed, atomically replaced.

A file is a SHA-256 of what follows, then NumPy's archive format, nothing pickled; or, where the environment holds
a key, the archive encrypted (:mod:`fedkace_flwr.storage.encryption`). Files are readable by their owner only.
"""

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.errors import StateError, UnreadableStateError
from fedkace_flwr.storage import encryption as sealing
from fedkace_flwr.storage import npz as archive
from fedkace_flwr.storage.npz import Array

logger = logging.getLogger(__name__)

VERSION = 1
_DIGEST_BYTES = 32


def write(path: Path, arrays: Mapping[str, Array], record: Mapping[str, Any]) -> None:
    """Replace a file; on disk before this returns.

    Parameters
    ----------
    path : Path
        Its folder is made if need be.
    arrays : mapping
        By any name but ``record``.
    record : mapping
        JSON-ready; without a key ``version``.
    """
    text = json.dumps({"version": VERSION, **record}, allow_nan=False).encode()
    body = archive.pack({"record": np.frombuffer(text, dtype=np.uint8), **arrays})
    secret = sealing.key()
    parts: list[bytes | memoryview] = (
        [hashlib.sha256(body).digest(), body] if secret is None else [sealing.seal(body, secret)]
    )
    make_folder(path.parent)
    partial = path.with_suffix(".partial")
    # What an earlier process left there may be open to others, or a link to elsewhere.
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
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


def read(path: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Arrays and record of a file; None where there is none.

    Raises
    ------
    UnreadableStateError
        The file may well be whole, and this process cannot read it: it is of a younger version, encrypted with
        another key, or the system refuses it.
    StateError
        The file is damaged.
    """
    with _explained():
        content = _content(path)
        if content is None:
            return None
        body = _body(path, content)
        record = _record(archive.unpack(io.BytesIO(body), len(body), only="record"))
        arrays = archive.unpack(io.BytesIO(body), len(body))
        del arrays["record"]
        return arrays, record


def read_record(path: Path) -> dict[str, Any] | None:
    """A file's record alone, its arrays not looked at, the plain file's checksum neither; None where there is none.

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
            if sealing.is_sealed(file.read(_DIGEST_BYTES)):
                file.seek(0)
                body = sealing.unseal(file.read())
                return _record(archive.unpack(io.BytesIO(body), len(body), only="record"))
            return _record(archive.unpack(file, os.fstat(file.fileno()).st_size, only="record"))


def make_folder(folder: Path) -> None:
    """Make a folder, for its owner only, and those above it; on disk before this returns."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_above(folder)


def sync_above(folder: Path) -> None:
    """Have a folder itself on disk: its entry above it, and so on upwards, as far as this user may look."""
    for above in folder.parents:
        with contextlib.suppress(PermissionError):
            sync_folder(above)


def sync_folder(folder: Path) -> None:
    """Have a folder's entries on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def numbered(folder: Path, kind: str) -> list[int]:
    """Numbers of a folder's files ``KIND-NUMBER.npz``, descending."""
    numbers = [path.stem.removeprefix(f"{kind}-") for path in folder.glob(f"{kind}-*.npz")]
    # Only as this package writes them: of two files of one number, one would be taken for the other.
    ours = [text for text in numbers if text.isascii() and text.isdecimal() and text == f"{int(text):06d}"]
    return sorted((int(text) for text in ours), reverse=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged file so that it is not read again, to a name that nothing has; the new name."""
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
    """Tell a damaged file from one that cannot be read just now."""
    try:
        yield
    except OSError as error:
        raise UnreadableStateError(f"it cannot be read ({error.strerror or error})") from error
    except MemoryError as error:
        raise UnreadableStateError("it does not fit into memory") from error


def _open(path: Path) -> int:
    """Open a file, and only a file: a pipe of its name would hold the reader up for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StateError("it is no file")
    return descriptor


def _content(path: Path) -> bytes | None:
    try:
        with open(_open(path), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _body(path: Path, content: bytes) -> bytes | memoryview:
    if sealing.is_sealed(content):
        return sealing.unseal(content)
    body = memoryview(content)[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != content[:_DIGEST_BYTES]:
        raise StateError("its checksum does not match")
    if sealing.key() is not None:
        _tell_of_plain_files(path.parent)
    return body


def _record(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The record, once its version is known to be ours."""
    try:
        record = json.loads(arrays["record"].tobytes(), parse_constant=_refuse)
        version = record.pop("version")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise StateError(f"its record cannot be read ({type(error).__name__})") from error
    if type(version) is not int or version < VERSION:
        raise StateError(f"it is of version {version!r}, which there never was")
    if version > VERSION:
        raise UnreadableStateError(f"it is of version {version}, this program reads {VERSION}; update the program")
    assert isinstance(record, dict)
    return record


def _refuse(name: str) -> None:
    raise ValueError(name)


@functools.cache
def _tell_of_plain_files(folder: Path) -> None:
    logger.warning(
        "%s holds files that are not encrypted, though %s is set; each is encrypted when it is next written",
        folder,
        sealing.VARIABLE,
    )
