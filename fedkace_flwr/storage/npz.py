"""Named arrays in NumPy's archive format, read from files that are not trusted.

Only archives as written by :func:`pack` are accepted: uncompressed members of plain numbers. The size of each array
is compared with the bytes present before memory is allocated, so a small file cannot claim much memory.
"""

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkace_flwr.errors import StateError
from fedkace_flwr.npy import HeaderError, read_content, read_header

Array = npt.NDArray[Any]


def pack(arrays: Mapping[str, Array]) -> bytes:
    """Return an archive's bytes."""
    payload = io.BytesIO()
    columns: dict[str, Any] = dict(arrays)
    np.savez(payload, **columns)
    return payload.getvalue()  # a view of it, left in a cycle by an error, crashes Python 3.12.1 when it is collected


def unpack(body: bytes, only: str | None = None) -> dict[str, Array]:
    """Undo :func:`pack`.

    Parameters
    ----------
    body : bytes
        The archive.
    only : str, optional
        Read this array alone, if it is there.

    Raises
    ------
    StateError
        The bytes are not such an archive.
    """
    arrays: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > len(body):
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
    except Exception as error:  # the bytes are not trusted, and the parsers raise errors of any kind
        raise StateError(f"it is no archive of arrays ({' '.join(str(error).split())})") from error
    return arrays


def _array(content: bytes) -> Array:
    file = io.BytesIO(content)
    try:
        header = read_header(file)
        left = len(content) - file.tell()
        if header.size != left:
            raise HeaderError(f"{left} bytes for an array of {header.dtype} {header.shape}")
        return read_content(file, header)
    except HeaderError as error:
        raise StateError(f"an array cannot be read ({error})") from error
