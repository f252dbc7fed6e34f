"""Headers of arrays in NumPy's own format, read from bytes that may be anyone's."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_LONGEST = 10_000


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
    try:
        shape, fortran_order, dtype = _READERS[version](file, max_header_size=longest)
    except Exception as error:  # it is parsed as a Python literal: nesting alone ends in four kinds of error
        raise HeaderError(f"a broken header: {type(error).__name__}") from error
    return Header(shape, fortran_order, dtype)
