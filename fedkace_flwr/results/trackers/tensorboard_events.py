"""TensorBoard: events next to ``rounds.jsonl``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.config import Config
from fedkace_flwr.results.trackers.tracker import Histogram, Tracker, class_histograms, over_epochs, scalars


class TensorBoard(Tracker):
    """Writes rounds to a new event file in a run's folder.

    If an earlier process got beyond ``first_round`` before it was stopped, TensorBoard drops its events from there on.
    """

    def __init__(self, folder: Path, config: Config, first_round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_round)
        self._writer.flush()  # the earlier events are dropped from now on

    def add(self, record: Mapping[str, Any], average: float | None) -> None:
        """Write a round's numbers; they are in the file when this returns."""
        step = record["round"]
        for tag, value in scalars(record, average).items():
            self._writer.add_scalar(tag, value, step)
        for column, values in over_epochs(record).items():
            self._writer.add_histogram(column, np.array(values), step)
        for tag, histogram in class_histograms(record).items():
            self._writer.add_histogram_raw(tag, **_raw(histogram), global_step=step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Do nothing: the last round's average is the run's."""

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _raw(histogram: Histogram) -> dict[str, Any]:
    """A histogram over classes in the form that TensorBoard's writer expects."""
    label, number = np.arange(len(histogram.counts)), np.array(histogram.counts)
    return {
        "min": histogram.edges[0],
        "max": histogram.edges[-1],
        "num": int(number.sum()),
        "sum": int((label * number).sum()),
        "sum_squares": int((label**2 * number).sum()),
        "bucket_limits": list(histogram.edges[1:]),
        "bucket_counts": list(histogram.counts),
    }
