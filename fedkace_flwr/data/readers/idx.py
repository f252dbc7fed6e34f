"""Arrays of bytes in idx files, the format of MNIST and of the data sets that follow it.

An idx file begins with two zero bytes, a byte for the type of its values (8: unsigned bytes) and the number of its
dimensions; their lengths follow, big-endian, in four bytes each, then the values. torchvision also reads such files, but
takes all of a file into memory before it looks at the header, unpacks nothing itself, and answers a damaged file with
whatever error comes first.
"""

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.errors import DataError
from fedkace_flwr.storage.files import open_regular

LARGEST = 2**30
"""Most values of an array; the largest published one, EMNIST's training images by class, has 547 million."""

_UNSIGNED_BYTES = 8
_AT_ONCE = 2**20


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes.

    Memory is taken as the values arrive, whatever the header says.

    Parameters
    ----------
    path : Path
        A regular file, packed with gzip if its name ends in ``.gz``.
    dimensions : int
        The number of dimensions that the array must have.

    Returns
    -------
    ndarray
        uint8, of the header's shape.

    Raises
    ------
    DataError
        The file cannot be read, is no idx file of such an array, is larger than :data:`LARGEST`, or holds fewer or more
        values than its header says.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    return _array(path, unpacked, dimensions)
            return _array(path, file, dimensions)
    except (OSError, EOFError, zlib.error) as fault:
        raise DataError(f"{path}: cannot be read ({getattr(fault, 'strerror', None) or fault})") from fault


def _array(path: Path, file: IO[bytes] | gzip.GzipFile, dimensions: int) -> NDArray[np.uint8]:
    magic = bytes((0, 0, _UNSIGNED_BYTES, dimensions))
    header = file.read(4 + 4 * dimensions)
    if len(header) < 4 + 4 * dimensions or not header.startswith(magic):
        raise DataError(
            f"{path}: begins with {header[:4].hex(' ') or 'nothing'}; must be an idx file of unsigned bytes in "
            f"{dimensions} dimension{'s' if dimensions > 1 else ''}, which begins with {magic.hex(' ')}"
        )
    shape = tuple(int(length) for length in np.frombuffer(header, ">u4", offset=4))
    size = math.prod(shape)
    if not size:
        raise DataError(f"{path}: its header names an array of {' x '.join(map(str, shape))}, which holds nothing")
    if size > LARGEST:
        raise DataError(f"{path}: its header names {size} values; at most {LARGEST} are read")
    values = bytearray()
    while len(values) < size and (block := file.read(min(_AT_ONCE, size - len(values)))):
        values += block
    if len(values) < size or file.read(1):
        held = f"{len(values)}" if len(values) < size else "more"
        raise DataError(f"{path}: its header names {size} values, it holds {held}; it is damaged")
    return np.frombuffer(values, np.uint8).reshape(shape)
