"""The accuracy of each client on each class in each round, as one long table."""

from pathlib import Path

import pandas as pd

from fedkace_flwr.experiments.results.loading import Results, rows_of
from fedkace_flwr.storage.files import write_bytes, write_text

MOST_ROWS = 1_000_000
"""A CSV file of more rows would have tens of megabytes; the Parquet file is written for any number."""

_DIGITS = 6


def class_accuracies(results: Results) -> pd.DataFrame:
    """Return one row per run, round, client and class that the client has met, with its accuracy on that class.

    Runs of earlier versions recorded none and have no rows.
    """
    columns = ["study", "run", "round", "client", "class", "accuracy"]
    parts = [pd.DataFrame(columns=columns)]
    for row in rows_of(results.runs):
        clients = [
            (record["round"], client, values)
            for record in results.records(row["folder"])
            for client, values in enumerate(record["class_accuracy"])
            if values
        ]
        if clients:
            part = pd.DataFrame(clients, columns=["round", "client", "accuracy"]).explode("accuracy")
            part["class"] = part.groupby(["round", "client"]).cumcount()
            part = part.dropna().assign(study=row["study"], run=row["run"])
            parts.append(part.astype({"round": "int32", "client": "int32", "class": "int32", "accuracy": "float64"}))
    return pd.concat(parts[1:] or parts, ignore_index=True)[columns].round({"accuracy": _DIGITS})


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
