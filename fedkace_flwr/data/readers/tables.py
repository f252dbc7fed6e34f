"""Tables of numbers with a column of labels, in files of comma-separated values or in Parquet's format.

Shapes: n rows, F features.
"""

import csv
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data.csv_table import Table, checked_table, feature_columns, read_csv
from fedkace_flwr.data.readers.source import Content
from fedkace_flwr.errors import DataError

SUFFIXES = (".csv", ".parquet")
PARTS = ("train", "test")

_BLOCK = 4096  # samples that are written at a time
_HINT = " (another is chosen by dataset = 'arrays?label=COLUMN')"


def files_of(folder: Path) -> list[Path]:
    """The file of training rows in a folder, and that of test rows if there is one; none if it holds no tables.

    A table may be named itself; one called ``train`` has its file of test rows beside it.
    """
    if folder.suffix in SUFFIXES and folder.is_file():
        if folder.stem != PARTS[0]:
            return [folder]
        return [file for part in PARTS if (file := folder.with_stem(part)).is_file()]
    for suffix in SUFFIXES:
        files = [file for part in PARTS if (file := folder / f"{part}{suffix}").is_file()]
        if files and files[0].stem == PARTS[0]:
            return files
    return []


def features_of(path: Path, label: str) -> int:
    """Number of features of a file, by the names of its columns alone."""
    if path.suffix == ".parquet":
        names = list(_parquet(path).read_schema(path).names)
    else:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
    return len(feature_columns(str(path), names, label, _HINT))


def read_tables(files: Sequence[Path], label: str) -> Content:
    """Read rows for training and perhaps for testing; classes are named, and numbered, by the sorted labels of training."""
    tables = [(_read_parquet if path.suffix == ".parquet" else _read_csv)(path, label) for path in files]
    first, names = tables[0], sorted(set(tables[0].labels), key=_order)
    for other in tables[1:]:
        if other.columns != first.columns:
            odd = next(iter(set(first.columns) ^ set(other.columns)), "another order")
            raise DataError(
                f"{other.told}: has other columns than {Path(first.told).name} ({odd!r:.100}); must have the same, in this order"
            )
        if unknown := set(other.labels) - set(names):
            raise DataError(
                f"{other.told}: column {label!r} holds {min(unknown)!r:.100}, which {Path(first.told).name} does not"
            )
    number = {name: place for place, name in enumerate(names)}
    return Content(
        class_names=tuple(names),
        labels=np.array([number[each] for table in tables for each in table.labels], dtype=np.int64),
        train_size=len(first.labels),
        blocks=(each for table in tables for each in _blocks(table.features)),
    )


def _blocks(features: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(features), _BLOCK):
        yield features[start : start + _BLOCK]


def _order(name: str) -> tuple[bool, int, str]:
    """Whole numbers by their size, before all else by its letters."""
    return (False, int(name), name) if name.isascii() and name.isdigit() else (True, 0, name)


def _read_csv(path: Path, label: str) -> Table:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return read_csv(file, str(path), label, hint=_HINT)


def _read_parquet(path: Path, label: str) -> Table:
    table = _parquet(path).read_table(path)
    columns = feature_columns(str(path), table.column_names, label, _HINT)
    values = []
    for name in columns:
        column = table.column(name)
        array = column.to_numpy()
        if column.null_count or array.dtype.kind not in "iuf":
            found = f"{column.null_count} empty cells" if column.null_count else str(column.type)
            raise DataError(f"{path}: column {name!r:.100} holds {found}; must hold a number in each row")
        values.append(array.astype(np.float64))
    labels = ["" if each is None or each != each else str(each) for each in table.column(label).to_pylist()]
    return checked_table(str(path), columns, np.stack(values, axis=1), labels)


def _parquet(path: Path) -> Any:
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"{path}: needs the extra report: pip install 'fedkace-flwr[report]'")
    import pyarrow.parquet

    return pyarrow.parquet
