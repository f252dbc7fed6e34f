"""Reading labelled images that other programs have written: an ``.npz``, or a picture in the folder of its class.

No file is trusted: sizes are checked before memory is allocated, and every fault is raised as a
:class:`~fedkace_flwr.errors.DataError` that says what would be right.
"""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data.images import Framing, read_square
from fedkace_flwr.data.pixels import SUFFIXES
from fedkace_flwr.errors import DataError
from fedkace_flwr.npy import HeaderError, read_header

LARGEST_FILE = 2**28
"""Largest size of the arrays of one file, unpacked, in bytes."""

_UNFINISHED = (".part", ".partial", ".tmp")
_ARCHIVE = ".npz"
_IMAGES, _LABELS = "images", "labels"
_WANTED = f"an .npz with {_IMAGES} and {_LABELS}, or a picture ({', '.join(SUFFIXES)}) in the folder of its class"

Arrived = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images, uint8 (n, 3, S, S), and labels, int64 (n,)."""


def listing(folder: Path) -> list[tuple[Path, str | None]]:
    """The finished files in a folder, and in its class folders with the name of the class; sorted by name."""
    found: list[tuple[Path, str | None]] = []
    for path in _finished(folder):
        if path.is_dir() and not path.is_symlink():
            found += [(each, path.name) for each in _finished(path)]
        else:
            found.append((path, None))
    return found


def _finished(folder: Path) -> list[Path]:
    paths = sorted(folder.iterdir(), key=lambda path: path.name)
    return [path for path in paths if not path.name.startswith(".") and not path.name.endswith(_UNFINISHED)]


def count(path: Path, class_name: str | None) -> int:
    """How many samples a file claims to hold; of an archive, only array headers are read.

    Parameters
    ----------
    path : Path
        The file.
    class_name : str or None
        The class folder that holds the file, if any.

    Raises
    ------
    DataError
        The file is of another kind, or its header is damaged.
    """
    if class_name is not None:
        _check_kind(path, SUFFIXES)
        return 1
    _check_kind(path, (_ARCHIVE,))
    content = _content(path)
    with _faults_of(path), zipfile.ZipFile(content) as archive:
        return _rows(_shape(archive, _LABELS))


def read(path: Path, class_name: str | None, class_names: Sequence[str], image_size: int) -> Arrived:
    """Read a whole file.

    An archive holds ``images``, uint8 of shape (n, S, S, 3), (n, 3, S, S) or, for greyscale, (n, S, S), and
    ``labels``, (n,): whole numbers from 0 in the order of the classes, or class names. A picture may have any size:
    its shorter side is scaled to S, and the centre is cropped.

    Parameters
    ----------
    path : Path
        The file.
    class_name : str or None
        The class folder that holds the file, if any.
    class_names : sequence of str
        The agreed classes, in the order of their labels.
    image_size : int
        Height and width S that images must have.

    Raises
    ------
    DataError
        The file is damaged or too large, or an image or a label differs from what was agreed.
    """
    if class_name is not None:
        label = _label_of(class_name, class_names)
        _check_kind(path, SUFFIXES)
        with _faults_of(path):
            return read_square(path, Framing.of_files(image_size))[None], np.array([label], dtype=np.int64)
    _check_kind(path, (_ARCHIVE,))
    content = _content(path)
    with _faults_of(path), zipfile.ZipFile(content) as archive:
        size = sum(member.file_size for member in archive.infolist())
        if size > LARGEST_FILE:
            raise DataError(f"holds {size} bytes unpacked; must be at most {LARGEST_FILE}")
        images, labels = _array(archive, _IMAGES), _array(archive, _LABELS)
        return _images_as_agreed(images, _rows(labels.shape), image_size), _labels_as_agreed(labels, class_names)


class _faults_of:
    """Turn any error that a parser raises about a file's content into a one-line DataError."""

    def __init__(self, path: Path) -> None:
        self._name = path.name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, DataError):
            raise DataError(f"{self._name}: {fault}") from fault
        if isinstance(fault, Exception):
            text = " ".join(str(fault).split()) or type(fault).__name__
            raise DataError(f"{self._name}: damaged, or not {_WANTED} ({text[:200]})") from fault


def _content(path: Path) -> io.BytesIO:
    """A file's bytes. Errors of the disk are raised here; later errors are about the content."""
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise DataError(f"{path.name}: has {size} bytes; must be at most {LARGEST_FILE}")
    return io.BytesIO(path.read_bytes())


def _check_kind(path: Path, suffixes: tuple[str, ...]) -> None:
    if not path.name.lower().endswith(suffixes):
        raise DataError(f"{path.name}: must be {_WANTED}")


def _label_of(class_name: str, class_names: Sequence[str]) -> int:
    if class_name not in class_names:
        raise DataError(f"class {class_name!r} is not one of the {len(class_names)} agreed classes")
    return class_names.index(class_name)


def _array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    shape = _shape(archive, name)  # reads only the header, so that a false size costs nothing
    with archive.open(f"{name}.npy") as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
    assert array.shape == shape
    return array


def _shape(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    try:
        facts = archive.getinfo(f"{name}.npy")
    except KeyError as fault:
        raise DataError(f"holds no array {name!r}; must be {_WANTED}") from fault
    with archive.open(facts) as member:
        try:
            header = read_header(member)
        except HeaderError as fault:
            raise DataError(f"{name} cannot be read ({fault}); must be in NumPy's format 1.0 or 2.0") from fault
    if header.dtype.hasobject:
        raise DataError(f"{name} holds Python objects; must be numbers or names")
    if not 0 <= header.size <= min(facts.file_size, LARGEST_FILE):
        raise DataError(f"{name} promises {header.size} bytes in {facts.file_size}; at most {LARGEST_FILE}")
    return header.shape


def _rows(shape: tuple[int, ...]) -> int:
    if len(shape) != 1 or shape[0] < 1:
        raise DataError(f"{_LABELS} is of shape {shape}; must be (n,) with n at least 1")
    return shape[0]


def _images_as_agreed(images: NDArray[Any], rows: int, size: int) -> NDArray[np.uint8]:
    layouts = {(rows, 3, size, size): (0, 1, 2, 3), (rows, size, size, 3): (0, 3, 1, 2)}
    if images.dtype != np.uint8 or images.shape not in {*layouts, (rows, size, size)}:
        raise DataError(
            f"{_IMAGES} is {images.dtype} {images.shape}; must be uint8 of shape ({rows}, {size}, {size}, 3), "
            f"({rows}, 3, {size}, {size}) or ({rows}, {size}, {size})"
        )
    if images.ndim == 3:
        return np.repeat(images[:, None], 3, axis=1)
    return np.ascontiguousarray(images.transpose(layouts[images.shape]))


def _labels_as_agreed(labels: NDArray[Any], class_names: Sequence[str]) -> NDArray[np.int64]:
    if labels.dtype.kind == "U":
        return np.array([_label_of(str(name), class_names) for name in labels], dtype=np.int64)
    if labels.dtype.kind not in "iu":
        raise DataError(f"{_LABELS} is {labels.dtype}; must be whole numbers or class names")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= len(class_names):
        odd = low if low < 0 else high
        raise DataError(f"label {odd} is not one of the {len(class_names)} agreed classes, 0 to {len(class_names) - 1}")
    return labels.astype(np.int64)
