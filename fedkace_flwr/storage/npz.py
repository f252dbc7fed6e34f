"""Named arrays in NumPy's archive format, read with mistrust.

Only what :func:`pack` writes is read: uncompressed members of plain numbers. Each array's size is held against
the bytes that are there before anything is allocated, so a small file cannot ask for much memory.
"""

import io
import math
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fedkace_flwr.errors import StateError

Array = npt.NDArray[Any]

_KINDS = "biufc"  # truth values and numbers
_LONGEST_HEADER = 10_000


def pack(arrays: Mapping[str, Array]) -> memoryview:
    """An archive's bytes."""
    payload = io.BytesIO()
    columns: dict[str, Any] = dict(arrays)
    np.savez(payload, **columns)
    return payload.getbuffer()


def unpack(file: IO[bytes], size: int, only: str | None = None) -> dict[str, Array]:
    """Undo :func:`pack`.

    Parameters
    ----------
    file : binary file
        The archive; bytes before it do not matter.
    size : int
        Its bytes.
    only : str, optional
        The one array that is wanted, if it is there.

    Raises
    ------
    StateError
        It is not such an archive.
    """
    arrays: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > size:
                raise StateError("it promises more than it holds")
            for member in members:
                name = member.filename.removesuffix(".npy")
                if only is not None and name != only:
                    continue
                if member.compress_type != zipfile.ZIP_STORED or name in arrays:
                    raise StateError(f"its member {member.filename!r} is compressed, or there twice")
                arrays[name] = _array(archive.read(member))
    except (StateError, OSError, MemoryError):
        raise
    except Exception as error:  # the bytes may be anyone's, and the parsers below raise whatever they like
        raise StateError(f"it is no archive of arrays ({' '.join(str(error).split())})") from error
    return arrays


def _array(content: bytes) -> Array:
    file = io.BytesIO(content)
    shape, fortran_order, dtype = _header(file)
    if dtype.kind not in _KINDS:
        raise StateError(f"it holds an array of {dtype}")
    body = memoryview(content)[file.tell() :]
    # Python's whole numbers: a product of NumPy's could overflow to the right size.
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(body):
        raise StateError(f"it holds {len(body)} bytes for an array of {dtype} {shape}")
    flat = np.frombuffer(body, dtype=dtype).copy()
    return flat.reshape(shape, order="F" if fortran_order else "C")


def _header(file: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(file, max_header_size=_LONGEST_HEADER)
        if version == (2, 0):
            return np.lib.format.read_array_header_2_0(file, max_header_size=_LONGEST_HEADER)
    except Exception as error:  # it is read as a Python literal: nesting alone ends in four kinds of error
        raise StateError(f"an array's header cannot be read ({type(error).__name__})") from error
    raise StateError(f"an array is of format {version}")
