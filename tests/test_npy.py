"""Arrays in NumPy's own format."""

import io

import numpy as np
import pytest

from fedkace_flwr.npy import HeaderError, read_array, read_content, read_header


def serialised(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(3, dtype=np.int64),
        np.zeros((0, 4), dtype=np.uint8),
        np.array([True, False]),
        np.array([1 + 2j]),
    ],
    ids=["matrix", "Fortran order", "scalar", "empty", "booleans", "complex"],
)
def test_an_array_comes_back_as_it_was(array: np.ndarray) -> None:
    found = read_array(serialised(array))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype and found.flags.f_contiguous == array.flags.f_contiguous


def test_arrays_of_one_header_share_nothing() -> None:
    first, second = (read_array(serialised(np.full(3, value))) for value in (1.0, 2.0))
    first += 10
    assert first.tolist() == [11, 11, 11] and second.tolist() == [2, 2, 2]


def test_the_file_is_left_after_the_array() -> None:
    file = io.BytesIO(serialised(np.arange(3)) + b"rest")
    assert read_content(file, read_header(file)).tolist() == [0, 1, 2]
    assert file.read() == b"rest"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (serialised(np.arange(3))[:-1], "23 bytes for an array of int64 (3,)"),
        (serialised(np.arange(3))[:40], "a broken header: ValueError"),
        (serialised(np.arange(3)).replace(b"(3,)", b"(-3,)"), "an array of shape (-3,)"),
        (serialised(np.array([None])), "an array of object"),
        (serialised(np.array(["a"])), "an array of <U1"),
        (b"\x93NUMPY\2\0\xff\xff\xff\xff", "a header of 4294967295 bytes"),
        (b"PK\3\4", "a broken header: ValueError"),
    ],
    ids=["cut content", "cut header", "negative length", "objects", "text", "long header", "another format"],
)
def test_what_is_no_array_of_numbers_is_refused_in_one_line(content: bytes, reason: str) -> None:
    with pytest.raises(HeaderError) as caught:
        read_array(content)
    assert str(caught.value) == reason
