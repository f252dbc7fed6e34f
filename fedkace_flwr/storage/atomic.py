"""Files that are either whole or absent: arrays and one JSON record, versioned, checksummed, atomically replaced.

A file is an archive in NumPy's format without pickled content, with a checksum and, if the environment holds a key,
encrypted (:mod:`fedkace_flwr.storage.encryption`). Models for inference (:data:`MODELS`) are files of safetensors, which
hold a checksum themselves. Files are readable by their owner only, unless a group is named, and have at most so many
bytes as one process can be expected to hold.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.errors import ConfigError, StateError, UnreadableStateError
from fedkace_flwr.storage import encryption, npz
from fedkace_flwr.storage.files import IrregularFileError, LargeFileError, read_bytes, write_bytes
from fedkace_flwr.storage.folders import make_folder, sync_folder
from fedkace_flwr.storage.npz import Array

LIMIT = "FEDKACE_STATE_LIMIT"
"""The environment variable for the most MiB of a stored file."""

ARCHIVES, MODELS = ".npz", encryption.MODEL_FILES
"""How the names of the two kinds of files end."""

VERSION = 1
"""Version of files of which nothing else is said."""

Migrate = Callable[[dict[str, Array], dict[str, Any], int], tuple[dict[str, Array], dict[str, Any]]]
"""Map arrays, record and version of an older file to what the present version would hold."""

_MIB = 2**20
_USUAL_LIMIT = 2**30


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
    most : int, optional
        Most bytes that it may have, as in :func:`read`.

    Raises
    ------
    StateError
        It would have more bytes than are read; nothing is written.
    """
    text = json.dumps({"version": version, **record}, allow_nan=False).encode()
    write_body(path, npz.pack({"record": np.frombuffer(text, dtype=np.uint8), **arrays}), most=most)


def write_body(path: Path, body: bytes, *, most: int | None = None, group: int | None = None) -> None:
    """Replace a file, as :func:`write` does.

    Parameters
    ----------
    path, most
        As for :func:`write`.
    body : bytes
        What the file protects: an archive, or a file of safetensors.
    group : int, optional
        Number of a group that may read the file.

    Raises
    ------
    StateError
        As :func:`write`.
    """
    parts = encryption.seal(body, path)
    size, most = sum(map(len, parts)), limit() if most is None else most
    if size > most:
        raise StateError(f"{path}: would have {size} bytes, and at most {most} are read; {_raise_limit(size)}")
    make_folder(path.parent)
    write_bytes(path, *parts, mode=0o600, group=group)


def read(
    path: Path, newest: int = VERSION, migrate: Migrate | None = None, *, most: int | None = None
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
    most : int, optional
        Most bytes that it may have; by default :func:`limit`. Of a larger one nothing is read.

    Raises
    ------
    UnreadableStateError
        The file may be intact, but this process cannot read it: it has a newer version or too many bytes, no key
        opens it, or the system refuses.
    StateError
        The file is damaged.
    """
    with _explained():
        body = _body(path, most)
        if body is None:
            return None
        record, version = _record(body, newest)
        arrays = npz.unpack(body)
        del arrays["record"]
        if version < newest and migrate is not None:
            arrays, record = migrate(arrays, record, version)
        return arrays, record


def read_body(path: Path) -> bytes | None:
    """Undo :func:`write_body`; None if there is no file.

    Raises
    ------
    UnreadableStateError, StateError
        As :func:`read`.
    """
    with _explained():
        return _body(path, None)


def read_record(path: Path, newest: int = VERSION) -> dict[str, Any] | None:
    """A file's record alone, as it was written; None if there is no file. The arrays are not looked at.

    Raises
    ------
    UnreadableStateError, StateError
        As :func:`read`.
    """
    with _explained():
        body = _body(path, None)
        return None if body is None else _record(body, newest)[0]


def read_strings(path: Path) -> dict[str, Any] | None:
    """What a file of safetensors says beside its tensors, which are not looked at; None if there is no file.

    Raises
    ------
    UnreadableStateError, StateError
        As :func:`read`.
    """
    body = read_body(path)
    if body is None:
        return None
    try:
        strings = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise StateError("it is no file of safetensors") from error
    return strings if isinstance(strings, dict) else {}


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


def _body(path: Path, most: int | None) -> bytes | None:
    """What a file protects; None if there is no file."""
    try:
        content = read_bytes(path, limit() if most is None else most)
    except FileNotFoundError:
        return None
    return encryption.unseal(content, path)


def _record(body: bytes, newest: int) -> tuple[dict[str, Any], int]:
    """The record and its version, which this program must know."""
    arrays = npz.unpack(body, only="record")
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
