"""What a client knows between rounds, its stored answer, and the records that they are stored as."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fedkace_flwr.errors import StateError
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.atomic import Array, Content

VERSION = 3
"""Version of state files; version 1.0 of the program, the first that was released, wrote it as well."""

UNDONE, FIRST_MET = "undone", "first-met"
"""Stored tensors; see :attr:`ClientState.undone` and :attr:`ClientState.first_met`."""

_LARGEST = 2**63
_BUFFER = {"content": "buffer.content", "labels": "buffer.labels", "rounds": "buffer.rounds"}
_WAITING = {"content": "waiting.content", "labels": "waiting.labels", "rounds": "waiting.rounds"}
_NAMES, _REST = "names", "rest"
_TEXTS = ("names", "waiting_names", "dataset")
_TESTED = ("local_accuracy", "local_class_accuracy", "evaluated", "evaluation")
_RECORD = ("run", "client", "round", "follows", "global_since", *_TESTED)


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
        The round trained before it; 0 if there was none.
    global_since : int or None
        The round since which the global model has answered; None while the local model answers.
    local_accuracy : float or None
        Test accuracy of the local model at the end of its training, if it was tested.
    local_class_accuracy : list of float
        The same by class, -1 for a class that was not tested; empty if accuracies of classes are not reported.
    evaluated : int
        The last round evaluated.
    evaluation : dict
        The reply to that evaluation.
    extra : dict of str to Tensor
        What the method stores beside this, under names of its own; on the CPU.
    client : int or None
        The client's number.
    names : sequence of str
        The classes' names, in the order of their labels; empty if they are not known.
    dataset : str
        Digest of the data set that a buffer's ids lead into; empty if it is not known.
    waiting : Samples
        Samples of earlier runs that are not in the buffer: this run has no such classes yet, or its method does not
        replay. Their labels are positions in ``waiting_names``.
    waiting_names : sequence of str
        Names of the classes that wait, with or without samples.
    """

    seen: Tensor
    buffer: Samples
    run: str = ""
    round: int = 0
    follows: int = 0
    global_since: int | None = None
    local_accuracy: float | None = None
    local_class_accuracy: list[float] = field(default_factory=list)
    evaluated: int = 0
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    client: int | None = None
    names: Sequence[str] = ()
    dataset: str = ""
    waiting: Samples = field(default_factory=Samples.none)
    waiting_names: Sequence[str] = ()

    @property
    def undone(self) -> Tensor:
        """First and last rounds, int64 (k, 2), of the spans that count as if they had not been, as the server told."""
        return self.extra.get(UNDONE, torch.empty((0, 2), dtype=torch.int64))

    @property
    def first_met(self) -> Tensor:
        """The round of this run in which each class was first met, int64 (C,); 0 if not in this run, or not at all."""
        return self.extra.get(FIRST_MET, torch.zeros(len(self.seen), dtype=torch.int64))

    @property
    def is_undone(self) -> bool:
        """Whether the last trained round is undone."""
        return bool(within(torch.tensor([self.round]), self.undone))

    @property
    def has_local_model(self) -> bool:
        """Whether the client has a model of its own to predict with: one of this run, of a round that is not undone."""
        return self.round > 0 and not self.is_undone

    def to_record(self) -> Content:
        """Split into arrays and a JSON-ready record."""
        arrays = {
            "seen": self.seen.numpy(),
            **{stored: getattr(self.buffer, name).numpy() for name, stored in _BUFFER.items()},
            **{f"extra.{name}": tensor.numpy() for name, tensor in self.extra.items()},
        }
        # As arrays, which earlier versions of the program pass over; an unknown entry of the record stops them.
        if len(self.waiting):
            arrays |= {stored: getattr(self.waiting, name).numpy() for name, stored in _WAITING.items()}
        if any(getattr(self, name) for name in _TEXTS):
            texts = json.dumps({name: getattr(self, name) for name in _TEXTS})
            arrays[_NAMES] = np.frombuffer(texts.encode(), dtype=np.uint8)
        return arrays, {name: getattr(self, name) for name in _RECORD}

    @classmethod
    def from_record(cls, arrays: Mapping[str, Array], record: Mapping[str, Any]) -> Self:
        """Undo :meth:`to_record`.

        Raises
        ------
        StateError, KeyError, TypeError, ValueError
            The content is not a state.
        """
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        waits = _WAITING["content"] in tensors
        state = cls(
            seen=tensors["seen"],
            buffer=Samples(**{name: tensors[stored] for name, stored in _BUFFER.items()}),
            waiting=Samples(**{name: tensors[stored] for name, stored in _WAITING.items()})
            if waits
            else Samples.none(),
            **_texts(arrays),
            extra={
                name.removeprefix("extra."): tensor for name, tensor in tensors.items() if name.startswith("extra.")
            },
            **record,
        )
        state._check()
        return state

    def _check(self) -> None:
        whole = {"round": self.round, "follows": self.follows, "evaluated": self.evaluated}
        optional = {"global_since": self.global_since, "client": self.client}
        whole |= {name: value for name, value in optional.items() if value is not None}
        for name, value in whole.items():
            if type(value) is not int or not 0 <= value < _LARGEST:
                raise StateError(f"holds {name} = {value!r:.40}")
        if not isinstance(self.run, str):
            raise StateError(f"holds run = {self.run!r:.40}")
        accuracy = 0.0 if self.local_accuracy is None else self.local_accuracy
        classes = {"classes": self.local_class_accuracy}
        is_list = isinstance(self.local_class_accuracy, list)
        if not _is_number(accuracy) or not is_list or not _are_metrics(classes) or not _are_metrics(self.evaluation):
            raise StateError("holds an accuracy or an evaluation that is not a number")
        if self.seen.dtype != torch.bool or self.seen.ndim != 1:
            raise StateError(f"holds classes of {self.seen.dtype} {tuple(self.seen.shape)}")
        _check_samples(self.buffer, len(self.seen))
        _check_samples(self.waiting, len(self.waiting_names))
        if len(self.waiting) and self.waiting.content.shape[1:] != self.buffer.content.shape[1:]:
            raise StateError("holds samples of two shapes")
        if len(self.names) > len(self.seen):
            raise StateError(f"holds {len(self.names)} names of {len(self.seen)} classes")


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
    rest : dict of str to array
        Those weights of the local model that are no part of the reply.
    """

    arrays: Mapping[str, Array]
    examples: int
    metrics: Mapping[str, Any]
    rest: Mapping[str, Array] = field(default_factory=dict)

    @property
    def model(self) -> Mapping[str, Array]:
        """All weights of the local model."""
        return {**self.arrays, **self.rest}

    def to_record(self, run: str) -> Content:
        """Split into arrays and a JSON-ready record that names the run."""
        record = {"run": run, "examples": self.examples, "metrics": dict(self.metrics)}
        return dict(self.model), {**record, _REST: list(self.rest)} if self.rest else record

    @classmethod
    def from_record(cls, arrays: Mapping[str, Array], record: Mapping[str, Any]) -> tuple[str, Self]:
        """Undo :meth:`to_record`: the run and the answer.

        Raises
        ------
        StateError, KeyError, TypeError
            The content is not an answer.
        """
        fields = dict(record)
        run = fields.pop("run")
        rest = {name: arrays[name] for name in fields.pop(_REST, [])}
        answer = cls({name: array for name, array in arrays.items() if name not in rest}, **fields, rest=rest)
        if not isinstance(run, str):
            raise StateError(f"holds run = {run!r:.40}")
        if type(answer.examples) is not int or not 0 <= answer.examples < _LARGEST or not _are_metrics(answer.metrics):
            raise StateError("holds examples or metrics that are not numbers")
        return run, answer


def within(rounds: Tensor, spans: Tensor) -> Tensor:
    """Which rounds, int64 (n,), are in one of the spans, int64 (k, 2), their ends included; bool (n,)."""
    return ((rounds[:, None] >= spans[:, 0]) & (rounds[:, None] <= spans[:, 1])).any(dim=1)


def _texts(arrays: Mapping[str, Array]) -> dict[str, Any]:
    if _NAMES not in arrays:
        return {}
    try:
        texts = json.loads(arrays[_NAMES].tobytes())
    except RecursionError as error:
        raise StateError("holds names that are no list") from error
    lists = [texts[name] for name in _TEXTS if name != "dataset"]
    each = [texts["dataset"], *(name for found in lists if isinstance(found, list) for name in found)]
    if not all(isinstance(found, list) for found in lists) or not all(isinstance(name, str) for name in each):
        raise StateError("holds names that are no list of texts")
    return {name: texts[name] for name in _TEXTS}


def _check_samples(samples: Samples, classes: int) -> None:
    is_right = samples.content.ndim == 1 if samples.by_id else _are_values(samples.content)
    if not is_right:
        raise StateError(f"holds a buffer of {samples.content.dtype} {tuple(samples.content.shape)}")
    columns = (samples.labels, samples.rounds)
    if any((column.dtype, column.ndim) != (torch.int64, 1) for column in columns):
        raise StateError("holds labels or rounds that are not a list of whole numbers")
    if not len(samples.content) == len(samples.labels) == len(samples.rounds):
        raise StateError("holds a buffer of unequal columns")
    if len(samples) and not 0 <= int(samples.labels.min()) <= int(samples.labels.max()) < classes:
        raise StateError(f"holds a label outside its {classes} classes")


def _are_values(content: Tensor) -> bool:
    """Whether they are pictures, or arrays of at least one dimension."""
    return (content.dtype == torch.uint8 and content.ndim == 4) or (content.dtype == torch.float32 and content.ndim > 1)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and -_LARGEST <= value < _LARGEST


def _are_metrics(value: object) -> bool:
    """Whether a message can carry the value: numbers and lists of numbers by name."""
    return isinstance(value, dict) and all(
        all(map(_is_number, entry)) if isinstance(entry, list) else _is_number(entry) for entry in value.values()
    )
