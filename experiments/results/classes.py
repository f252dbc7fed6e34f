"""The accuracy of each client on each class in each round, as one long table."""

from pathlib import Path

import numpy as np
import pandas as pd

from fedkace_flwr.experiments.results.loading import Results, rows_of
from fedkace_flwr.experiments.results.reading import Record
from fedkace_flwr.storage.files import write_bytes, write_text

MOST_ROWS = 1_000_000
"""A CSV file of more rows would have tens of megabytes; the Parquet file is written for any number."""

_PLACE = ("round", "client", "class")
_DIGITS = 6


def class_accuracies(results: Results) -> pd.DataFrame:
    """Return one row per run, round, client and class that the client has met, with its accuracy on that class.

    Runs of earlier versions recorded none and have no rows.
    """
    parts = []
    for row in rows_of(results.runs):
        part = _of_run(results.records(row["folder"]))
        if len(part):
            parts.append(part.assign(study=row["study"], run=row["run"]))
    columns = ["study", "run", *_PLACE, "accuracy"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def write_classes(results: Results, target: Path) -> list[Path]:
    """Write the table as CSV and Parquet and return the paths; no file if it has no rows, no CSV file if too many."""
    frame = class_accuracies(results)
    paths = []
    if 0 < len(frame) <= MOST_ROWS:
        paths.append(target / "classes.csv")
        write_text(paths[-1], frame.to_csv(index=False))
    if len(frame):
        words = frame.astype(dict.fromkeys(("study", "run"), "category"))
        paths.append(target / "classes.parquet")
        write_bytes(paths[-1], words.to_parquet(None, index=False))
    return paths


def _of_run(records: list[Record]) -> pd.DataFrame:
    places: list[tuple[int, int, int]] = []
    values: list[float] = []
    for record in records:
        for client, accuracies in enumerate(record.get("class_accuracy") or ()):
            for label, value in enumerate(accuracies or ()):
                if value is not None:
                    places.append((int(record["round"]), client, label))
                    values.append(round(float(value), _DIGITS))
    frame = pd.DataFrame(np.asarray(places, dtype=np.int32).reshape(-1, len(_PLACE)), columns=list(_PLACE))
    return frame.assign(accuracy=np.asarray(values, dtype=np.float64))
