"""TensorBoard events, written alongside ``rounds.jsonl`` from the same records.

The tags of the metrics (:class:`fedkace_flwr.methods.metric.Metric`) determine which client metrics are shown. The
package ``tensorboard`` is optional and imported only if events are enabled. A step is a round.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.messaging.metrics import known_metrics
from fedkace_flwr.methods.metric import Metric

_LARGEST = float(
    np.finfo(np.float32).max
)  # events are in single precision, which cannot hold a singular matrix's 1e300


class RoundEvents:
    """Writes rounds to a new event file in a run's folder.

    Parameters
    ----------
    folder : Path
        The run's folder.
    first_round : int
        The next round. If an earlier process got further before it was stopped, TensorBoard drops its events of this
        round and later ones.

    Raises
    ------
    ConfigError
        The package tensorboard is not installed.
    """

    def __init__(self, folder: Path, first_round: int) -> None:
        self._writer = _writer_class()(str(folder), purge_step=first_round)
        self._writer.flush()  # the earlier events are dropped from now on

    def add(self, record: Mapping[str, Any], average: float | None) -> None:
        """Write a round's numbers; they are in the file when this returns.

        Parameters
        ----------
        record : mapping
            A line of ``rounds.jsonl``.
        average : float, optional
            Average accuracy up to this round.
        """
        step = record["round"]
        for tag, value in scalars(record, average).items():
            self._writer.add_scalar(tag, value, step)
        for metric in _shown(record):
            values = record[metric.column]
            if metric.length == "epochs" and any(values):
                self._writer.add_histogram(metric.column, np.concatenate([each for each in values if each]), step)
            if metric.length == "classes":
                for client, counts in enumerate(values):
                    if counts and sum(counts):
                        raw = class_histogram(counts)
                        self._writer.add_histogram_raw(f"{metric.tag}/{client}", **raw, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def check_events(config: Config) -> None:
    """Check that events can be written if the configuration enables them.

    Raises
    ------
    ConfigError
        Events are enabled, but the package tensorboard is not installed.
    """
    if config.run.tensorboard:
        _writer_class()


def scalars(record: Mapping[str, Any], average: float | None) -> dict[str, float]:
    """Return a round's scalars by tag; numbers that the record lacks, or that events cannot hold, are omitted.

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
        for metric in _shown(record):
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


def _shown(record: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics that have a tag and whose column is in the record."""
    return [metric for metric in known_metrics().values() if metric.tag and metric.column in record]


def class_histogram(counts: Sequence[int]) -> dict[str, Any]:
    """Return a histogram with one bucket per class, from its counts, in the form that TensorBoard's writer expects."""
    label, number = np.arange(len(counts)), np.array(counts)
    return {
        "min": -0.5,
        "max": len(counts) - 0.5,
        "num": int(number.sum()),
        "sum": int((label * number).sum()),
        "sum_squares": int((label**2 * number).sum()),
        "bucket_limits": (label + 0.5).tolist(),
        "bucket_counts": list(counts),
    }


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"tensorboard = true: the package tensorboard cannot be imported ({error}); "
            "pip install 'fedkace_flwr[tensorboard]'"
        ) from error
    return SummaryWriter
