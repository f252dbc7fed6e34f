"""The server's state after each round, from which an interrupted run is resumed.

Clients keep their own state (:mod:`fedkace_flwr.storage.client_store`). With both, a resumed run repeats the round that
was interrupted: clients that had done their part answer from their stores, the others train now.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkace_flwr.errors import RunError, StateError, UnreadableStateError
from fedkace_flwr.storage import atomic
from fedkace_flwr.storage.atomic import CHECKPOINT, Array
from fedkace_flwr.storage.files import remove_partials
from fedkace_flwr.storage.past_models import PastModels

logger = logging.getLogger(__name__)

_GENERATIONS = 2
_MEGABYTE = 10**6
LARGEST_CHECKPOINT = 2**34
"""Most bytes of a checkpoint; methods whose server keeps a model for each client have large ones."""


@dataclass(frozen=True)
class Checkpoint:
    """The server after a round.

    Attributes
    ----------
    round : int
        The last completed round.
    run : str
        The token by which clients recognise state of this run.
    weights : dict of str to array
        The global model by name, in the model's order.
    arrays, record : dict
        What the strategy needs beside the model; the record is JSON-ready.
    """

    round: int
    run: str
    weights: Mapping[str, Array]
    arrays: Mapping[str, Array] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)


class Checkpoints:
    """A run's checkpoints, ``checkpoint-<round>.npz``; the last two are kept.

    Parameters
    ----------
    folder : Path
        Made on first use.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.past = PastModels(folder)
        self._most_past = 0

    def keep_past(self, megabytes: int) -> None:
        """Keep further checkpoints from now on, up to so many megabytes, as past models."""
        self._most_past = megabytes * _MEGABYTE

    def save(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint, on disk before this returns; keep it as a past model, and drop all but the last two."""
        weights = {f"weights.{name}": array for name, array in checkpoint.weights.items()}
        arrays = {f"strategy.{name}": array for name, array in checkpoint.arrays.items()}
        record = {"round": checkpoint.round, "run": checkpoint.run, "strategy": dict(checkpoint.record)}
        atomic.write(self._path(checkpoint.round), {**weights, **arrays}, record, most=LARGEST_CHECKPOINT)
        if self._most_past:
            self.past.add(checkpoint.round, self._most_past)
        self.thin(_GENERATIONS)

    def of_round(self, number: int) -> Checkpoint:
        """A past model's checkpoint.

        Raises
        ------
        StateError
            It is not there, or cannot be read.
        """
        path = self.past.path_of(number)
        found: Checkpoint | None = atomic.read(path, parse=functools.partial(_parse, number), most=LARGEST_CHECKPOINT)
        if found is None:
            raise StateError(f"{path}: is not there")
        return found

    def newest(self) -> Checkpoint | None:
        """The last readable checkpoint; None if none was ever made.

        Raises
        ------
        RunError
            There are checkpoints, and none can be read; or the last one is intact but has a newer version, or is
            encrypted with another key.
        """
        numbers = atomic.numbered(self.folder, CHECKPOINT)
        reason = ""
        for number in numbers:
            try:
                parse = functools.partial(_parse, number)
                found: Checkpoint | None = atomic.read(self._path(number), parse=parse, most=LARGEST_CHECKPOINT)
                return found or self.newest()  # it was removed since it was listed, by a server that goes on
            except UnreadableStateError as error:
                raise RunError(str(error)) from error
            except StateError as error:
                reason = str(error)
                logger.warning("%s; falling back to the previous checkpoint", reason)
        if numbers:
            raise RunError(
                f"{reason}; no checkpoint of the run can be read, and it cannot be resumed: move its folder away and "
                "start anew"
            )
        return None

    def thin(self, kept: int) -> None:
        """Keep the newest checkpoints only, and nothing that a killed process left half-written."""
        for number in atomic.numbered(self.folder, CHECKPOINT)[kept:]:
            self._path(number).unlink()
        remove_partials(self.folder, "checkpoint-")

    def _path(self, number: int) -> Path:
        return atomic.path_of(self.folder, CHECKPOINT, number)


def _parse(number: int, arrays: Mapping[str, Array], record: Mapping[str, Any]) -> Checkpoint:
    if record["round"] != number:
        raise StateError(f"it holds round {record['round']!r:.40}")
    if not isinstance(record["run"], str) or not isinstance(record["strategy"], dict):
        raise StateError("it does not hold a run and a strategy")
    parts: dict[str, dict[str, Array]] = {"weights": {}, "strategy": {}}
    for name, array in arrays.items():
        kind, _, rest = name.partition(".")
        parts[kind][rest] = array
    return Checkpoint(number, record["run"], parts["weights"], parts["strategy"], record["strategy"])
