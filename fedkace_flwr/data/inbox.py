"""The inbox of a device: a folder into which other programs drop files, and from which rounds take them.

::

    new/        files arrive here complete, by being renamed into place; pictures without a label in ``unlabelled/``
    taken/      files of the current round, and of the last one that was learned
    done/       files that were learned, if they are kept
    rejected/   files that could not be used, each with a file that gives the reason

A round first takes its files by renaming them into ``taken/<run>-<round>/``; then it trains; and once what it has
learned is on disk, it marks that folder. After a crash at any moment every file is therefore either still to be
learned (in ``new/``, or in a folder without the mark) or learned and marked. If the crash came between writing the
state and setting the mark, the client's state tells which.

Pictures in ``new/unlabelled/`` wait until somebody moves them into the folder of their class, or until a file
``new/labels*.csv`` names it: then the next round moves them there. That file is put away only when all its pictures
are moved, so after a crash the rest of them follow.

With open classes, files of a class that nobody has named yet wait in ``new/`` until the server has given it a number.

The files of the last learned round stay in ``taken/`` until the next round is on disk: a client whose newest state is
damaged continues from the previous one, and needs them again.

Whoever writes to the inbox is not trusted. Folders are held open while files are moved and read, so no link leads out
of them, and whatever is wrong with one file, its name, its kind or its permissions, concerns that file alone.
"""

import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data import inbox_files as arrivals
from fedkace_flwr.data.inbox_files import Arrival, Arrived, Key, Picture
from fedkace_flwr.data.picture_process import PictureProcess
from fedkace_flwr.errors import DataError
from fedkace_flwr.keys import CLASS_NAME, UNLABELLED, is_class_name
from fedkace_flwr.storage.folders import OpenFolder, make_folder
from fedkace_flwr.storage.names import fitted, printable, token

if TYPE_CHECKING:
    from fedkace_flwr.samples import Form

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
    form : Form
        What samples are.
    bound : int
        Maximum number of samples that a round takes; files are never split, and one that holds more is rejected.
    keep : bool
        Whether learned files are moved to ``done/`` (true) or deleted.
    strangers : {"reject", "wait", "keep secret"}
        What becomes of files of a class that is not agreed: they are rejected; or, with open classes, they wait; or
        they are rejected because the class's name must not leave this machine.

    Attributes
    ----------
    keys : list of Key
        Those of the samples that :meth:`take` has returned last.

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
        form: "Form",
        *,
        bound: int,
        keep: bool = True,
        strangers: Strangers = "reject",
    ) -> None:
        self.folder = folder
        self._run = token(run or "run")
        self._classes = class_names
        self._form = form
        self._bound = bound
        self._keep = keep
        self._strangers = strangers
        self.keys: list[Key] = []
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
        Samples, uint8 (n, 3, S, S) or float32 (n, ...), and labels, int64 (n,); n = 0 if nothing has arrived.

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
            self.keys = []
            return self._read(rooms, claim) if claim is not None else self._nothing()

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
            for each in arrivals.labelled(rooms.new) if self._strangers == "wait" else ():
                if len(found) < most:
                    found.update(self._count(rooms, each)[1])
        return sorted(found)[:most]

    # Pictures without a label

    def unlabelled(self) -> list[Picture]:
        """The pictures that wait for a label, in the order in which they came."""
        with self._open() as rooms, _unlabelled(rooms.new) as folder:
            return arrivals.pictures(folder)[0] if folder is not None else []

    def read_unlabelled(self, names: Sequence[str]) -> tuple[list[int], NDArray[Any]]:
        """Read pictures that wait: positions of those that could be read, and their samples, uint8 (n, 3, S, S) or float32 (n, ...).

        A picture that cannot be read is rejected, unless it is gone.
        """
        found: dict[int, NDArray[Any]] = {}
        with self._open() as rooms, _unlabelled(rooms.new) as folder, PictureProcess() as decoder:
            for place, name in enumerate(names):
                if folder is None:
                    break
                arrival = Arrival(folder, name, None)
                try:
                    found[place] = arrivals.single(arrival, self._form, decoder.square)
                except (DataError, OSError) as fault:
                    self._reject(rooms, arrival, fault)
        return [*found], np.stack([*found.values()]) if found else self._nothing()[0]

    def overdue(self, most: int, age: float) -> list[Picture]:
        """The pictures that have waited for more than ``age`` seconds, and the oldest of more than ``most``.

        First, labels that have come are applied.
        """
        with self._open() as rooms:
            self._label(rooms)
        waiting, begin = self.unlabelled(), time.time() - age
        too_many = max(0, len(waiting) - most)
        return [each for place, each in enumerate(waiting) if place < too_many or each.arrived < begin]

    def drop(self, keys: Collection[Key]) -> None:
        """Put pictures that wait away, as if they were learned."""
        with self._open() as rooms, _unlabelled(rooms.new) as folder, ExitStack() as stack:
            if folder is None:
                return
            if self._keep:
                rooms.done.make(UNLABELLED)
                place = stack.enter_context(rooms.done.within(UNLABELLED))
            for picture in arrivals.pictures(folder)[0]:
                if picture.key in keys:
                    with suppress(FileNotFoundError):
                        if self._keep:
                            folder.move(picture.name, place, _free(place, picture.name))
                        else:
                            folder.remove(picture.name)
            if self._keep:
                place.sync()
            folder.sync()

    def rejected(self) -> int:
        """Number of files that were rejected and are still there."""
        with self._open() as rooms:
            return sum(not name.endswith(_REASON) for name, _ in rooms.rejected.entries())

    def _label(self, rooms: _Rooms) -> None:
        """Move pictures whose label has come to the folders of their classes; reject what is no picture."""
        files = arrivals.label_files(rooms.new)
        with _unlabelled(rooms.new) as folder:
            names: dict[str, Arrival] = {}
            if folder is not None:
                waiting, others = arrivals.pictures(folder)
                names = {normalize("NFC", each.name): Arrival(folder, each.name, None) for each in waiting}
                for name in others:
                    fault = DataError(f"{printable(name)}: must be {arrivals.SINGLE}")
                    self._reject(rooms, Arrival(folder, name, None), fault)
            for file in files:
                try:
                    rows = arrivals.labels(file)
                    bad = self._labelled(rooms, names, rows)
                    _sync(rooms.new)
                    if bad:
                        raise DataError(
                            f"{printable(file.name)}: {len(bad)} of {len(rows)} rows cannot be used, the first in {bad[0]}"
                        )
                    if self._keep:
                        rooms.new.move(file.name, rooms.done, _free(rooms.done, file.name))
                        rooms.done.sync()
                    else:
                        rooms.new.remove(file.name)
                    rooms.new.sync()
                except (DataError, OSError) as fault:
                    self._reject(rooms, file, fault)

    def _labelled(self, rooms: _Rooms, waiting: dict[str, Arrival], rows: Sequence[tuple[int, str, str]]) -> list[str]:
        """Apply the rows of a file of labels to pictures by name; what is wrong with those that cannot be used."""
        bad, labels = [], Counter(name for name, _ in {(name, label) for _, name, label in rows})
        for line, name, label in rows:
            fault = ""
            if not name or not label:
                fault = "must be name,label"
            elif labels[name] > 1:
                fault = "has several labels"
            elif not is_class_name(label):
                fault = f"class {label!r:.100}: must be {CLASS_NAME}"
            elif self._strangers != "wait" and label not in self._classes:
                fault = f"class {label!r:.100} is not one of the {len(self._classes)} agreed classes"
            elif (arrival := waiting.get(name)) is not None:
                try:
                    _move_to_class(arrival, label, rooms.new)
                    del waiting[name]
                except OSError as error:
                    if arrivals.concerns_all(error):
                        raise
                    fault = f"cannot be moved to new/{label} ({error})"
            elif not _is_in(rooms.new, label, name):  # nor moved before a crash
                fault = f"no such file in new/{UNLABELLED}, or it has a label already"
            if fault:
                bad.append(f"line {line}, {name!r:.100}: {fault}")
        return bad

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
        self._label(rooms)
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
            for each in arrivals.labelled(rooms.new):
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
                    key = arrivals.key(each)
                    images, labels = arrivals.read(each, self._classes, self._form, decoder.square)
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
                self.keys += [key] * len(labels)
        images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        return images, labels

    def _nothing(self) -> Arrived:
        return np.empty((0, *self._form.shape), dtype=self._form.dtype), np.empty(0, dtype=np.int64)

    def _count(self, rooms: _Rooms, arrival: Arrival) -> tuple[int, list[str]]:
        """Number of samples in a file, and the names of classes for which it has to wait.

        A file that cannot be used is rejected and counts as 0.
        """
        try:
            samples, names = arrivals.count(arrival, self._form)
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
                _move_to_class(arrival, arrival.class_name, target)
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
                for count, found in _counts(place):
                    if samples >= most:
                        break
                    strangers = set() if class_names is None else found.difference(class_names)
                    samples += 0 if strangers else count
                    names |= set(filter(is_class_name, strangers))
    except FileNotFoundError:  # the first round makes it
        return 0, []
    except OSError as fault:
        raise DataError(f"inbox = {folder}: cannot be read ({fault})") from fault
    return samples, sorted(names)


def _counts(folder: OpenFolder) -> Iterator[tuple[int, frozenset[str]]]:
    """The number of samples in each labelled file, and the names of its classes; those of labels that have come too."""
    for arrival in arrivals.labelled(folder):
        with suppress(DataError, OSError):
            yield arrivals.count(arrival)
    files = arrivals.label_files(folder)
    names = set[str]()
    if files:
        with _unlabelled(folder) as inner:
            names = (
                {normalize("NFC", each.name) for each in arrivals.pictures(inner)[0]} if inner is not None else names
            )
    for file in files if names else ():
        with suppress(DataError, OSError):
            for _, name, label in arrivals.labels(file):
                if name in names and is_class_name(label):
                    names.remove(name)
                    yield 1, frozenset({label})


@contextmanager
def _unlabelled(folder: OpenFolder) -> Iterator[OpenFolder | None]:
    """Hold the folder of pictures without labels open; None if there is none that can be used."""
    try:
        inner = folder.within(UNLABELLED)
    except OSError as fault:
        if arrivals.concerns_all(fault):
            raise
        if not isinstance(fault, FileNotFoundError | NotADirectoryError):
            logger.warning("%s cannot be read (%s)", folder.path / UNLABELLED, fault)
        yield None
        return
    with inner:
        yield inner


def _move_to_class(arrival: Arrival, class_name: str, target: OpenFolder) -> None:
    is_new = target.make(class_name)
    with target.within(class_name) as place:
        if is_new:
            place.open_as(target)  # whoever drops files in new/ may do so in the folders of classes
        arrival.folder.move(arrival.name, place, _free(place, arrival.name))


def _is_in(folder: OpenFolder, inner: str, name: str) -> bool:
    """Whether a folder in this one has a file of a name, which may be any text."""
    if name.startswith(".") or set(name) & set("/\0"):
        return False
    try:
        with folder.within(inner) as place:
            return any(place.has(normalize(form, name)) for form in ("NFC", "NFD"))
    except OSError:
        return False


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
