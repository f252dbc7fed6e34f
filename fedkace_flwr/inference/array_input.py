"""Samples that are arrays of numbers, for a model that takes them: in memory, or as bytes that may be anyone's.

Shapes: n samples.
"""

import io
import json
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedkace_flwr.errors import DataError
from fedkace_flwr.npy import read_content, read_header

MAX_ARRAY_BYTES = 64 * 2**20
"""The most bytes of a file with arrays, packed or unpacked."""

_MAX_TEXT = 4 * 2**20  # in memory, a number of JSON takes many times its length

_ARRAY = "x"
_ZIP, _ENTRY, _MOST_ENTRIES = b"PK", b"PK\x01\x02", 64


def as_arrays_of(shape: tuple[int, ...], given: object) -> NDArray[np.float32]:
    """Check one sample or several, and return them as float32 (n, ...); nothing is converted.

    Raises
    ------
    DataError
        They are no array of float32, of another shape, or not finite.
    """
    array = given.cpu().numpy() if isinstance(given, Tensor) else given
    lengths = ", ".join(map(str, shape))
    wanted = f"must be float32 of shape ({lengths}{',' * (len(shape) == 1)}) or (n, {lengths})"
    if not isinstance(array, np.ndarray):
        raise DataError(f"the sample is a {type(array).__name__}; {wanted}")
    if array.dtype != np.float32 or array.shape[-len(shape) :] != shape or array.ndim > len(shape) + 1:
        raise DataError(f"the sample is {array.dtype} of shape {array.shape}; {wanted}")
    if not np.isfinite(array).all():
        raise DataError("the sample holds a value that is not finite")
    return np.ascontiguousarray(array.reshape(-1, *shape))


def read_samples(shape: tuple[int, ...], content: bytes) -> NDArray[np.float32]:
    """Read samples, float32 (n, ...): nested lists of numbers in JSON, or the array ``x`` of a file in format .npz.

    Numbers of JSON become float32; arrays must be.

    Raises
    ------
    DataError
        They cannot be read, or do not fit, as in :func:`as_arrays_of`.
    """
    if len(content) > MAX_ARRAY_BYTES:
        raise DataError(f"it has {len(content)} bytes; must be at most {MAX_ARRAY_BYTES}")
    return as_arrays_of(shape, _unpacked(content) if content.startswith(_ZIP) else _parsed(content))


def _unpacked(content: bytes) -> NDArray[Any]:
    if content.count(_ENTRY) > _MOST_ENTRIES:  # Python makes an object for each before any can be looked at
        raise DataError(f"it holds more than {_MOST_ENTRIES} parts; must be a .npz file with an array {_ARRAY!r}")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open(f"{_ARRAY}.npy") as member:
            header = read_header(member)
            if header.size > MAX_ARRAY_BYTES:
                raise DataError(f"{_ARRAY} has {header.size} bytes; must be at most {MAX_ARRAY_BYTES}")
            return read_content(member, header)
    except DataError:
        raise
    except Exception as fault:  # parsers may raise anything on damaged bytes
        text = " ".join(str(fault).split()) or type(fault).__name__
        raise DataError(f"it is no .npz file with an array {_ARRAY!r} ({text:.200})") from fault


def _parsed(content: bytes) -> NDArray[Any]:
    if len(content) > _MAX_TEXT:
        raise DataError(f"it is JSON of {len(content)} bytes; must be at most {_MAX_TEXT}, or a .npz file")
    try:
        array = np.array(json.loads(content))
    except (RecursionError, UnicodeDecodeError, ValueError) as fault:
        text = " ".join(str(fault).split())
        raise DataError(f"it is neither numbers in JSON nor a .npz file ({text:.200})") from fault
    if array.dtype.kind not in "iuf":
        raise DataError("it is JSON, but no list of numbers of equal lengths")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused
        return array.astype(np.float32)
