"""Files that are whole or not there: arrays and one JSON record, versioned, checksummed, atomically replaced.

A file is a SHA-256 of what follows, then NumPy's archive format; nothing is pickled. Files are readable by
their owner only.
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkace_flwr.errors import StateError

VERSION = 1
_DIGEST_BYTES = 32

Array = npt.NDArray[Any]


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
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    payload = io.BytesIO()
    text = json.dumps({"version": VERSION, **record}, allow_nan=False).encode()
    columns: dict[str, Any] = {"record": np.frombuffer(text, dtype=np.uint8), **arrays}
    np.savez(payload, **columns)
    body = payload.getbuffer()
    partial = path.with_suffix(".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(hashlib.sha256(body).digest())
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def read(path: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Arrays and record of a file; None where there is none.

    Raises
    ------
    StateError
        The file is damaged, or of another version.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    body = memoryview(content)[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != content[:_DIGEST_BYTES]:
        raise StateError("its checksum does not match")
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        record = json.loads(arrays.pop("record").tobytes())
        version = record.pop("version")
    except (AttributeError, EOFError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise StateError(str(error)) from error
    if version != VERSION:
        raise StateError(f"it is of version {version}, this program reads {VERSION}")
    return arrays, record


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
    return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged file so that it is not read again; the new name."""
    aside = path.with_suffix(".corrupt")
    os.replace(path, aside)
    return aside
