"""Tables, series and other arrays of numbers, from a file in NumPy's format .npz; tables also from text or Parquet."""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data.csv_table import LABEL
from fedkace_flwr.data.readers.source import Content, Origin, data_dir, digest
from fedkace_flwr.data.readers.tables import features_of, files_of, read_tables
from fedkace_flwr.errors import ConfigError, DataError, FedkaceError, MissingDataError
from fedkace_flwr.npy import Header, HeaderError, read_content, read_header
from fedkace_flwr.sections import DataConfig

_SUFFIX = ".npz"
_NAMES = ("x_train", "y_train", "x_test", "y_test")
_BLOCK = 4096  # samples that are written at a time


def find_arrays(config: DataConfig, size: int) -> Origin:
    """Find the files in ``data-dir``, which may also be the path of one, and read from its head what a sample is."""
    name, _, label = config.dataset.partition("?label=")
    if name != "arrays" or (not label and "?" in config.dataset):
        raise ConfigError(
            f"dataset = {config.dataset!r:.200}: must be 'arrays' or, to choose a table's column of labels, "
            "'arrays?label=COLUMN'; data-dir says where the files are"
        )
    if tables := files_of(data_dir(config)):
        label = label or LABEL
        with _faults_of(tables[0]):
            facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in tables]
            features = features_of(tables[0], label)
        return Origin(digest(label, *facts), partial(_read_tables, tables, label), shape=(features,))
    path = _file(data_dir(config))
    with _faults_of(path):
        stat = path.stat()
        with zipfile.ZipFile(path) as archive:
            shape = _header(path, archive, _NAMES[0]).shape
    return Origin(digest(str(path), stat.st_size, stat.st_mtime_ns), partial(_read, path), shape=shape[1:])


def _file(place: Path) -> Path:
    if place.is_file():
        return place
    found = sorted(each for each in place.glob(f"*{_SUFFIX}") if each.is_file()) if place.is_dir() else []
    if not found:
        fault = f"holds no {_SUFFIX} file" if place.exists() else "does not exist"
        raise MissingDataError(
            f"data-dir = {place}: {fault}; dataset = 'arrays' needs a {_SUFFIX} file with {_WANTED}, or a table's "
            "train.csv or train.parquet, and perhaps such a test file"
        )
    if len(found) > 1:
        names = ", ".join(each.name for each in found[:3])
        raise DataError(f"data-dir = {place}: holds {len(found)} {_SUFFIX} files, as {names}; must be the path of one")
    return found[0]


_WANTED = "the arrays x_train and y_train, and perhaps x_test and y_test"


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Name the file, in one line, in whatever a parser raises."""
    try:
        yield
    except FedkaceError:
        raise
    except Exception as fault:
        text = " ".join(str(fault).split()) or type(fault).__name__
        kind = f"{_SUFFIX} file with {_WANTED}" if path.suffix == _SUFFIX else "table"
        raise DataError(f"{path}: damaged, or no {kind} ({text:.200})") from fault


def _read_tables(files: Sequence[Path], label: str) -> Content:
    with _faults_of(files[0]):
        return read_tables(files, label)


def _header(path: Path, archive: zipfile.ZipFile, name: str) -> Header:
    """The header of an array of samples, checked."""
    if f"{name}.npy" not in archive.namelist():
        held = ", ".join(sorted(each.removesuffix(".npy") for each in archive.namelist())[:6])
        raise DataError(f"{path}: holds no array {name!r} but {held or 'nothing'}; must hold {_WANTED}")
    with archive.open(f"{name}.npy") as member:
        header = read_header(member)
    if not name.startswith("x"):
        return header
    if header.dtype != np.float32:
        raise DataError(f"{path}: {name} is {header.dtype}; must be float32, as {name}.astype('float32') makes it")
    if len(header.shape) < 2 or min(header.shape) < 1:
        raise DataError(
            f"{path}: {name} has shape {header.shape}; must be (n, features), (n, channels, length) or of more "
            "dimensions, none of them empty"
        )
    return header


def _read(path: Path) -> Content:
    with _faults_of(path), zipfile.ZipFile(path) as archive:
        tests = any(f"{name}.npy" in archive.namelist() for name in _NAMES[2:])
        read = {name: _array(path, archive, name) for name in (_NAMES if tests else _NAMES[:2])}
    samples, labels = ({name: each for name, each in read.items() if name.startswith(kind)} for kind in "xy")
    x_train, *others = samples.values()
    for x_test in others:
        if x_test.shape[1:] != x_train.shape[1:]:
            raise DataError(
                f"{path}: samples of x_test have shape {x_test.shape[1:]}, those of x_train {x_train.shape[1:]}"
            )
    for x, (name, y) in zip(samples.values(), labels.items(), strict=True):
        if y.shape != (len(x),):
            raise DataError(f"{path}: {name} has shape {y.shape}; must be ({len(x)},), a label of each sample")
    classes = _check_labels(path, labels)
    return Content(
        class_names=tuple(str(label) for label in range(classes)),
        labels=np.concatenate([*labels.values()]).astype(np.int64),
        train_size=len(x_train),
        blocks=(x[start : start + _BLOCK] for x in samples.values() for start in range(0, len(x), _BLOCK)),
    )


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    _header(path, archive, name)
    with archive.open(f"{name}.npy") as member:
        try:
            array = read_content(member, read_header(member))
        except HeaderError as fault:
            raise DataError(f"{path}: {name} cannot be read ({fault})") from fault
    if name.startswith("x"):
        finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
        if not finite.all():
            raise DataError(f"{path}: {name} holds a value that is not finite in row {int(finite.argmin())}")
    elif array.dtype.kind not in "iu":
        raise DataError(f"{path}: {name} is {array.dtype}; must be whole numbers, the labels from 0")
    return array


def _check_labels(path: Path, labels: dict[str, NDArray[Any]]) -> int:
    """The number of classes, whose labels have no gaps."""
    for name, each in labels.items():
        if len(each) and each.min() < 0:
            raise DataError(f"{path}: {name} holds label {each.min()}; labels must be whole numbers from 0")
    found = np.unique(np.concatenate(list(labels.values())))
    if (gaps := np.flatnonzero(found != np.arange(len(found)))).size:
        where = next(name for name, each in labels.items() if found[gaps[0]] in each)
        raise DataError(
            f"{path}: {where} holds label {found[gaps[0]]}, and no sample has label {gaps[0]}; labels must be whole "
            "numbers from 0 without gaps"
        )
    return len(found)
