"""The inbox of a device: a folder into which other programs drop files, and from which rounds take them.

::

    new/        files arrive here complete, by being renamed into place
    taken/      files of the current round, and of the last one that was learned
    done/       files that were learned, if they are kept
    rejected/   files that could not be used, each with a file that gives the reason

A round first takes its files by renaming them into ``taken/<run>-<round>/``; then it trains; and once what it has
learned is on disk, it marks that folder. After a crash at any moment every file is therefore either still to be
learned (in ``new/``, or in a folder without the mark) or learned and marked. If the crash came between writing the
state and setting the mark, the client's state tells which.

With open classes, files of a class that nobody has named yet wait in ``new/`` until the server has given it a number.

The files of the last learned round stay in ``taken/`` until the next round is on disk: a client whose newest state is
damaged continues from the previous one, and needs them again.

Whoever writes to the inbox is not trusted. Folders are held open while files are moved and read, so no link leads out
of them, and whatever is wrong with one file, its name, its kind or its permissions, concerns that file alone.
"""

import logging
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

import numpy as np

from fedkace_flwr.data import inbox_files as arrivals
from fedkace_flwr.data.inbox_files import Arrival, Arrived
from fedkace_flwr.data.picture_process import PictureProcess
from fedkace_flwr.errors import DataError
from fedkace_flwr.keys import CLASS_NAME, is_class_name
from fedkace_flwr.storage.folders import OpenFolder, make_folder
from fedkace_flwr.storage.names import fitted, printable, token

logger = logging.getLogger(__name__)

_ROOMS = ("new", "taken", "done", "rejected")
Strangers = Literal["reject", "wait", "keep secret"]
"""What becomes of files of a class that is not agreed."""

_PARTIAL, _LEARNED, _GONE = ".partial", ".learned", ".gone"
_REASON = ".reason.txt"
_CLAIM = re.compile(r"(?P<run>[0-9A-Za-z]{1,64})-(?P<round>\d{6,18})(?P<mark>|\.partial|\.learned|\.gone)", re.ASCII)
_NUMBERED = 10  # names alike that are numbered; more of them get random endings, which are found at once


@dataclass(frozen=True)
class _Rooms:
    """The four folders, held open."""

    new: OpenFolder
    taken: OpenFolder
    done: OpenFolder
    rejected: OpenFolder


@dataclass(frozen=True)
class _Claim:
    """A folder in ``taken/``: the files of one round of one run."""

    name: str
    run: str
    round: int
    mark: str


class Inbox:
    """One client's inbox.

    Parameters
    ----------
    folder : Path
        Holds the four folders, all on one file system. What does not exist is created, for this user only.
    run : str
        The run that takes files. Files that another run took but did not learn are taken again.
    class_names : sequence of str
        The agreed classes, in the order of their labels.
    image_size : int
        Height and width of images, in pixels.
    bound : int
        Maximum number of samples that a round takes; files are never split, and one that holds more is rejected.
    keep : bool
        Whether learned files are moved to ``done/`` (true) or deleted.
    strangers : {"reject", "wait", "keep secret"}
        What becomes of files of a class that is not agreed: they are rejected; or, with open classes, they wait; or
        they are rejected because the class's name must not leave this machine.

    Raises
    ------
    DataError
        The folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        class_names: Sequence[str],
        image_size: int,
        *,
        bound: int,
        keep: bool = True,
        strangers: Strangers = "reject",
    ) -> None:
        self.folder = folder
        self._run = token(run or "run")
        self._classes = class_names
        self._size = image_size
        self._bound = bound
        self._keep = keep
        self._strangers = strangers
        try:
            make_folder(folder)
            with OpenFolder.at(folder) as root:
                for name in _ROOMS:
                    root.make(name)
        except OSError as fault:
            raise DataError(f"inbox = {folder}: cannot be used ({fault}); must be a writable folder") from fault
        with self._open():
            pass

    def take(self, number: int, learned: int) -> Arrived:
        """Take the samples of a round; repeated calls return the same ones until the round is learned.

        Parameters
        ----------
        number : int
            The round, from 1.
        learned : int
            The last round of this run whose outcome is on disk. Files of that round and of earlier ones are not
            learned again by a later round.

        Returns
        -------
        Images, uint8 (n, 3, S, S), and labels, int64 (n,); n = 0 if nothing has arrived.

        Raises
        ------
        DataError
            The folder cannot be used, for example because the disk is full.
        """
        with self._open() as rooms:
            self._tidy(rooms, learned)
            claim = self._claim_of(rooms, number)
            if claim is None and number > learned:
                claim = self._fill(rooms, number, learned)
            return self._read(rooms, claim) if claim is not None else self._nothing()

    def peek(self, most: int) -> Arrived:
        """Samples of agreed classes that no round has taken, at most so many; no file is moved.

        Files that cannot be used are passed over; the round that takes them rejects them.

        Raises
        ------
        DataError
            The folder cannot be used.
        """
        parts, samples = [self._nothing()], 0
        with self._open() as rooms, PictureProcess() as decoder:
            for each in arrivals.listing(rooms.new):
                if samples >= most:
                    break
                with suppress(DataError, OSError):
                    images, labels = arrivals.read(each, self._classes, self._size, decoder.square)
                    parts.append((images[: most - samples], labels[: most - samples]))
                    samples += len(parts[-1][1])
        images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        return images, labels

    def learned(self, number: int) -> None:
        """Mark a round's files as learned, once the round's outcome is on disk."""
        with self._open() as rooms:
            claim = self._claim_of(rooms, number)
            if claim is not None:
                self._mark(rooms, claim)

    def new_classes(self, most: int) -> list[str]:
        """Names of classes whose files wait, sorted; of many the first ``most`` that are found."""
        found: set[str] = set()
        with self._open() as rooms:
            for each in arrivals.listing(rooms.new) if self._strangers == "wait" else ():
                if len(found) < most:
                    found.update(self._count(rooms, each)[1])
        return sorted(found)[:most]

    @contextmanager
    def _open(self) -> Iterator[_Rooms]:
        """Hold the four folders open; explain errors of the system, here and in the block, in one line."""
        try:
            with ExitStack() as stack:
                root = stack.enter_context(OpenFolder.at(self.folder))
                rooms = _Rooms(*(stack.enter_context(root.within(name)) for name in _ROOMS))
                if len({room.device for room in vars(rooms).values()}) > 1:
                    raise DataError(f"inbox = {self.folder}: its four folders must be on one file system")
                for room in (rooms.taken, rooms.done, rooms.rejected):
                    if room.close_to_writers():
                        logger.warning("%s: others could write there; now only its owner can", room.path)
                yield rooms
        except OSError as fault:
            raise DataError(f"inbox = {self.folder}: cannot be used ({fault})") from fault

    def _claims(self, rooms: _Rooms) -> list[_Claim]:
        found = []
        for name, is_folder in rooms.taken.entries():
            parts = _CLAIM.fullmatch(name)
            if parts and is_folder and parts["round"] == f"{int(parts['round']):06d}":
                found.append(_Claim(name, parts["run"], int(parts["round"]), parts["mark"]))
        return found

    def _claim_of(self, rooms: _Rooms, number: int) -> _Claim | None:
        own = [claim for claim in self._claims(rooms) if (claim.run, claim.round) == (self._run, number)]
        return next((claim for claim in own if claim.mark in ("", _LEARNED)), None)

    def _tidy(self, rooms: _Rooms, learned: int) -> None:
        """Put away files that are learned and no longer needed; set the mark if a crash prevented it."""
        for claim in self._claims(rooms):
            own = claim.run == self._run
            if claim.mark == _GONE:
                self._remove(rooms, claim.name)
            elif claim.mark != _PARTIAL and own and claim.round == learned:
                self._mark(rooms, claim)
            elif claim.mark != _PARTIAL and (claim.round < learned if own else claim.mark == _LEARNED):
                self._put_away(rooms, claim)

    def _mark(self, rooms: _Rooms, claim: _Claim) -> None:
        if not claim.mark:
            self._clear(rooms, claim.name + _LEARNED)
            rooms.taken.move(claim.name, rooms.taken, claim.name + _LEARNED)
            rooms.taken.sync()

    def _put_away(self, rooms: _Rooms, claim: _Claim) -> None:
        name = f"{claim.run}-{claim.round:06d}"
        if self._keep:
            rooms.taken.move(claim.name, rooms.done, _free(rooms.done, name))
            rooms.done.sync()
        else:
            gone = name + _GONE  # a half-deleted folder must not look as if it had to be learned
            if rooms.taken.has_folder(gone):
                self._remove(rooms, gone)
            self._clear(rooms, gone)
            rooms.taken.move(claim.name, rooms.taken, gone)
            rooms.taken.sync()
            self._remove(rooms, gone)
        rooms.taken.sync()

    def _fill(self, rooms: _Rooms, number: int, learned: int) -> _Claim | None:
        """Take files for a round: first those of a round that was taken but never learned, then new ones."""
        name = f"{self._run}-{number:06d}"
        for taken in (name, name + _PARTIAL):
            self._clear(rooms, taken)
        rooms.taken.make(name + _PARTIAL)
        with rooms.taken.within(name + _PARTIAL) as partial:
            for claim in self._claims(rooms):
                waits = claim.run == self._run and claim.mark != _PARTIAL and claim.round <= learned
                if claim.name != name + _PARTIAL and not waits:
                    with rooms.taken.within(claim.name) as source:
                        moved = [self._move(rooms, each, partial) for each in arrivals.listing(source)]
                        _sync(source, partial)
                    if all(moved):
                        self._remove(rooms, claim.name)
            samples = 0
            for each in arrivals.listing(partial):
                held, strangers = self._count(rooms, each)
                if not strangers:
                    samples += held
                else:  # of a class that the run that took it knew
                    self._move(rooms, each, rooms.new)
            for each in arrivals.listing(rooms.new):
                expected, strangers = self._count(rooms, each)
                if strangers:
                    continue
                if samples + expected > self._bound:
                    break
                if expected and self._move(rooms, each, partial):
                    samples += expected
            _sync(rooms.new, partial)
        if not samples:
            self._remove(rooms, name + _PARTIAL)
            return None
        rooms.taken.move(name + _PARTIAL, rooms.taken, name)
        rooms.taken.sync()
        return _Claim(name, self._run, number, "")

    def _read(self, rooms: _Rooms, claim: _Claim) -> Arrived:
        parts, samples = [self._nothing()], 0
        with rooms.taken.within(claim.name) as folder, PictureProcess() as decoder:
            for each in arrivals.listing(folder):
                try:
                    images, labels = arrivals.read(each, self._classes, self._size, decoder.square)
                    self._check_bound(each, len(labels))
                except (DataError, OSError) as fault:
                    if isinstance(fault, arrivals.UnknownClassError) and self._strangers == "wait":  # as if it came now
                        self._move(rooms, each, rooms.new)
                    else:
                        self._reject(rooms, each, fault)
                    continue
                if samples + len(labels) > self._bound:  # it holds more than when it was taken: as if it came now
                    self._move(rooms, each, rooms.new)
                    continue
                samples += len(labels)
                parts.append((images, labels))
        images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        return images, labels

    def _nothing(self) -> Arrived:
        return np.empty((0, 3, self._size, self._size), dtype=np.uint8), np.empty(0, dtype=np.int64)

    def _count(self, rooms: _Rooms, arrival: Arrival) -> tuple[int, list[str]]:
        """Number of samples in a file, and the names of classes for which it has to wait.

        A file that cannot be used is rejected and counts as 0.
        """
        try:
            samples, names = arrivals.count(arrival)
            self._check_bound(arrival, samples)
            strangers = sorted(names.difference(self._classes)) if self._strangers != "reject" else []
            for name in strangers:
                told = f"{printable(arrival.name)}: class {name!r:.100}"
                if not is_class_name(name):
                    raise DataError(f"{told}: must be {CLASS_NAME}")
                if self._strangers == "keep secret":
                    raise DataError(
                        f"{told} is not one of the {len(self._classes)} agreed classes, and the site's policy lets no "
                        "names of new ones leave (new-classes = 'refuse')"
                    )
        except (DataError, OSError) as fault:
            self._reject(rooms, arrival, fault)
            return 0, []
        return samples, strangers

    def _check_bound(self, arrival: Arrival, samples: int) -> None:
        if samples > self._bound:
            name = printable(arrival.name)
            raise DataError(f"{name}: holds {samples} samples; must be at most inbox-bound = {self._bound}")

    def _move(self, rooms: _Rooms, arrival: Arrival, target: OpenFolder) -> bool:
        """Move a file to another folder, into the folder of its class; whether it is there now."""
        try:
            if arrival.class_name is None:
                arrival.folder.move(arrival.name, target, _free(target, arrival.name))
            else:
                target.make(arrival.class_name)
                with target.within(arrival.class_name) as place:
                    arrival.folder.move(arrival.name, place, _free(place, arrival.name))
        except OSError as fault:
            self._reject(rooms, arrival, fault)
            return False
        return True

    def _clear(self, rooms: _Rooms, name: str) -> None:
        """Reject what is at the place of a folder of ours and is no folder."""
        if rooms.taken.has(name) and not rooms.taken.has_folder(name):
            arrival = Arrival(rooms.taken, name, None)
            self._reject(rooms, arrival, DataError(f"{name}: is in the way of a round's folder"))

    def _reject(self, rooms: _Rooms, arrival: Arrival, fault: DataError | OSError) -> None:
        """Move a file to ``rejected/`` with the reason, or leave it alone if it cannot be moved."""
        if isinstance(fault, FileNotFoundError):  # its producer has removed it
            return
        if isinstance(fault, OSError) and arrivals.concerns_all(fault):
            raise fault
        target, reason = _free(rooms.rejected, arrival.name, ending=_REASON), printable(str(fault))
        rooms.rejected.create(target + _REASON, f"{reason}\n".encode())
        try:
            arrival.folder.move(arrival.name, rooms.rejected, target)
        except OSError as stuck:
            rooms.rejected.remove(target + _REASON)
            if arrivals.concerns_all(stuck):
                raise
            if not isinstance(stuck, FileNotFoundError):
                place = printable(str(arrival.folder.path / arrival.name))
                logger.warning("%s cannot be used (%s), nor moved away (%s); it is left there", place, reason, stuck)
            return
        rooms.rejected.sync()
        logger.warning("%s was rejected: %s", printable(str(rooms.rejected.path / target)), reason)

    def _remove(self, rooms: _Rooms, name: str) -> None:
        try:
            rooms.taken.remove_tree(name)
        except OSError as fault:
            if arrivals.concerns_all(fault):
                raise
            logger.warning("%s cannot be removed (%s); it is left there", rooms.taken.path / name, fault)


def waiting(folder: Path, most: int, class_names: Collection[str] | None = None) -> tuple[int, list[str]]:
    """Count the labelled samples in an inbox that no round has learned, up to ``most``; nothing is moved.

    Files that cannot be used count as nothing; the next round rejects them.

    Parameters
    ----------
    folder : Path
        The inbox.
    most : int
        Where the count ends.
    class_names : collection of str, optional
        With open classes, those agreed so far: files of others do not count.

    Returns
    -------
    The count, and the names of the classes for which files wait, sorted.

    Raises
    ------
    DataError
        The folder cannot be read.
    """
    samples, names = 0, set[str]()
    try:
        with OpenFolder.at(folder) as root, ExitStack() as stack:
            rooms = {room: stack.enter_context(root.within(room)) for room in ("new", "taken") if root.has_folder(room)}
            taken = rooms["taken"].entries() if "taken" in rooms else []
            claims = [name for name, is_folder in taken if is_folder and _is_unlearned(name)]
            places = [stack.enter_context(rooms["taken"].within(name)) for name in claims]
            for place in [*places, *(rooms[room] for room in ("new",) if room in rooms)]:
                for arrival in arrivals.listing(place):
                    if samples >= most:
                        break
                    with suppress(DataError, OSError):
                        count, found = arrivals.count(arrival)
                        strangers = set() if class_names is None else found.difference(class_names)
                        samples += 0 if strangers else count
                        names |= set(filter(is_class_name, strangers))
    except FileNotFoundError:  # the first round makes it
        return 0, []
    except OSError as fault:
        raise DataError(f"inbox = {folder}: cannot be read ({fault})") from fault
    return samples, sorted(names)


def _is_unlearned(name: str) -> bool:
    claim = _CLAIM.fullmatch(name)
    return claim is not None and claim["mark"] in ("", _PARTIAL)


def _sync(*folders: OpenFolder) -> None:
    """Synchronise folders and the folders in them."""
    for folder in folders:
        for name, is_folder in folder.entries():
            if is_folder:
                with suppress(PermissionError, FileNotFoundError, NotADirectoryError), folder.within(name) as inner:
                    inner.sync()
        folder.sync()


def _free(folder: OpenFolder, name: str, ending: str = "") -> str:
    """The name, or one like it, that is not in the folder, neither as it is nor with an ending; it fits with that."""
    most = folder.longest - len(ending)
    stem, suffix = PurePath(name).stem, PurePath(name).suffix
    number = 0
    while True:
        mark = f"~{number if number < _NUMBERED else secrets.token_hex(4)}" if number else ""
        free = fitted(f"{stem}{mark}{suffix}", most)
        if not folder.has(free) and not folder.has(free + ending):
            return free
        number += 1
