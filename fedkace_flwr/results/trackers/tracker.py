"""What every tracker can do, and the numbers that it shows.

The tags of the metrics (:class:`fedkace_flwr.methods.metric.Metric`) determine which client metrics are shown. The
package of a tracker is optional, and imported only if the tracker is chosen.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.config import Config
from fedkace_flwr.messaging.metrics import Metric, known_metrics

SUMMARISED = (
    *("average_accuracy", "final_accuracy", "average_chance"),
    *("forgetting", "backward_transfer", "forward_transfer"),
)
"""Numbers of a run's summary that trackers show."""

_LARGEST = float(np.finfo(np.float32).max)  # trackers may compute in single precision, which cannot hold 1e300


class Tracker(ABC):
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
    ConfigError
        The tracker's package is not installed, or the tracker cannot be reached.
    """

    @abstractmethod
    def __init__(self, folder: Path, config: Config, first_round: int) -> None:
        """Open the tracker for a run that begins, or that goes on."""

    @classmethod  # noqa: B027 - most trackers have no server
    def check(cls, place: Path) -> None:
        """Check the tracker's settings and server, before any run of a study begins; make what its runs share.

        Parameters
        ----------
        place : Path
            The study's folder.

        Raises
        ------
        RunError
            It cannot be used.
        """

    @abstractmethod
    def add(self, record: Mapping[str, Any], average: float | None) -> None:
        """Show a round.

        Parameters
        ----------
        record : mapping
            A line of ``rounds.jsonl``.
        average : float, optional
            Average accuracy up to this round.
        """

    @abstractmethod
    def finish(self, summary: Mapping[str, Any]) -> None:
        """Show the run's summary (``summary.json``) and that the run is finished."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the tracker; a run that is not finished may go on later."""


@dataclass(frozen=True)
class Histogram:
    """Counts between edges.

    Attributes
    ----------
    counts : sequence of int
        Number of values in each bucket.
    edges : sequence of float
        Their bounds, one more than buckets.
    """

    counts: Sequence[int]
    edges: Sequence[float]


def scalars(record: Mapping[str, Any], average: float | None) -> dict[str, float]:
    """Return a round's scalars by tag; numbers that the record lacks, or that are too large to show, are omitted.

    Parameters
    ----------
    record : mapping
        A line of ``rounds.jsonl``.
    average : float, optional
        Average accuracy up to this round.
    """

    def found() -> Iterator[tuple[str, float | None]]:
        yield "accuracy/mean", record["accuracy"]
        yield "accuracy/chance", record["chance"]
        yield "accuracy/average_so_far", average
        for metric in shown(record):
            for client, value in enumerate(record[metric.column]):
                if metric.length is None:
                    yield f"{metric.tag}/{client}", value
                elif metric.length == "epochs":
                    yield f"{metric.tag}/{client}", value[-1] if value else None
        yield "run/client_drift", record["client_drift"]
        yield "run/switched", sum(round_ is not None for round_ in record["switched_at"])
        yield "run/failures", len(record["failures"])
        for group in ("bytes", "seconds"):
            for name, value in record[group].items():
                yield f"{group}/{name}", value

    return {tag: value for tag, value in found() if value is not None and abs(value) < _LARGEST}


def class_histograms(record: Mapping[str, Any]) -> dict[str, Histogram]:
    """Return the histograms over classes by tag and client, with one bucket per class; empty ones are left out.

    Parameters
    ----------
    record : mapping
        A line of ``rounds.jsonl``.
    """
    return {
        f"{metric.tag}/{client}": Histogram(counts, (np.arange(len(counts) + 1) - 0.5).tolist())
        for metric in shown(record)
        if metric.length == "classes"
        for client, counts in enumerate(record[metric.column])
        if counts and sum(counts)
    }


def over_epochs(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the values of all clients and epochs by column, for metrics that have one value per epoch.

    Parameters
    ----------
    record : mapping
        A line of ``rounds.jsonl``.
    """
    values = {
        metric.column: [value for each in record[metric.column] if each for value in each]
        for metric in shown(record)
        if metric.length == "epochs"
    }
    return {column: each for column, each in values.items() if each}


def summarised(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a run's summary that trackers show; unknown ones are left out."""
    return {name: summary[name] for name in SUMMARISED if summary.get(name) is not None}


def shown(record: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics that have a tag and whose column is in the record."""
    return [metric for metric in known_metrics().values() if metric.tag and metric.column in record]
