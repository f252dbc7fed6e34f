"""A run's rounds as TensorBoard events, beside ``rounds.jsonl`` and from the same records.

The package ``tensorboard`` is optional and imported only where events are asked for. A step is a round.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError

_PER_CLIENT = ("client_accuracy", "gap", "condition_number", "buffer_size")


class RoundEvents:
    """Writes rounds to an event file of their own in a run's folder.

    Parameters
    ----------
    folder : Path
        The run's folder.
    first_round : int
        The round that comes next. Where an earlier process got further before it was stopped, TensorBoard drops
        what it wrote of this round and later ones.

    Raises
    ------
    ConfigError
        The package tensorboard is not installed.
    """

    def __init__(self, folder: Path, first_round: int) -> None:
        self._writer = _writer_class()(str(folder), purge_step=first_round)
        self._writer.flush()  # what is dropped is so from here on

    def add(self, record: Mapping[str, Any], average: float | None) -> None:
        """Write a round's numbers; in the file before this returns.

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
        weights = [weight for chosen in record["replay_weights"] if chosen for weight in chosen]
        if weights:
            self._writer.add_histogram("replay_weights", np.array(weights), step)
        for client, counts in enumerate(record["buffer_classes"]):
            if counts and sum(counts):
                self._writer.add_histogram_raw(f"buffer_classes/{client}", **class_histogram(counts), global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


def check_events(config: Config) -> None:
    """See that events can be written if the configuration asks for them.

    Raises
    ------
    ConfigError
        They are asked for and the package tensorboard is not installed.
    """
    if config.run.tensorboard:
        _writer_class()


def scalars(record: Mapping[str, Any], average: float | None) -> dict[str, float]:
    """A round's single numbers by tag; what is missing in the record is left out.

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
        for name in _PER_CLIENT:
            for client, value in enumerate(record[name]):
                yield f"{name}/{client}", value
        for client, weights in enumerate(record["replay_weights"]):
            yield f"replay_weight/{client}", weights[-1] if weights else None
        yield "run/client_drift", record["client_drift"]
        yield "run/switched", sum(round_ is not None for round_ in record["switched_at"])
        yield "run/failures", len(record["failures"])
        for group in ("bytes", "seconds"):
            for name, value in record[group].items():
                yield f"{group}/{name}", value

    return {tag: value for tag, value in found() if value is not None}


def class_histogram(counts: Sequence[int]) -> dict[str, Any]:
    """A histogram with one bucket a class, from its counts, as TensorBoard's writer takes it."""
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
