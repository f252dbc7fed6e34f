"""What the server keeps after each round, so that a run can go on where it was cut off.

Clients keep their own state (:mod:`fedkace_flwr.storage.client_store`). With both, a resumed run repeats the round that was
under way: a client that had done its part answers from its store, the others do it now.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkace_flwr.errors import RunError, StateError, UnreadableStateError
from fedkace_flwr.storage import atomic as durable
from fedkace_flwr.storage.npz import Array

logger = logging.getLogger(__name__)

_GENERATIONS = 2


@dataclass(frozen=True)
class Checkpoint:
    """The server after a round.

    Attributes
    ----------
    round : int
        The last round that is done.
    run : str
        The token by which clients know that their state belongs to this run.
    weights : dict of str to array
        The global model by name, in the model's order.
    arrays, record : dict
        What the strategy needs beside it; the record is JSON-ready.
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

    def save(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint; on disk before this returns. Drop the ones that it makes needless."""
        weights = {f"weights.{name}": array for name, array in checkpoint.weights.items()}
        arrays = {f"strategy.{name}": array for name, array in checkpoint.arrays.items()}
        record = {"round": checkpoint.round, "run": checkpoint.run, "strategy": dict(checkpoint.record)}
        durable.write(self._path(checkpoint.round), {**weights, **arrays}, record)
        self.thin(_GENERATIONS)

    def newest(self) -> Checkpoint | None:
        """The last readable checkpoint; None where none was ever made.

        Raises
        ------
        RunError
            There are checkpoints, and none can be read; or the last one is whole and of a younger version of the
            program, or encrypted with another key.
        """
        numbers = durable.numbered(self.folder, "checkpoint")
        reason = ""
        for number in numbers:
            path = self._path(number)
            try:
                content = durable.read(path)
                assert content is not None
                return _parse(number, *content)
            except UnreadableStateError as error:
                raise RunError(f"{path}: {error}") from error
            except StateError as error:
                reason = str(error)
                logger.warning("%s cannot be read: %s; going on with the checkpoint before it", path, reason)
        if numbers:
            raise RunError(
                f"{self._path(numbers[0])} cannot be read ({reason}), nor any before it; the run cannot go on: "
                "move its folder away and start anew"
            )
        return None

    def thin(self, kept: int) -> None:
        """Keep the newest ones alone."""
        for number in durable.numbered(self.folder, "checkpoint")[kept:]:
            self._path(number).unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"checkpoint-{number:06d}.npz"


def _parse(number: int, arrays: Mapping[str, Array], record: Mapping[str, Any]) -> Checkpoint:
    try:
        if record["round"] != number:
            raise StateError(f"it holds round {record['round']!r:.40}")
        if not isinstance(record["run"], str) or not isinstance(record["strategy"], dict):
            raise StateError("it holds no run, or no strategy")
        parts: dict[str, dict[str, Array]] = {"weights": {}, "strategy": {}}
        for name, array in arrays.items():
            kind, _, rest = name.partition(".")
            parts[kind][rest] = array
        return Checkpoint(number, record["run"], parts["weights"], parts["strategy"], record["strategy"])
    except (KeyError, TypeError) as error:
        raise StateError(f"it lacks {error}") from error
