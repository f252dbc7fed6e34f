"""Tables as comma-separated text: a column of labels, and columns of numbers. Nothing here loads PyTorch.

Shapes: n rows, F features.
"""

import csv
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.errors import DataError

LABEL = "label"
"""Name of the column of labels, unless another is chosen."""

_INDEX = re.compile(r"|__index_level_\d+__")  # the names that pandas gives its row index in CSV and Parquet
_ENDS = 3  # of the columns of a table, how many of the first and of the last are named


@dataclass(frozen=True)
class Table:
    """A file's features, by column and as finite float32 (n, F), and the texts of its labels."""

    told: str
    columns: tuple[str, ...]
    features: NDArray[np.float32]
    labels: Sequence[str]


def read_csv(lines: Iterable[str], told: str, label: str = LABEL, *, most: int | None = None, hint: str = "") -> Table:
    """Read a table whose first line names the columns.

    Parameters
    ----------
    lines : iterable of str
        Its text.
    told : str
        The file's name, for messages.
    label : str
        Name of the column of labels.
    most : int, optional
        The most rows that it may have.
    hint : str
        How another column of labels is chosen, for messages.

    Raises
    ------
    DataError
        It has no such column, no column of numbers or no rows, or a cell is no finite number or no label.
    UnicodeDecodeError, csv.Error
        It is no such text.
    """
    rows = csv.reader(lines)
    names = next(rows, [])
    columns, place = feature_columns(told, names, label, hint), names.index(label)
    values, labels = array("d"), list[str]()
    for row in rows:
        if not row:
            continue
        if len(row) != len(names):
            raise DataError(f"{told}: line {rows.line_num} has {len(row)} cells; must have {len(names)}")
        if len(labels) == most:
            raise DataError(f"{told}: holds more than {most} rows; must be at most that")
        labels.append(row.pop(place))
        try:
            values.extend([float(cell) for cell in row])
        except ValueError as fault:
            raise DataError(
                f"{told}: line {rows.line_num} ({fault!s:.200}); must be numbers, but for the label"
            ) from fault
    return checked_table(told, columns, np.array(values, dtype=np.float64).reshape(-1, len(columns)), labels)


def _shown(names: Sequence[str]) -> str:
    ends = names if len(names) <= 2 * _ENDS else [*names[:_ENDS], "...", *names[-_ENDS:]]
    return ", ".join(f"{name!r:.40}" if name != "..." else name for name in ends)


def feature_columns(told: str, names: Sequence[str], label: str, hint: str = "") -> list[str]:
    """The names of the columns of numbers.

    Raises
    ------
    DataError
        There are none, no column of labels, two of one name, or one is the row index that pandas adds: where rows are
        sorted by class, it gives the label away.
    """
    if label not in names or len(set(names)) < len(names) or len(names) < 2:
        raise DataError(
            f"{told}: has {len(names)} columns, {_shown(names)}; must have different names, a column {label!r} of labels"
            f"{hint}, and at least one of numbers"
        )
    if (index := next(filter(_INDEX.fullmatch, names), None)) is not None:
        raise DataError(f"{told}: column {index!r} is the row index that pandas adds; write the table with index=False")
    return [name for name in names if name != label]


def checked_table(told: str, columns: list[str], values: NDArray[np.float64], labels: list[str]) -> Table:
    """The table of these values, float64 (n, F), as float32.

    Raises
    ------
    DataError
        A value is not finite then, a label is missing, or there are no rows.
    """
    with np.errstate(over="ignore"):
        features = values.astype(np.float32)
    if not len(labels):
        raise DataError(f"{told}: holds no rows")
    if not (finite := np.isfinite(features)).all():
        row, column = (int(place[0]) for place in np.nonzero(~finite))
        raise DataError(
            f"{told}: row {row + 1}, column {columns[column]!r:.100}: {values[row, column]} is not finite in float32"
        )
    if "" in labels:
        raise DataError(f"{told}: row {labels.index('') + 1} has no label")
    return Table(told, tuple(columns), features, labels)
