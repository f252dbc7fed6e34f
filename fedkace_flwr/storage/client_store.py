"""A client's folder: durable states and answers, of which the last two generations are kept.

The folder holds ``state-<round>.npz`` for the client's last two trained rounds and ``answer-<round>.npz``, its reply to
the last one, so that a repeated message is answered without training again. The state is written last: until it is in
place, the round has not happened. A run that begins with the memory of an earlier one has it in ``state-000000.npz``.
``earlier/`` holds the files of earlier runs. Files are those of :mod:`fedkace_flwr.storage.atomic`;
``docs/client-state.md`` says what the client does about each kind of damage.
"""

import contextlib
import logging
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from fedkace_flwr.errors import StateError, UnreadableStateError
from fedkace_flwr.storage import atomic, client_state, encryption
from fedkace_flwr.storage.atomic import ANSWER, MODELS, STATE, Array
from fedkace_flwr.storage.client_state import Answer, ClientState
from fedkace_flwr.storage.earlier_runs import EarlierRuns
from fedkace_flwr.storage.files import remove_partials
from fedkace_flwr.storage.folders import make_folder, sync_above, sync_folder
from fedkace_flwr.storage.names import printable

logger = logging.getLogger(__name__)

_GENERATIONS = 2
_WRITTEN = (f"{ANSWER}-", f"{STATE}-", f"{MODELS}-")
_LOCK_SECONDS = 10.0


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
        The state of a client that has met nothing. Stored states of other runs are moved aside; a state of this run
        with another number of classes or another kind of buffer is refused.
    remember : callable, optional
        Makes the state before the first round from the newest state of an earlier run and ``empty``; by default a run
        begins with ``empty``.
    """

    def __init__(
        self,
        folder: Path,
        empty: ClientState,
        remember: Callable[[ClientState, ClientState], ClientState] | None = None,
    ) -> None:
        self.folder = folder
        self._empty = empty
        self._remember = remember
        self._earlier = EarlierRuns(folder)
        self._is_locked = False
        self._settled = False

    @property
    def names(self) -> Sequence[str]:
        """The names of the run's classes so far, in the order of their labels."""
        return self._empty.names

    @contextmanager
    def locked(self, seconds: float | None = None) -> Iterator[Self]:
        """Keep other processes out while a message is handled.

        Parameters
        ----------
        seconds : float, optional
            How long to wait for another process; by default ten seconds. The system releases the lock of a process
            that ends, in whatever way.

        Raises
        ------
        StateError
            Another process is at work on this client, or the folder cannot be written or is open to others.
        ConfigError
            A variable of the environment is wrong: the key is not a key, for example.
        """
        if self._is_locked:
            yield self
            return
        encryption.keys()
        atomic.limit()
        lock = FileLock(self.folder / ".lock", mode=0o600)
        with self._explained():
            make_folder(self.folder)
            if not self._generations():
                sync_above(self.folder)  # the process that made the folder may have been killed before this
            self._close_to_others()
            try:
                lock.acquire(timeout=_LOCK_SECONDS if seconds is None else seconds)
            except Timeout:
                raise StateError(
                    f"{self.folder}: another process is at work on this client; if two machines or SuperNodes share "
                    "the folder, give each its own client-name"
                ) from None
        self._is_locked = True
        try:
            yield self
        finally:
            self._is_locked = False
            lock.release()

    def before(self, round_number: int) -> ClientState:
        """The newest readable generation of an earlier round, or the state before the first one.

        Raises
        ------
        UnreadableStateError
            A file has a newer version, is encrypted with another key, or is not encrypted although a key is set, or is
            the state of another client or of other keys; it is left as it is.
        StateError
            That generation has been dropped, because the client has gone on for more rounds than it keeps; or the run
            is new, and the client keeps too many already.
        """
        self._settle()
        generations = self._generations()
        state = self._newest([number for number in generations if number < round_number])
        if state is self._empty and generations:
            oldest = self._newest(generations[::-1])
            if oldest.follows or self._remember:  # the first state, which was a file, is no longer there
                raise StateError(
                    f"{self.folder}: the state before round {round_number} is gone, because the client has done round "
                    f"{generations[0]}; start the run anew"
                )
        return state

    def answer(self, round_number: int) -> Answer | None:
        """The stored reply of a round; None if the round is not done or its reply is not readable.

        Raises
        ------
        StateError
            As :meth:`before`.
        """
        self._settle()
        if self._read_state(round_number) is None:
            return None
        found = self._read(self._path(ANSWER, round_number), atomic.VERSION, Answer.from_record)
        return found[1] if found is not None and found[0] == self._empty.run else None

    def save_trained(self, state: ClientState, answer: Answer) -> None:
        """Store a round's reply, then the state that completes the round; drop older and later generations.

        Raises
        ------
        StateError
            The disk refuses the files; what was stored before is still there.
        """
        with self.locked(), self._explained():
            self._settle()
            # Later rounds belong to a course that the server has given up. They go first: after a crash, a client
            # that is asked for one of them must not find it done.
            self._drop(lambda number: number > state.round)
            atomic.write(self._path(ANSWER, state.round), *answer.to_record(state.run))
            self._write(state)
            kept = [number for number in self._generations() if number <= state.round][:_GENERATIONS]
            self._drop(lambda number: number not in kept, answers=lambda number: number != state.round)
            remove_partials(self.folder, *_WRITTEN)

    def save(self, state: ClientState) -> None:
        """Store a state in place of the one of the same round.

        Raises
        ------
        StateError
            The disk refuses the file; what was stored before is still there.
        """
        with self.locked(), self._explained():
            self._settle()
            self._write(state)
            remove_partials(self.folder, *_WRITTEN)

    def _path(self, kind: str, round_number: int) -> Path:
        return atomic.path_of(self.folder, kind, round_number)

    def _generations(self) -> list[int]:
        return atomic.numbered(self.folder, STATE)

    def _newest(self, numbers: list[int]) -> ClientState:
        for number in numbers:
            state = self._read_state(number)
            if state is not None:
                return state
        return self._empty

    def _write(self, state: ClientState) -> None:
        self._write_to(self.folder, state)

    def _write_to(self, folder: Path, state: ClientState) -> None:
        path, named = atomic.path_of(folder, STATE, state.round), max(self._empty.names, state.names, key=len)
        state = replace(state, names=named, dataset=self._empty.dataset or state.dataset)
        atomic.write(path, *state.to_record(), version=client_state.VERSION)

    def _read_state(self, round_number: int) -> ClientState | None:
        def parse(arrays: Mapping[str, Array], record: Mapping[str, Any]) -> ClientState:
            state = ClientState.from_record(arrays, record)
            if state.run == self._empty.run and state.round != round_number:
                raise StateError(f"holds round {state.round}")
            return state

        path = self._path(STATE, round_number)
        state: ClientState | None = self._read(path, client_state.VERSION, parse)
        if state is None or state.run != self._empty.run:
            return None
        self._check(path, state)
        return state

    def _check(self, path: Path, state: ClientState) -> None:
        """Refuse a whole state that does not fit: the server, which names the run and its keys, may be wrong."""
        if state.seen.shape != self._empty.seen.shape:
            raise UnreadableStateError(
                f"{path}: holds {len(state.seen)} classes, not {len(self._empty.seen)}; a run goes on with its own keys"
            )
        held, wanted = state.buffer.content, self._empty.buffer.content
        if held.dtype != wanted.dtype or held.shape[1:] != wanted.shape[1:]:
            raise UnreadableStateError(
                f"{path}: holds a buffer of {held.dtype} {tuple(held.shape[1:])}, not {wanted.dtype} "
                f"{tuple(wanted.shape[1:])}; a run goes on with its own keys"
            )
        theirs, ours = state.client, self._empty.client
        if None not in (theirs, ours) and theirs != ours:
            raise UnreadableStateError(
                f"{path}: holds the state of client {theirs} of this run, and this is client {ours}; start the "
                "SuperNode with the partition-id that it had, or with another client-name"
            )
        told = list(self._empty.names[: len(state.names)])
        if told and told != list(state.names):
            raise UnreadableStateError(
                f"{path}: its classes are {list(state.names)!r:.200}, the server's {told!r:.200}: the server has lost a "
                "round in which classes came; start a new run, which keeps this client's memory"
            )

    def _read(self, path: Path, version: int, parse: Callable[..., Any]) -> Any:
        """What a file holds; None if there is none, or it was damaged and is now set aside."""
        try:
            return atomic.read(path, version, parse)
        except UnreadableStateError:
            raise
        except StateError as error:
            with self._explained():
                aside = atomic.set_aside(path)
            logger.warning("%s; it was set aside as %s, and the previous generation is used", error, aside.name)
            return None

    def _drop(self, states: Callable[[int], bool], answers: Callable[[int], bool] | None = None) -> None:
        """Remove states, and answers, of some rounds from the disk."""
        dropped = False
        for kind, is_meant in ((ANSWER, answers or states), (STATE, states)):
            for number in atomic.numbered(self.folder, kind):
                if is_meant(number):
                    self._path(kind, number).unlink()
                    dropped = True
        if dropped:
            sync_folder(self.folder)

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
            logger.warning("%s was open to others (mode %o); now only its owner has access", self.folder, mode)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Explain errors of the system in one line."""
        try:
            yield
        except OSError as error:
            raise StateError(
                f"{self.folder} cannot be written ({error.strerror or error}); what was stored before is kept: make "
                "room, or give this user the right to write there"
            ) from error

    def _settle(self) -> None:
        """Make the folder's generations this run's: move other runs' files out, and this run's in."""
        if self._settled or not self.folder.is_dir():
            return
        with self._explained():
            moved = self._earlier.settle(self._empty.run, begin=self._begin if self._remember else None)
        for run, number in moved.items():
            logger.warning(
                "%s held the state of an earlier run, %s, up to its round %d; it was moved to %s",
                printable(str(self.folder)),
                printable(run),
                number,
                printable(str(self._earlier.place_of(run))),
            )
        self._settled = True

    def _begin(self, place: Path) -> str | None:
        """Write the first state of this run into a folder; return the earlier run of which it holds every sample."""
        assert self._remember is not None
        earlier = self._newest_earlier()
        state = self._empty if earlier is None else self._remember(earlier, self._empty)
        self._write_to(place, state)
        if earlier is None or _held(state) < _held(earlier):
            return None
        return earlier.run

    def _newest_earlier(self) -> ClientState | None:
        """The newest readable state of the run that was here last."""
        for folder in (self.folder, *self._earlier.newest_first(STATE)):
            for number in atomic.numbered(folder, STATE):
                path = atomic.path_of(folder, STATE, number)
                state: ClientState | None = self._read(path, client_state.VERSION, ClientState.from_record)
                if state is not None:
                    return state
        return None


def _held(state: ClientState) -> int:
    return len(state.buffer) + len(state.waiting)
