"""Arrays in NumPy's own format, read from bytes that may be anyone's."""

import functools
import io
import math
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}
_LONGEST = 10_000
_KINDS = "biufc"  # booleans and numbers
_REMEMBERED = 1024  # different headers; a model has some dozens


class HeaderError(ValueError):
    """A header that cannot be read; the message is a short reason on one line."""


@dataclass(frozen=True)
class Header:
    """What an array's header says.

    Attributes
    ----------
    shape : tuple of int
        The shape; lengths may be of any sign and size.
    fortran_order : bool
        Whether the first index varies fastest.
    dtype : numpy.dtype
        The type of an element.
    """

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Bytes of the array's content; a Python integer, which cannot overflow. Negative lengths are possible."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(
    file: IO[bytes], *, longest: int = _LONGEST, versions: Collection[tuple[int, int]] = ((1, 0), (2, 0))
) -> Header:
    """Read a header and leave the file at the array's content; nothing is allocated for the content.

    Parameters
    ----------
    file : binary file
        At the start of the array.
    longest : int
        The most bytes that the header may have.
    versions : collection
        The accepted versions of the format.

    Raises
    ------
    HeaderError
        The bytes are no header, or one of another version.
    """
    try:
        version = np.lib.format.read_magic(file)
    except Exception as error:
        raise HeaderError(f"a broken header: {type(error).__name__}") from error
    if version not in versions or version not in _READERS:
        raise HeaderError(f"format {version[0]}.{version[1]}")
    length = file.read(_LENGTH_BYTES[version])
    size = int.from_bytes(length, "little")
    if size > longest:
        raise HeaderError(f"a header of {size} bytes")
    try:
        return _parsed(version, length + file.read(size))
    except Exception as error:  # it is parsed as a Python literal: nesting alone ends in four kinds of error
        raise HeaderError(f"a broken header: {type(error).__name__}") from error


@functools.lru_cache(_REMEMBERED)
def _parsed(version: tuple[int, int], content: bytes) -> Header:
    """Parsing takes longer than reading a small array, and the arrays of a model have few different headers."""
    return Header(*_READERS[version](io.BytesIO(content), max_header_size=len(content)))


def read_content(file: IO[bytes], header: Header, kinds: str = _KINDS) -> npt.NDArray[Any]:
    """Read the content that follows a header, of NumPy's kinds of types, into memory that can be written to.

    Raises
    ------
    HeaderError
        The header announces another kind of type, negative lengths, or more bytes than there are.
    """
    if header.dtype.kind not in kinds:
        raise HeaderError(f"an array of {header.dtype}")
    if min(header.shape, default=0) < 0:
        raise HeaderError(f"an array of shape {header.shape}")
    content = bytearray(file.read(min(header.size, sys.maxsize)))
    if len(content) != header.size:
        raise HeaderError(f"{len(content)} bytes for an array of {header.dtype} {header.shape}")
    flat = np.frombuffer(content, header.dtype)
    return flat.reshape(header.shape, order="F" if header.fortran_order else "C")


def read_array(content: bytes) -> npt.NDArray[Any]:
    """Read a serialised array, into memory that can be written to.

    Raises
    ------
    HeaderError
        The bytes are not an array of booleans or numbers.
    """
    file = io.BytesIO(content)
    return read_content(file, read_header(file))
