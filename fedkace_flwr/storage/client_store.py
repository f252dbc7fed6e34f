"""Durable client state, in files of :mod:`fedkace_flwr.storage.atomic`; the last two generations are kept.

A client's folder holds ``state-<round>.npz`` for its last two trained rounds and ``answer-<round>.npz``, the
reply to the last one, so that a repeated message is answered and not trained again. The state is written
last: until it is in place, the round has not happened. ``earlier/`` holds the same of the run before this one.
``docs/client-state.md`` says what becomes of each kind of damage.
"""

import contextlib
import hashlib
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from fedkace_flwr.errors import StateError, UnreadableStateError
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage import atomic as durable
from fedkace_flwr.storage import encryption as sealing
from fedkace_flwr.storage.npz import Array

logger = logging.getLogger(__name__)

_GENERATIONS = 2
_EARLIER_RUNS = 1
_LOCK_SECONDS = 10.0
_LARGEST = 2**63


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
    client : int or None
        Whose state it is; None where a file does not say, as the first ones did not.
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
    client: int | None = None

    def to_record(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Split into arrays and a JSON-ready record."""
        arrays = {
            "seen": self.seen.numpy(),
            "buffer.content": self.buffer.content.numpy(),
            "buffer.labels": self.buffer.labels.numpy(),
            "buffer.rounds": self.buffer.rounds.numpy(),
            **{f"extra.{name}": tensor.numpy() for name, tensor in self.extra.items()},
        }
        plain = (
            "run",
            "client",
            "round",
            "follows",
            "gaps",
            "switched_at",
            "local_accuracy",
            "evaluated",
            "evaluation",
        )
        return arrays, {name: getattr(self, name) for name in plain}

    @classmethod
    def from_record(cls, arrays: Mapping[str, Array], record: Mapping[str, Any]) -> Self:
        """Undo :meth:`to_record`."""
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        state = cls(
            seen=tensors["seen"],
            buffer=Samples(tensors["buffer.content"], tensors["buffer.labels"], tensors["buffer.rounds"]),
            extra={name[6:]: tensor for name, tensor in tensors.items() if name.startswith("extra.")},
            **{**record, "gaps": tuple(record["gaps"])},
        )
        state._check()
        return state

    def _check(self) -> None:
        """See that a state read from a file is one."""
        whole = {"round": self.round, "follows": self.follows, "evaluated": self.evaluated}
        if self.switched_at is not None:
            whole["switched_at"] = self.switched_at
        if self.client is not None:
            whole["client"] = self.client
        for name, value in whole.items():
            if type(value) is not int or not 0 <= value < _LARGEST:
                raise StateError(f"holds {name} = {value!r:.40}")
        if not isinstance(self.run, str):
            raise StateError(f"holds run = {self.run!r:.40}")
        numbers = [*self.gaps, 0.0 if self.local_accuracy is None else self.local_accuracy]
        if not all(map(_is_number, numbers)) or not _are_metrics(self.evaluation):
            raise StateError("holds a gap, an accuracy or an evaluation that is no number")
        buffer = self.buffer
        if self.seen.dtype != torch.bool or self.seen.ndim != 1:
            raise StateError(f"holds classes of {self.seen.dtype} {tuple(self.seen.shape)}")
        ids = (buffer.content.dtype, buffer.content.ndim) == (torch.int64, 1)
        if not ids and (buffer.content.dtype, buffer.content.ndim) != (torch.uint8, 4):
            raise StateError(f"holds a buffer of {buffer.content.dtype} {tuple(buffer.content.shape)}")
        columns = (buffer.labels, buffer.rounds)
        if any((column.dtype, column.ndim) != (torch.int64, 1) for column in columns):
            raise StateError("holds labels or rounds that are no list of whole numbers")
        if not len(buffer.content) == len(buffer.labels) == len(buffer.rounds):
            raise StateError("holds a buffer of unequal columns")
        if len(buffer) and not 0 <= int(buffer.labels.min()) <= int(buffer.labels.max()) < len(self.seen):
            raise StateError(f"holds a label that is none of its {len(self.seen)} classes")


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

    def to_record(self, run: str) -> tuple[dict[str, Array], dict[str, Any]]:
        """Split into arrays and a JSON-ready record that names the run."""
        return dict(self.arrays), {"run": run, "examples": self.examples, "metrics": dict(self.metrics)}

    @classmethod
    def from_record(cls, arrays: Mapping[str, Array], record: Mapping[str, Any]) -> tuple[str | None, Self]:
        """Undo :meth:`to_record`: the run, None where the file does not say, and the answer."""
        fields = dict(record)
        run = fields.pop("run", None)
        answer = cls(arrays, **fields)
        if run is not None and not isinstance(run, str):
            raise StateError(f"holds run = {run!r:.40}")
        if type(answer.examples) is not int or not 0 <= answer.examples < _LARGEST or not _are_metrics(answer.metrics):
            raise StateError("holds examples or metrics that are no numbers")
        return run, answer


def is_locked(folder: Path) -> bool:
    """Whether a process is at work on the client of this folder; see :meth:`ClientStore.locked`."""
    path = folder / ".lock"
    if not path.exists():
        return False
    lock = FileLock(path, mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


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
        self._is_locked = False
        self._settled = False

    @contextmanager
    def locked(self, seconds: float | None = None) -> Iterator[Self]:
        """Keep other processes out; whoever handles a message does it in here.

        Parameters
        ----------
        seconds : float, optional
            How long to wait for another process; by default ten. The system lets go of a lock when its process ends, however.

        Raises
        ------
        StateError
            Another process is at work on this client, or the folder cannot be written or is open to others.
        ConfigError
            What the environment holds is no key.
        """
        if self._is_locked:
            yield self
            return
        sealing.key()
        lock = FileLock(self.folder / ".lock", mode=0o600)
        with self._explained():
            durable.make_folder(self.folder)
            if not self._generations():
                durable.sync_above(self.folder)  # whoever made it may have been killed before it came to that
            self._close_to_others()
            try:
                lock.acquire(timeout=_LOCK_SECONDS if seconds is None else seconds)
            except Timeout:
                raise StateError(
                    f"{self.folder}: another process is at work on this client; if two machines or SuperNodes share "
                    "it, give each a client-name of its own"
                ) from None
        self._is_locked = True
        try:
            yield self
        finally:
            self._is_locked = False
            lock.release()

    def before(self, round_number: int) -> ClientState:
        """The newest readable generation of an earlier round, or the empty state.

        Raises
        ------
        UnreadableStateError
            A file is of a younger version of the program, or encrypted with another key; it is left as it is.
        StateError
            That generation has been dropped: the client went on for more rounds than it keeps. Or it is another
            client's.
        """
        self._settle()
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
        """The stored reply of a round, if that round is done and its reply still readable.

        Raises
        ------
        StateError
            As :meth:`before`.
        """
        self._settle()
        if self._read_state(round_number) is None:
            return None
        path = self._path("answer", round_number)
        content = self._read(path)
        if content is None:
            return None
        try:
            run, answer = Answer.from_record(*content)
        except (KeyError, TypeError, ValueError, StateError) as error:
            self._quarantine(path, _reason(error))
            return None
        return answer if run in (self._empty.run, None) else None

    def save_trained(self, state: ClientState, answer: Answer) -> None:
        """Store a round's reply, then the state that makes the round done; drop older and later ones.

        Raises
        ------
        StateError
            The disk does not take it; what was stored before is still there.
        """
        with self.locked(), self._explained():
            self._settle()
            # Later rounds are those of a course that the server has given up; they go first, for whoever is asked for
            # one of them after a crash must not find it done.
            self._drop(lambda number: number > state.round)
            durable.write(self._path("answer", state.round), *answer.to_record(state.run))
            durable.write(self._path("state", state.round), *state.to_record())
            kept = [number for number in self._generations() if number <= state.round][:_GENERATIONS]
            self._drop(lambda number: number not in kept, answers=lambda number: number != state.round)
            for path in [*self.folder.glob("state-*.partial"), *self.folder.glob("answer-*.partial")]:
                path.unlink()
            self._forget_earlier_runs()

    def save(self, state: ClientState) -> None:
        """Store a state in place of the one of the same round.

        Raises
        ------
        StateError
            The disk does not take it; what was stored before is still there.
        """
        with self.locked(), self._explained():
            self._settle()
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
            self._quarantine(path, _reason(error))
            return None
        theirs, ours = state.client, self._empty.client
        if None not in (theirs, ours) and theirs != ours:
            raise UnreadableStateError(
                f"{path}: holds what client {theirs} of this run knows, and this is client {ours}; start the SuperNode "
                "with the partition-id that it had, or with another client-name"
            )
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

    def _read(self, path: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
        try:
            return durable.read(path)
        except UnreadableStateError as error:
            raise UnreadableStateError(f"{path}: {error}") from error
        except StateError as error:
            self._quarantine(path, str(error))
            return None

    def _quarantine(self, path: Path, reason: str) -> None:
        with self._explained():
            aside = durable.set_aside(path)
        logger.warning("%s was set aside as %s: %s; going on with the generation before it", path, aside.name, reason)

    def _drop(self, states: Callable[[int], bool], answers: Callable[[int], bool] | None = None) -> None:
        """Remove states, and answers, of some rounds; gone from the disk before this returns."""
        dropped = False
        for kind, is_meant in (("answer", answers or states), ("state", states)):
            for number in durable.numbered(self.folder, kind):
                if is_meant(number):
                    self._path(kind, number).unlink()
                    dropped = True
        if dropped:
            durable.sync_folder(self.folder)

    def _close_to_others(self) -> None:
        mode = stat.S_IMODE(self.folder.stat().st_mode)
        if mode & 0o077:
            with contextlib.suppress(PermissionError):
                self.folder.chmod(mode & 0o700)
            if stat.S_IMODE(self.folder.stat().st_mode) & 0o077:
                raise StateError(
                    f"{self.folder}: is open to others (mode {mode:o}) and cannot be closed to them; let this user "
                    "own it, on a file system that has owners"
                )
            logger.warning("%s was open to others (mode %o); it is its owner's alone now", self.folder, mode)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """One line for whatever the system answers."""
        try:
            yield
        except OSError as error:
            raise StateError(
                f"{self.folder} cannot be written ({error.strerror or error}); what was stored before is kept: make "
                "room, or give this user the right to write there"
            ) from error

    # Earlier runs

    def _settle(self) -> None:
        """See that the folder's generations are this run's: move other runs' out, and its own in.

        A run that is begun by mistake must not cost what an earlier one has learnt. Every step is a renaming, so
        that each file is at any moment in the one place or the other.
        """
        if self._settled or not self.folder.is_dir():
            return
        moved: dict[str, int] = {}
        for number in self._generations():
            run = self._run_of(self._path("state", number))
            if run is not None and run != self._empty.run:
                with self._explained():
                    self._move_out(number, run)
                moved.setdefault(run, number)
        for run, number in moved.items():
            logger.warning(
                "%s held the state of an earlier run, %s, up to its round %d; it now lies in %s and is kept until "
                "another run has taken its place",
                self.folder,
                run,
                number,
                self._place_of(run),
            )
        with self._explained():
            self._move_in()
        self._settled = True

    def _run_of(self, path: Path) -> str | None:
        try:
            record = durable.read_record(path)
        except UnreadableStateError as error:
            raise UnreadableStateError(f"{path}: {error}") from error
        except StateError:
            return None  # whoever reads it sets it aside
        run = record and record.get("run")
        return run if isinstance(run, str) else None

    def _place_of(self, run: str) -> Path:
        plain = re.fullmatch(r"[0-9A-Za-z]{1,64}", run)
        return self.folder / "earlier" / (run if plain else hashlib.sha256(run.encode()).hexdigest())

    def _move_out(self, number: int, run: str) -> None:
        place = self._place_of(run)
        durable.make_folder(place)
        for path in (self._path("answer", number), self._path("state", number)):
            if path.exists():
                os.replace(path, place / path.name)
                # Before the state goes, lest a power cut keep its move alone and the answer be taken for an orphan.
                durable.sync_folder(place)
                durable.sync_folder(self.folder)

    def _move_in(self) -> None:
        place = self._place_of(self._empty.run)
        if not place.is_dir():
            return
        for kind in ("answer", "state"):
            for number in durable.numbered(place, kind):
                path = self._path(kind, number)
                os.replace(place / path.name, path)
        durable.sync_folder(self.folder)
        durable.sync_folder(place)
        with contextlib.suppress(OSError):
            place.rmdir()

    def _forget_earlier_runs(self) -> None:
        # An empty folder is one whose run has been moved in again; it must not count in place of one that holds a run.
        places = [path for path in (self.folder / "earlier").glob("*") if any(path.glob("state-*.npz"))]
        for place in sorted(places, key=lambda path: path.stat().st_mtime_ns)[:-_EARLIER_RUNS]:
            for path in [*place.glob("answer-*.npz"), *place.glob("state-*.npz")]:
                path.unlink()
            with contextlib.suppress(OSError):
                place.rmdir()


def read_state(path: Path) -> ClientState:
    """Read a stored state as it is and leave the file alone, for a look from outside.

    Raises
    ------
    UnreadableStateError
        It is of a younger version, encrypted with another key, or the system refuses it.
    StateError
        There is none, or it is damaged.
    """
    try:
        content = durable.read(path)
        if content is None:
            raise StateError("there is no such file")
        return ClientState.from_record(*content)
    except UnreadableStateError as error:
        raise UnreadableStateError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, StateError) as error:
        raise StateError(f"{path}: {_reason(error)}") from error


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and -_LARGEST <= value < _LARGEST


def _are_metrics(value: object) -> bool:
    """Whether it is what a message can carry: numbers and lists of numbers by name."""
    return isinstance(value, dict) and all(
        all(map(_is_number, entry)) if isinstance(entry, list) else _is_number(entry) for entry in value.values()
    )


def _reason(error: Exception) -> str:
    """A reason in one line that says something even where the error says no more than a name."""
    text = " ".join(str(error).split())
    return text if isinstance(error, StateError) else f"{type(error).__name__}: {text}"
