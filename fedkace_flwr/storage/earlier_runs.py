"""Moving the files of earlier runs aside, in a client's folder, and back.

A run that is started by mistake, or by a server that means harm, must not destroy what an earlier one has learned. Every
step is a renaming, so each file is in one of its two places at any moment, and nothing is removed.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from fedkace_flwr.errors import StateError, UnreadableStateError
from fedkace_flwr.storage import atomic, client_state
from fedkace_flwr.storage.atomic import ANSWER, MODELS, STATE
from fedkace_flwr.storage.files import remove_partials
from fedkace_flwr.storage.folders import EARLIER, make_folder, sync_folder
from fedkace_flwr.storage.names import token

MOST_RUNS = 8
"""Most earlier runs that a client keeps. For a further one the oldest goes whose whole memory lives on in a later run;
without such a run, the client takes part in no further one before its owner has made room."""

_PASSED_ON = "passed"
"""The mark, in a run's folder, that the next run has begun with all samples that this one had."""

STATES = (ANSWER, STATE)
"""The kinds of a client's files that make a round, in the order in which they are moved."""


class EarlierRuns:
    """The part of a client's folder that holds earlier runs, ``earlier/RUN/``.

    Parameters
    ----------
    folder : Path
        The client's folder: that of its state, or of its models.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def place_of(self, run: str) -> Path:
        """The folder of a run."""
        return self._folder / EARLIER / token(run)

    def places(self) -> list[Path]:
        """The folders of earlier runs; empty ones belong to runs that were moved back."""
        kinds = (ANSWER, STATE, MODELS)
        found = (self._folder / EARLIER).glob("*")
        return sorted(place for place in found if any(atomic.numbered(place, kind) for kind in kinds))

    def runs(self, kind: str) -> dict[int, str]:
        """The run of each state, or of each file of models, in the client's folder, by its round, newest first.

        Damaged files are left out: whoever reads them deals with them.

        Raises
        ------
        UnreadableStateError
            A file may be intact, but this process cannot read it.
        """
        found = {}
        for number in atomic.numbered(self._folder, kind):
            path = atomic.path_of(self._folder, kind, number)
            try:
                run = atomic.run_of(path, client_state.VERSION if kind == STATE else atomic.VERSION)
            except UnreadableStateError:
                raise
            except StateError:
                continue
            if run is not None:
                found[number] = run
        return found

    def settle(
        self, run: str, kinds: tuple[str, ...] = STATES, begin: Callable[[Path], str | None] | None = None
    ) -> dict[str, int]:
        """Move the files of other runs out, and those of this run in.

        Parameters
        ----------
        run : str
            The run, or its :func:`~fedkace_flwr.storage.names.token`.
        kinds : tuple of str
            In the order in which they are moved; the last kind's files name their run.
        begin : callable, optional
            If the run is new, it writes the run's first state into a folder, and returns the run whose samples are all
            in that state. It is called before anything is moved: the state from which a run begins is settled once.

        Returns
        -------
        dict of str to int
            The runs that were moved out, each with its last round.

        Raises
        ------
        UnreadableStateError
            As :meth:`runs`.
        StateError
            There would be more than :data:`MOST_RUNS` earlier runs; nothing was moved.
        """
        found, place = self.runs(kinds[-1]), self.place_of(run)
        others = {number: other for number, other in found.items() if token(other) != token(run)}
        surplus = len({*self.places(), *map(self.place_of, others.values())} - {place}) - MOST_RUNS
        if others and surplus > 0:
            self._make_room(run, surplus)
        if begin is not None and len(others) == len(found) and not atomic.numbered(place, kinds[-1]):
            make_folder(place)
            passed = begin(place)
            if passed is not None:
                make_folder(self.place_of(passed))
                (self.place_of(passed) / _PASSED_ON).touch(mode=0o600)
        for number, other in others.items():
            self.move_out(number, other, kinds)
        self._move_in(run, kinds)
        return {other: number for number, other in reversed(others.items())}

    def newest_first(self, kind: str) -> list[Path]:
        """The folders of earlier runs that hold files of a kind, by the time at which the newest of these was written."""
        numbers = {place: atomic.numbered(place, kind) for place in self.places()}
        written = {
            place: max(atomic.path_of(place, kind, number).stat().st_mtime_ns for number in found)
            for place, found in numbers.items()
            if found
        }
        return sorted(written, key=lambda place: written[place], reverse=True)

    def keep_newest(self, kind: str) -> None:
        """Remove all earlier runs but :data:`MOST_RUNS`, of a folder that holds files of one kind alone."""
        for place in self.newest_first(kind)[MOST_RUNS:]:
            _remove(place)

    def _make_room(self, run: str, surplus: int) -> None:
        """Remove the oldest earlier runs whose memory lives on.

        Raises
        ------
        StateError
            There are too few of them; nothing was removed.
        """
        going = [place for place in self.newest_first(STATE) if (place / _PASSED_ON).exists()][-surplus:]
        if len(going) < surplus:
            raise StateError(
                f"{self._folder}: run {run!r} is new, and the states of {MOST_RUNS} earlier runs are kept already; see "
                f"python -m fedkace_flwr.storage earlier {self._folder}, and delete those that are no longer needed"
            )
        for place in going:
            _remove(place)

    def move_out(self, round_number: int, run: str, kinds: Collection[str]) -> None:
        """Move a round's files to their run's folder."""
        place = self.place_of(run)
        make_folder(place)
        for kind in kinds:
            path = atomic.path_of(self._folder, kind, round_number)
            if path.exists():
                os.replace(path, place / path.name)
                # Before the state is moved: otherwise a power cut could keep the state's move alone, and the answer
                # that stays behind would belong to no state.
                sync_folder(place)
                sync_folder(self._folder)

    def _move_in(self, run: str, kinds: Collection[str]) -> None:
        """Move the files of a run back to the client's folder."""
        place = self.place_of(run)
        if not place.is_dir():
            return
        remove_partials(place)
        (place / _PASSED_ON).unlink(missing_ok=True)  # the run goes on, and has what the next one has not
        for kind in kinds:
            for number in atomic.numbered(place, kind):
                path = atomic.path_of(place, kind, number)
                os.replace(path, self._folder / path.name)
        sync_folder(self._folder)
        sync_folder(place)
        with contextlib.suppress(OSError):
            place.rmdir()


def _remove(place: Path) -> None:
    for path in place.glob("*-*"):  # before the mark: what a crash leaves can still be removed
        path.unlink()
    shutil.rmtree(place)
