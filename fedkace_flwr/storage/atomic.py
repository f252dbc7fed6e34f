"""Files that are either whole or absent: arrays and one JSON record, versioned, checksummed, atomically replaced.

A file is a SHA-256 of the rest, followed by an archive in NumPy's format without pickled content; or, if the
environment holds a key, the archive encrypted (:mod:`fedkace_flwr.storage.encryption`). Models for inference
(:data:`MODELS`) are files of safetensors, which hold a checksum themselves. Files are readable by their owner only,
unless a group is named, and have at most so many bytes as one process can be expected to hold.
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedkace_flwr.errors import ConfigError, StateError, UnreadableStateError
from fedkace_flwr.storage import encryption, npz
from fedkace_flwr.storage.files import IrregularFileError, LargeFileError, open_regular, read_bytes, write_bytes
from fedkace_flwr.storage.folders import make_folder, sync_folder
from fedkace_flwr.storage.npz import Array
from fedkace_flwr.storage.places import place_of

LIMIT = "FEDKACE_STATE_LIMIT"
"""The environment variable for the most MiB of a stored file."""

ARCHIVES, MODELS = ".npz", ".safetensors"
"""How the names of the two kinds of files end."""

VERSION = 1
"""Version of files of which nothing else is said."""

Migrate = Callable[[dict[str, Array], dict[str, Any], int], tuple[dict[str, Array], dict[str, Any]]]
"""Map arrays, record and version of an older file to what the present version would hold."""

_DIGEST_BYTES = 32
_MIB = 2**20
_USUAL_LIMIT = 2**30


class Stored(NamedTuple):
    """The content of a file."""

    arrays: dict[str, Array]
    record: dict[str, Any]
    stamp: bytes | None
    """The stamp of its write; None in plain files, and in sealed ones of version 1."""


def limit(environment: Mapping[str, str] = os.environ) -> int:
    """Most bytes of a stored file: 1 GiB, unless the environment says otherwise.

    Raises
    ------
    ConfigError
        The variable does not hold a positive number.
    """
    text = environment.get(LIMIT, "").strip()
    if not text:
        return _USUAL_LIMIT
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise ConfigError(f"{LIMIT} = {text!r:.40}: must be a whole number of MiB, at least 1, for example 4096")
    return int(text) * _MIB


def write(
    path: Path,
    arrays: Mapping[str, Array],
    record: Mapping[str, Any],
    *,
    version: int = VERSION,
    stamp: bytes | None = None,
    most: int | None = None,
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
    stamp : bytes, optional
        By which the write of a sealed file is to be recognised.
    most : int, optional
        Most bytes that it may have, as in :func:`read`.

    Raises
    ------
    StateError
        It would have more bytes than are read; nothing is written.
    """
    text = json.dumps({"version": version, **record}, allow_nan=False).encode()
    write_body(path, npz.pack({"record": np.frombuffer(text, dtype=np.uint8), **arrays}), stamp=stamp, most=most)


def write_body(
    path: Path,
    body: bytes,
    *,
    stamp: bytes | None = None,
    most: int | None = None,
    group: int | None = None,
    secret: bytes | None = None,
) -> None:
    """Replace a file, as :func:`write` does.

    Parameters
    ----------
    path, stamp, most
        As for :func:`write`.
    body : bytes
        What the file protects: an archive, or a file of safetensors.
    group : int, optional
        Number of a group that may read the file.
    secret : bytes, optional
        Key to encrypt it with, in place of the one in the environment.

    Raises
    ------
    StateError
        As :func:`write`.
    """
    most = limit() if most is None else most
    if len(body) > most:
        raise StateError(
            f"{path}: would have {len(body)} bytes, and at most {most} are read; {_raise_limit(len(body))}"
        )
    secret = secret or encryption.key()
    make_folder(path.parent)
    if secret is not None:
        parts = [encryption.seal(body, secret, place_of(path), stamp)]
    else:
        parts = [body] if path.suffix == MODELS else [hashlib.sha256(body).digest(), body]
    write_bytes(path, *parts, mode=0o600, group=group)


def read(
    path: Path, newest: int = VERSION, migrate: Migrate | None = None, *, most: int | None = None
) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Arrays and record of a file, as :func:`read_stored` returns them; None if there is none."""
    stored = read_stored(path, newest, migrate, most=most)
    return None if stored is None else (stored.arrays, stored.record)


def read_stored(
    path: Path, newest: int = VERSION, migrate: Migrate | None = None, *, most: int | None = None
) -> Stored | None:
    """The content of a file; None if there is none.

    Parameters
    ----------
    path : Path
        The file.
    newest : int
        The newest version that the caller knows.
    migrate : callable, optional
        Brings the content of older versions to the newest.
    most : int, optional
        Most bytes that it may have; by default :func:`limit`. Of a larger one nothing is read.

    Raises
    ------
    UnreadableStateError
        The file may be intact, but this process cannot read it: it has a newer version or too many bytes, is
        encrypted with another key or belongs to another owner, is not protected by the key that is set, or the system
        refuses.
    StateError
        The file is damaged, or was written under another name.
    """
    with _explained():
        body, stamp = _body(path, most)
        if body is None:
            return None
        record, version = _record(npz.unpack(io.BytesIO(body), len(body), only="record"), newest)
        arrays = npz.unpack(io.BytesIO(body), len(body))
        del arrays["record"]
        if version < newest and migrate is not None:
            arrays, record = migrate(arrays, record, version)
        return Stored(arrays, record, stamp)


def read_body(path: Path) -> bytes | memoryview | None:
    """Undo :func:`write_body`; None if there is no file.

    Raises
    ------
    UnreadableStateError, StateError
        As :func:`read_stored`.
    """
    with _explained():
        return _body(path, None)[0]


def read_record(path: Path, newest: int = VERSION) -> dict[str, Any] | None:
    """A file's record alone, as it was written; None if there is no file.

    Neither the arrays nor a plain file's checksum are checked.

    Raises
    ------
    UnreadableStateError, StateError
        As :func:`read_stored`.
    """
    with _explained():
        try:
            file = os.fdopen(open_regular(path), "rb")
        except FileNotFoundError:
            return None
        with file:
            sealed = encryption.is_sealed(file.read(_DIGEST_BYTES))
            if not sealed:
                size = os.fstat(file.fileno()).st_size
                if size > limit():
                    raise LargeFileError(size, limit())
                record = _record(npz.unpack(file, size, only="record"), newest)[0]
                encryption.check_plain(place_of(path))
                return record
        body, _ = _body(path, None)
        return None if body is None else _record(npz.unpack(io.BytesIO(body), len(body), only="record"), newest)[0]


def path_of(folder: Path, kind: str, number: int, suffix: str = ARCHIVES) -> Path:
    """A folder's file ``KIND-NUMBER.npz``, or one with another suffix."""
    return folder / f"{kind}-{number:06d}{suffix}"


def numbered(folder: Path, kind: str, suffix: str = ARCHIVES) -> list[int]:
    """Numbers of a folder's files ``KIND-NUMBER.npz``, or with another suffix, descending."""
    numbers = [path.stem.removeprefix(f"{kind}-") for path in folder.glob(f"{kind}-*{suffix}")]
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


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Distinguish a damaged file from one that cannot be read at the moment."""
    try:
        yield
    except IrregularFileError as error:
        raise StateError(str(error.strerror)) from error
    except LargeFileError as error:
        raise UnreadableStateError(f"{error.strerror}; move it away, or {_raise_limit(error.size)}") from error
    except OSError as error:
        raise UnreadableStateError(f"it cannot be read ({error.strerror or error})") from error
    except MemoryError as error:
        raise UnreadableStateError("it does not fit into memory") from error


def _raise_limit(size: int) -> str:
    return f"set {LIMIT} to at least {-(-size // _MIB)} (MiB)"


def _body(path: Path, most: int | None) -> tuple[bytes | memoryview | None, bytes | None]:
    """What a file protects, and the stamp of its write; None and None if there is no file."""
    try:
        content = read_bytes(path, limit() if most is None else most)
    except FileNotFoundError:
        return None, None
    return body_of(content, place_of(path))


def body_of(content: bytes, place: str, migrate: bool | None = None) -> tuple[bytes | memoryview, bytes | None]:
    """What a file's content protects, and the stamp of its write.

    Parameters
    ----------
    content : bytes
        The file's content.
    place : str
        Where the file lies.
    migrate : bool, optional
        Whether files are taken over that the key does not protect; by default as the environment says.

    Raises
    ------
    UnreadableStateError, StateError
        As :func:`read_stored`.
    """
    if encryption.is_sealed(content):
        return encryption.unseal(content, place, migrate)
    body = memoryview(content)
    if not place.endswith(MODELS):
        body = body[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != content[:_DIGEST_BYTES]:
            raise StateError("its checksum does not match")
    encryption.check_plain(place, migrate)
    return body, None


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
