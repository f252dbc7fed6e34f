"""Reading labelled samples that other programs have written: an ``.npz``, or a picture in the folder of its class.

Where samples are arrays of numbers, a table may be a ``.csv``, and a single sample is an ``.npy``. A picture or a single
array may also come without a label, and its label later, in a file of labels.

No file is trusted. A file is opened once, without following a link and without waiting; what is checked is what was
opened, and all reading is from there, so it does not matter what takes the name's place meanwhile. Sizes are checked
before memory is allocated, and every fault is raised as a :class:`~fedkace_flwr.errors.DataError` that says what would
be right.
"""

import csv
import errno
import io
import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data.csv_table import Table, read_csv
from fedkace_flwr.data.images import Framing
from fedkace_flwr.data.pixels import MAX_FILE, SUFFIXES
from fedkace_flwr.errors import DataError
from fedkace_flwr.keys import UNLABELLED
from fedkace_flwr.npy import HeaderError, read_array, read_content, read_header
from fedkace_flwr.storage.files import IrregularFileError, LargeFileError, open_regular, read_open
from fedkace_flwr.storage.folders import OpenFolder
from fedkace_flwr.storage.names import printable

if TYPE_CHECKING:
    from fedkace_flwr.samples import Form  # which loads PyTorch; who only counts does without

LARGEST_FILE = 2**28
"""Largest size of a file, and of the arrays of one, unpacked; bytes."""

LARGEST_LABELS = 2**22
"""Largest size of a file of labels, bytes."""

_UNFINISHED = (".part", ".partial", ".tmp")
_ARCHIVE, _TABLE, _ARRAY = ".npz", ".csv", ".npy"
_IMAGES, _LABELS = "images", "labels"
_X, _Y = "x", "y"
_PICTURES = f"an .npz with {_IMAGES} and {_LABELS}, or a picture ({', '.join(SUFFIXES)}) in the folder of its class"
_ARRAYS = f"an .npz with {_X} and {_Y}, a table ({_TABLE}), or an array ({_ARRAY}) in the folder of its class"
_SINGLES = (*SUFFIXES, _ARRAY)
SINGLE = f"a picture ({', '.join(SUFFIXES)}) or, of arrays, an array ({_ARRAY})"
"""What a file of one sample must be, in words."""

_LONGEST_LINE = 2**20  # characters; a cell takes many times its length in memory
_MOST_ROWS = 100_000  # the most samples that a round can take
_WORD = 2**63  # keys are stored as signed numbers
_HEADER = ["name", "label"]

_IRREGULAR = (errno.ELOOP, errno.ENXIO, errno.ENODEV)  # a link, a socket, a device that is not there
_ENTRY = b"PK\1\2"  # what each entry in an archive's directory begins with
_MOST_ENTRIES = 1000  # by chance, far fewer are in 256 MiB
_NOT_ONE_FILES = frozenset(
    {errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EROFS, errno.ESTALE}
)

Arrived = tuple[NDArray[Any], NDArray[np.int64]]
"""Samples, uint8 (n, 3, S, S) or float32 (n, ...), and labels, int64 (n,)."""

Square = Callable[[bytes, Framing], NDArray[np.uint8]]
"""Decodes a picture's bytes to uint8 (3, S, S); raises DataError if they are none."""


@dataclass(frozen=True)
class Arrival:
    """A file that has arrived.

    Attributes
    ----------
    folder : OpenFolder
        What holds it; open while the listing that named it goes on.
    name : str
        Its name there.
    class_name : str or None
        The class folder that holds it, if any.
    """

    folder: OpenFolder
    name: str
    class_name: str | None


Key = tuple[int, int, int]
"""What stays the same of a file that is renamed: inode, time of change in nanoseconds, and size."""

NO_KEY: Key = (0, 0, 0)
"""That of no file."""


@dataclass(frozen=True)
class Picture:
    """A picture that waits for a label.

    Attributes
    ----------
    name : str
        Its name in its folder.
    key : Key
        What tells it from others, wherever it is moved.
    arrived : float
        When it was moved to its folder, seconds since the epoch.
    """

    name: str
    key: Key
    arrived: float


def listing(folder: OpenFolder) -> Iterator[Arrival]:
    """The finished files in a folder, and in its class folders with the name of the class; sorted by name.

    What is neither file nor folder is listed as if it were a file, and so is a folder that cannot be opened.
    """
    yield from _listed(folder, _finished(folder))


def labelled(folder: OpenFolder) -> Iterator[Arrival]:
    """As :func:`listing`, of the folder in which files arrive: without pictures that wait for labels, and labels."""
    names = _finished(folder)
    yield from _listed(folder, [each for each in names if each != (UNLABELLED, True) and not _holds_labels(*each)])


def label_files(folder: OpenFolder) -> list[Arrival]:
    """The files of labels, ``labels*.csv``, sorted by name."""
    return [Arrival(folder, name, None) for name, is_folder in _finished(folder) if _holds_labels(name, is_folder)]


def _holds_labels(name: str, is_folder: bool) -> bool:
    return not is_folder and name.lower().startswith("labels") and name.lower().endswith(".csv")


def pictures(folder: OpenFolder) -> tuple[list[Picture], list[str]]:
    """The pictures, or single arrays, in the folder of those without labels, in the order in which they came; and what else is there."""
    found, others = [], []
    for name, _ in _finished(folder):
        try:
            facts = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(facts.st_mode) and name.lower().endswith(_SINGLES):
            found.append(Picture(name, _key_of(facts), facts.st_ctime))
        else:
            others.append(name)
    return sorted(found, key=lambda each: (each.arrived, each.name)), others


def key(arrival: Arrival) -> Key:
    """The key of a picture; :data:`NO_KEY` of another file, which has never been without labels."""
    if arrival.class_name is None:
        return NO_KEY
    try:
        return _key_of(os.stat(arrival.name, dir_fd=arrival.folder.descriptor, follow_symlinks=False))
    except FileNotFoundError:
        return NO_KEY


def labels(arrival: Arrival) -> list[tuple[int, str, str]]:
    """Rows of a file of labels: line, name of a picture, and label; of a row that has not two fields, both are empty.

    Names and labels are in Unicode's composed form (NFC). The text is UTF-8; the first line may be ``name,label``.

    Raises
    ------
    DataError
        The file is damaged or too large.
    OSError
        It cannot be opened or read.
    """
    content = _content(arrival, LARGEST_LABELS)
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        rows = [(reader.line_num, *_fields(row)) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as fault:
        raise DataError(f"{printable(arrival.name)}: must be rows of name,label in UTF-8 ({fault})") from fault
    return rows[1:] if rows and [field.lower() for field in rows[0][1:]] == _HEADER else rows


def _fields(row: list[str]) -> tuple[str, str]:
    name, label = row if len(row) == 2 else ("", "")
    return normalize("NFC", name), normalize("NFC", label.strip())


def _key_of(facts: os.stat_result) -> Key:
    return facts.st_ino % _WORD, facts.st_mtime_ns % _WORD, facts.st_size % _WORD


def _listed(folder: OpenFolder, names: list[tuple[str, bool]]) -> Iterator[Arrival]:
    for name, is_folder in names:
        try:
            inner = folder.within(name) if is_folder else None
        except OSError as fault:
            if concerns_all(fault):
                raise
            inner = None
        if inner is None:
            yield Arrival(folder, name, None)
            continue
        with inner:
            for each, _ in _finished(inner):
                yield Arrival(inner, each, name)


def concerns_all(fault: OSError) -> bool:
    """Whether an error of the system is about the disk or this process, and not about a single file."""
    return fault.errno in _NOT_ONE_FILES


def _finished(folder: OpenFolder) -> list[tuple[str, bool]]:
    return [
        (name, kind) for name, kind in folder.entries() if not name.startswith(".") and not name.endswith(_UNFINISHED)
    ]


class UnknownClassError(DataError):
    """A file names a class that is not agreed."""


def count(arrival: Arrival, form: "Form | None" = None) -> tuple[int, frozenset[str]]:
    """How many samples a file claims to hold, and the names of their classes; of an archive, only the labels are read.

    The names are in Unicode's composed form (NFC); there are none where labels are numbers.

    Raises
    ------
    DataError
        The file is of another kind, or its header is damaged.
    OSError
        It cannot be opened or read.
    """
    if arrival.class_name is not None:
        _check_kind(arrival, _SINGLES)
        os.close(_opened(arrival))
        return 1, frozenset({normalize("NFC", arrival.class_name)})
    _check_kind(arrival, (_ARCHIVE,) if form is not None and form.is_picture else (_ARCHIVE, _TABLE), form)
    if arrival.name.lower().endswith(_TABLE):
        table = _table(arrival)
        return len(table.labels), frozenset(normalize("NFC", name) for name in table.labels)
    content = _content(arrival)
    with _faults_of(arrival), _archive(content) as archive:
        labels = _array(archive, _LABELS if f"{_Y}.npy" not in archive.namelist() else _Y)
        rows = _rows(labels.shape)
        names = np.unique(labels).tolist() if labels.dtype.kind == "U" else []
        return rows, frozenset(normalize("NFC", name) for name in names)


def read(arrival: Arrival, class_names: Sequence[str], form: "Form", square: Square) -> Arrived:
    """Read a whole file.

    An archive of pictures holds ``images``, uint8 of shape (n, S, S, 3), (n, 3, S, S) or, for greyscale, (n, S, S), and
    ``labels``, (n,): whole numbers from 0 in the order of the classes, or class names. A picture may have any size:
    its shorter side is scaled to S, and the centre is cropped. An archive of arrays holds ``x``, float32 (n, ...), and
    such labels as ``y``; a table's column ``label`` holds class names.

    Parameters
    ----------
    arrival : Arrival
        The file.
    class_names : sequence of str
        The agreed classes, in the order of their labels.
    form : Form
        What samples must be.
    square : callable
        Decodes pictures.

    Raises
    ------
    UnknownClassError
        It names a class that is not agreed.
    DataError
        The file is damaged or too large, or a sample or a label differs from what was agreed.
    OSError
        It cannot be opened or read.
    """
    if arrival.class_name is not None:
        with _faults_of(arrival):
            label = _label_of(arrival.class_name, class_names)
        return single(arrival, form, square)[None], np.array([label], dtype=np.int64)
    _check_kind(arrival, (_ARCHIVE,) if form.is_picture else (_ARCHIVE, _TABLE), form)
    if arrival.name.lower().endswith(_TABLE):
        return _rows_as_agreed(arrival, class_names, form)
    content = _content(arrival)
    with _faults_of(arrival, form), _archive(content) as archive:
        size = sum(member.file_size for member in archive.infolist())
        if size > LARGEST_FILE:
            raise DataError(f"holds {size} bytes unpacked; must be at most {LARGEST_FILE}")
        names = (_IMAGES, _LABELS) if form.is_picture else (_X, _Y)
        samples, labels = (_array(archive, name) for name in names)
        rows = _rows(labels.shape)
        if form.is_picture:
            return _images_as_agreed(samples, rows, form.shape[-1]), _labels_as_agreed(labels, class_names)
        return _finite(samples, (rows, *form.shape)), _labels_as_agreed(labels, class_names)


def single(arrival: Arrival, form: "Form", square: Square) -> NDArray[Any]:
    """Read a picture, uint8 (3, S, S), or a single array, float32 (...).

    Raises
    ------
    DataError, OSError
        As :func:`read`.
    """
    _check_kind(arrival, SUFFIXES if form.is_picture else (_ARRAY,), form)
    content = _content(arrival, MAX_FILE)
    if not form.is_picture:
        with _faults_of(arrival, form):
            return _finite(read_array(content), form.shape)
    try:
        return square(content, Framing.of_files(form.shape[-1]))
    except DataError as fault:  # and no other: an OSError is about the decoder, not about this file
        raise DataError(f"{printable(arrival.name)}: {fault}") from fault


def _finite(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.float32]:
    if array.dtype != np.float32 or array.shape != shape:
        raise DataError(
            f"is {array.dtype} of shape {array.shape}; must be float32 of shape {shape}, each sample as agreed (inbox-shape)"
        )
    if not np.isfinite(array).all():
        raise DataError("holds a value that is not finite")
    return np.ascontiguousarray(array)


def _rows_as_agreed(arrival: Arrival, class_names: Sequence[str], form: "Form") -> Arrived:
    table = _table(arrival)
    with _faults_of(arrival, form):
        labels = np.array([_label_of(name, class_names) for name in table.labels], dtype=np.int64)
        return _finite(table.features, (len(labels), *form.shape)), labels


def _table(arrival: Arrival) -> Table:
    content = _content(arrival, MAX_FILE)
    with _faults_of(arrival):
        return read_csv(_lines(content), "table", most=_MOST_ROWS)


def _lines(content: bytes) -> Iterator[str]:
    """The lines of a table, each of bounded length and with whole cells."""
    file = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="")
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE or line.count('"') % 2:
            raise DataError(f"has a line of {_LONGEST_LINE} characters or more, or a cell that goes over several lines")
        yield line


class _faults_of:
    """Turn any error that a parser raises about a file's content into a one-line DataError that names the file."""

    def __init__(self, arrival: Arrival, form: "Form | None" = None) -> None:
        self._name, self._wanted = printable(arrival.name), _wanted(form)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, DataError):
            raise type(fault)(f"{self._name}: {fault}") from fault
        if isinstance(fault, Exception):
            text = printable(" ".join(str(fault).split())) or type(fault).__name__
            raise DataError(f"{self._name}: damaged, or not {self._wanted} ({text[:200]})") from fault


def _opened(arrival: Arrival) -> int:
    """A descriptor of the file itself, to be closed by the caller."""
    try:
        return open_regular(arrival.name, at=arrival.folder.descriptor, follow=False)
    except IrregularFileError as fault:
        raise _not_plain(arrival) from fault
    except OSError as fault:
        if fault.errno in _IRREGULAR:
            raise _not_plain(arrival) from fault
        raise


def _content(arrival: Arrival, most: int = LARGEST_FILE) -> bytes:
    """A file's bytes. Errors of the disk are raised here; later errors are about the content."""
    descriptor = _opened(arrival)
    try:
        return read_open(descriptor, most)
    except LargeFileError as fault:
        raise DataError(f"{printable(arrival.name)}: is too large: {fault.strerror}") from fault
    finally:
        os.close(descriptor)


def _archive(content: bytes) -> zipfile.ZipFile:
    # Python makes an object for each entry, of many times its size, before any can be looked at.
    entries = content.count(_ENTRY)
    if entries > _MOST_ENTRIES:
        raise DataError(f"holds {entries} parts; must be {_wanted()}")
    return zipfile.ZipFile(io.BytesIO(content))


def _not_plain(arrival: Arrival) -> DataError:
    return DataError(f"{printable(arrival.name)}: must be a plain file, and no link, pipe or folder")


def _check_kind(arrival: Arrival, suffixes: tuple[str, ...], form: "Form | None" = None) -> None:
    if not arrival.name.lower().endswith(suffixes):
        hint = "; a file of labels is called labels*.csv" if arrival.name.lower().endswith(".csv") else ""
        raise DataError(f"{printable(arrival.name)}: must be {_wanted(form)}{hint}")


def _wanted(form: "Form | None" = None) -> str:
    """What a file must be; without a form, of either kind of samples."""
    if form is None:
        return f"{_PICTURES}; of arrays, {_ARRAYS}"
    return _PICTURES if form.is_picture else _ARRAYS


def _label_of(class_name: str, class_names: Sequence[str]) -> int:
    name = normalize("NFC", class_name)  # as class-names are; a Mac's programs write folders decomposed
    if name not in class_names:
        raise UnknownClassError(f"class {class_name!r:.100} is not one of the {len(class_names)} agreed classes")
    return class_names.index(name)


def _array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    try:
        facts = archive.getinfo(f"{name}.npy")
    except KeyError as fault:
        raise DataError(f"holds no array {name!r}; must be {_wanted()}") from fault
    if facts.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{name} is compressed in a way that NumPy does not write")
    most = min(facts.file_size, LARGEST_FILE)
    with archive.open(facts) as member:
        try:
            header = read_header(member)
            if header.size > most:
                raise DataError(f"{name} promises {header.size} bytes; must be at most {most}")
            return read_content(member, header, kinds="biufcU")
        except HeaderError as fault:
            raise DataError(
                f"{name} cannot be read ({fault}); must be numbers or names, in NumPy's format 1.0 or 2.0"
            ) from fault


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
        raise DataError(f"label {odd} is not one of the {len(class_names)} agreed classes, which are numbered from 0")
    return labels.astype(np.int64)
