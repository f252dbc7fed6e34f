"""What every tracker does, and the numbers of a round that all of them show.

The tags of the metrics (:class:`fedkace_flwr.messaging.metrics.Metric`) determine which client metrics are shown. The
package of a tracker is optional, and imported only if the tracker is chosen.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.messaging.metrics import Metric, known_metrics
from fedkace_flwr.storage import files

SUMMARISED = (
    *("average_accuracy", "final_accuracy", "average_chance"),
    *("forgetting", "backward_transfer", "forward_transfer"),
)
"""Numbers of a run's summary that trackers show."""

_LARGEST = float(np.finfo(np.float32).max)  # trackers may compute in single precision, which cannot hold 1e300


class Tracker:
    """Shows the rounds of one run. A step is a round.

    Parameters
    ----------
    folder : Path
        The run's folder.
    config : Config
        The run's configuration.
    first_round : int
        The next round. An earlier process may have shown this round and later ones before it was stopped.

    Raises
    ------
    RunError
        The tracker cannot be used.
    """

    def __init__(self, folder: Path, config: Config, first_round: int) -> None:
        raise NotImplementedError

    @classmethod
    def check(cls, place: Path) -> None:
        """Check settings and server before any run of the study in a folder begins; make what its runs share.

        Raises
        ------
        RunError
            The tracker cannot be used.
        """

    def add(self, record: Mapping[str, Any], average: float | None) -> None:
        """Show a round: a line of ``rounds.jsonl``, and the average accuracy up to it."""
        raise NotImplementedError

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Show the run's summary (``summary.json``) and that the run is finished."""

    def close(self) -> None:
        """Let go of the tracker; a run that is not finished may go on later."""


@contextmanager
def naming(tracker: str, what: str, cure: str) -> Iterator[None]:
    """Name a tracker, and a way around it, in the errors of its package, which have no common class."""
    try:
        yield
    except RunError:
        raise
    except Exception as fault:
        reason = " ".join(str(fault).split()) or type(fault).__name__
        raise RunError(f"tracker = {tracker!r}: {what} cannot be used ({reason:.300}); {cure}") from fault


def known_run(folder: Path, tracker: str) -> str | None:
    """Return the run's name at a tracker, kept in the run's folder; None if that tracker does not know the run.

    Raises
    ------
    RunError
        The file is damaged.
    """
    path = folder / "tracker.json"
    if not path.exists():
        return None
    try:
        told = json.loads(files.read_text(path, files.LARGEST_TEXT))
        return str(told["run"]) if told["tracker"] == tracker else None
    except (OSError, KeyError, TypeError, ValueError) as fault:
        raise RunError(f"{path}: cannot be read ({fault}); remove it, and the tracker begins a new run") from fault


def keep_run(folder: Path, tracker: str, run: str) -> None:
    """Write the run's name at a tracker, under which a resumed run goes on."""
    files.write_text(folder / "tracker.json", json.dumps({"tracker": tracker, "run": run}) + "\n")


def scalars(record: Mapping[str, Any], average: float | None) -> dict[str, float]:
    """Return a round's scalars by tag; numbers that the record lacks, or that are too large to show, are omitted.

    Parameters
    ----------
    record : mapping
        A line of ``rounds.jsonl``.
    average : float, optional
        Average accuracy up to this round.
    """
    prequential = [value for value in record.get("prequential_accuracy", ()) if value is not None]
    found: dict[str, float | None] = {
        "accuracy/mean": record["accuracy"],
        "accuracy/prequential": sum(prequential) / len(prequential) if prequential else None,
        "accuracy/chance": record["chance"],
        "accuracy/average_so_far": average,
    }
    for metric, client, value in _by_client(record):
        if metric.length is None:
            found[f"{metric.tag}/{client}"] = value
        elif metric.length == "epochs":
            found[f"{metric.tag}/{client}"] = value[-1] if value else None
    found |= {
        "run/client_drift": record["client_drift"],
        "run/switched": sum(number is not None for number in record["switched_at"]),
        "run/failures": len(record["failures"]),
        "run/alarms": len(record.get("alarms", ())),
        **{f"{group}/{name}": value for group in ("bytes", "seconds") for name, value in record[group].items()},
    }
    return {tag: value for tag, value in found.items() if value is not None and abs(value) < _LARGEST}


def class_counts(record: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the counts by class, by tag and client; empty ones are left out."""
    return {
        f"{metric.tag}/{client}": counts
        for metric, client, counts in _by_client(record)
        if metric.length == "classes" and counts and sum(counts)
    }


def over_epochs(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the values of all clients and epochs by column, for metrics that have one value per epoch."""
    found: dict[str, list[float]] = {}
    for metric, _, values in _by_client(record):
        if metric.length == "epochs" and values:
            found.setdefault(metric.column, []).extend(values)
    return found


def summarised(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a run's summary that trackers show; unknown ones are left out."""
    return {name: summary[name] for name in SUMMARISED if summary.get(name) is not None}


def _by_client(record: Mapping[str, Any]) -> Iterator[tuple[Metric, int, Any]]:
    """Yield each client's value of each metric that has a tag and whose column is in the record."""
    for metric in known_metrics().values():
        if metric.tag and metric.column in record:
            yield from ((metric, client, value) for client, value in enumerate(record[metric.column]))
