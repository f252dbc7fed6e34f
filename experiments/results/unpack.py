"""The process that unpacks the tables of kept studies, which may be anyone's: ``python -P unpack.py ROUNDS [CLASSES]``.

A damaged Parquet file can make the library that decodes it crash, and a small one can fill the memory. This process has
limits that the system enforces, and nothing of the project. Its arguments are the numbers of open files; it prints the
rounds, one a line: the run's name and the record as ``rounds.jsonl`` has it, both in JSON, with a tab between them.
"""

import itertools
import json
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from typing import Any

_LIMITS = {
    resource.RLIMIT_AS: 2**32,
    resource.RLIMIT_CPU: 600,
    resource.RLIMIT_FSIZE: 2**31,
    resource.RLIMIT_CORE: 0,
}
_ROWS = 64  # that are unpacked at a time
_NULLABLE = frozenset({"accuracy", "chance", "client_drift"})  # each round has them; what else is null is left out

Row = dict[str, Any]


def main(files: list[str]) -> None:
    """Print the rounds."""
    for limit, most in _LIMITS.items():
        resource.setrlimit(limit, (most, most))
    rounds, classes = (*map(_rows, files), iter(()))[:2]
    for run, record in _records(rounds, classes):
        print(f"{json.dumps(run)}\t{json.dumps(record, allow_nan=False)}")


def _rows(file: str) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    with os.fdopen(int(file), "rb") as content:
        for batch in ParquetFile(content).iter_batches(_ROWS, use_threads=False):
            yield from batch.to_pylist()


def _records(rounds: Iterable[Row], classes: Iterable[Row]) -> Iterator[tuple[Any, Row]]:
    """Put together the rows of each round; both tables have them in the same order."""
    groups = itertools.groupby(classes, lambda row: (row["run"], row["round"]))
    place, clients = next(groups, (None, iter(())))
    for row in rounds:
        record = {name: _without_nulls(value) for name, value in row.items() if value is not None or name in _NULLABLE}
        if place == (row["run"], row["round"]):
            record = _by_class(clients) | record
            place, clients = next(groups, (None, iter(())))
        yield record.pop("run"), record
    if place is not None:
        raise ValueError(f"the classes of {place} belong to no round, or are in another order than the rounds")


def _by_class(clients: Iterable[Row]) -> Row:
    """Return the columns that have a value, with an entry for each client."""
    rows = list(clients)
    if [row["client"] for row in rows] != list(range(len(rows))):
        raise ValueError(f"the clients of {rows[0]['run']!r}, round {rows[0]['round']}, are not 0, 1 and so on")
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("run", "round", "client")}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def _without_nulls(value: Any) -> Any:
    """Return a value whose objects lack what is null in them."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) and value else value


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
