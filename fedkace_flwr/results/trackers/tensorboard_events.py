"""TensorBoard: events next to ``rounds.jsonl``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.config import Config
from fedkace_flwr.results.trackers.tracker import Tracker, class_counts, over_epochs, scalars


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
        for tag, counts in class_counts(record).items():
            labels, number = np.arange(len(counts)), np.array(counts)
            sums = int(number.sum()), int(labels @ number), int(labels**2 @ number)
            bounds = -0.5, len(counts) - 0.5
            self._writer.add_histogram_raw(tag, *bounds, *sums, (labels + 0.5).tolist(), counts, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
