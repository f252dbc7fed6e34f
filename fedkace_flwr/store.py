"""Durable client state, in files of :mod:`fedkace_flwr.durable`; the last two generations are kept.

A client's folder holds ``state-<round>.npz`` for its last two trained rounds and ``answer-<round>.npz``, the
reply to the last one, so that a repeated message is answered and not trained again. The state is written
last: until it is in place, the round has not happened.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fedkace_flwr import durable
from fedkace_flwr.buffer import Samples
from fedkace_flwr.durable import Array
from fedkace_flwr.errors import StateError

logger = logging.getLogger(__name__)

_GENERATIONS = 2


@dataclass(frozen=True)
class ClientState:
    """What a client knows between rounds.

    Attributes
    ----------
    seen : Tensor
        bool (C,): classes of all chunks so far, C_<=t.
    buffer : Samples
        M_t.
    run : str
        The run that the state belongs to.
    round : int
        The last round trained; 0 before the first.
    follows : int
        The round trained before it; 0 where there was none.
    gaps : tuple of float
        GAP of each evaluated round until the switch.
    switched_at : int or None
        Round of the inference switch.
    local_accuracy : float or None
        Test accuracy of the local model, taken at the end of its training.
    evaluated : int
        The last round evaluated.
    evaluation : dict
        The answer given then.
    extra : dict of str to Tensor
        What a method declares beside this.
    """

    seen: Tensor
    buffer: Samples
    run: str = ""
    round: int = 0
    follows: int = 0
    gaps: tuple[float, ...] = ()
    switched_at: int | None = None
    local_accuracy: float | None = None
    evaluated: int = 0
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def to_record(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Split into arrays and a JSON-ready record."""
        arrays = {
            "seen": self.seen.numpy(),
            "buffer.content": self.buffer.content.numpy(),
            "buffer.labels": self.buffer.labels.numpy(),
            "buffer.rounds": self.buffer.rounds.numpy(),
            **{f"extra.{name}": tensor.numpy() for name, tensor in self.extra.items()},
        }
        plain = ("run", "round", "follows", "gaps", "switched_at", "local_accuracy", "evaluated", "evaluation")
        return arrays, {name: getattr(self, name) for name in plain}

    @classmethod
    def from_record(cls, arrays: Mapping[str, Array], record: Mapping[str, Any]) -> Self:
        """Undo :meth:`to_record`."""
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return cls(
            seen=tensors["seen"],
            buffer=Samples(tensors["buffer.content"], tensors["buffer.labels"], tensors["buffer.rounds"]),
            extra={name[6:]: tensor for name, tensor in tensors.items() if name.startswith("extra.")},
            **{**record, "gaps": tuple(record["gaps"])},
        )


@dataclass(frozen=True)
class Answer:
    """A client's reply to a training message.

    Attributes
    ----------
    arrays : dict of str to array
        The local model's weights by name.
    examples : int
        Samples trained on.
    metrics : dict
        Numbers and lists of numbers.
    """

    arrays: Mapping[str, Array]
    examples: int
    metrics: Mapping[str, Any]


class ClientStore:
    """One client's folder.

    Parameters
    ----------
    folder : Path
        Made on first use, readable by its owner only.
    empty : ClientState
        The state before the first round. A stored one of another run does not count; one with other numbers
        of classes or another kind of buffer is not accepted.
    """

    def __init__(self, folder: Path, empty: ClientState) -> None:
        self.folder = folder
        self._empty = empty

    def before(self, round_number: int) -> ClientState:
        """The newest readable generation of an earlier round, or the empty state.

        Raises
        ------
        StateError
            That generation has been dropped: the client went on for more rounds than it keeps.
        """
        generations = self._generations()
        state = self._newest([number for number in generations if number < round_number])
        if state is self._empty:
            oldest = self._newest(generations[::-1])
            if oldest.follows:
                raise StateError(
                    f"{self.folder}: what was known before round {round_number} is gone, the client has done round "
                    f"{generations[0]}; start the run anew"
                )
        return state

    def answer(self, round_number: int) -> Answer | None:
        """The stored reply of a round, if that round is done and its reply still readable."""
        if self._read_state(round_number) is None:
            return None
        path = self._path("answer", round_number)
        content = self._read(path)
        if content is None:
            return None
        arrays, record = content
        try:
            return Answer(arrays, **record)
        except TypeError as error:
            self._quarantine(path, str(error))
            return None

    def save_trained(self, state: ClientState, answer: Answer) -> None:
        """Store a round's reply, then the state that makes the round done; drop older and later ones."""
        record = {"examples": answer.examples, "metrics": dict(answer.metrics)}
        durable.write(self._path("answer", state.round), answer.arrays, record)
        self.save(state)
        for path in self.folder.glob("answer-*.npz"):
            if path != self._path("answer", state.round):
                path.unlink()
        generations = self._generations()
        kept = [number for number in generations if number <= state.round][:_GENERATIONS]
        for number in set(generations) - set(kept):
            self._path("state", number).unlink()

    def save(self, state: ClientState) -> None:
        """Store a state in place of the one of the same round."""
        durable.write(self._path("state", state.round), *state.to_record())

    def _path(self, kind: str, round_number: int) -> Path:
        return self.folder / f"{kind}-{round_number:06d}.npz"

    def _generations(self) -> list[int]:
        return durable.numbered(self.folder, "state")

    def _newest(self, numbers: list[int]) -> ClientState:
        for number in numbers:
            state = self._read_state(number)
            if state is not None:
                return state
        return self._empty

    def _read_state(self, round_number: int) -> ClientState | None:
        path = self._path("state", round_number)
        content = self._read(path)
        if content is None:
            return None
        try:
            state = ClientState.from_record(*content)
            if state.run != self._empty.run:
                return None
            self._check(state, round_number)
        except (KeyError, TypeError, ValueError, StateError) as error:
            self._quarantine(path, str(error))
            return None
        return state

    def _check(self, state: ClientState, round_number: int) -> None:
        if state.round != round_number:
            raise StateError(f"holds round {state.round}")
        if state.seen.shape != self._empty.seen.shape:
            raise StateError(f"holds {len(state.seen)} classes, not {len(self._empty.seen)}")
        held, wanted = state.buffer.content, self._empty.buffer.content
        if held.dtype != wanted.dtype or held.shape[1:] != wanted.shape[1:]:
            raise StateError(
                f"holds a buffer of {held.dtype} {tuple(held.shape[1:])}, not {wanted.dtype} {tuple(wanted.shape[1:])}"
            )
        if not len(state.buffer.content) == len(state.buffer.labels) == len(state.buffer.rounds):
            raise StateError("holds a buffer of unequal columns")

    def _read(self, path: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
        try:
            return durable.read(path)
        except StateError as error:
            self._quarantine(path, str(error))
            return None

    def _quarantine(self, path: Path, reason: str) -> None:
        aside = durable.set_aside(path)
        logger.warning("%s was set aside as %s: %s; going on with the generation before it", path, aside.name, reason)


def read_state(path: Path) -> ClientState:
    """Read a stored state as it is and leave the file alone, for a look from outside.

    Raises
    ------
    StateError
        It cannot be read, or is damaged.
    """
    try:
        content = durable.read(path)
        if content is None:
            raise StateError("there is no such file")
        return ClientState.from_record(*content)
    except (OSError, KeyError, TypeError, ValueError, StateError) as error:
        raise StateError(f"{path}: {error}") from error
