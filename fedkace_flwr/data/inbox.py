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

The files of the last learned round stay in ``taken/`` until the next round is on disk: a client whose newest state is
damaged continues from the previous one, and needs them again.
"""

import logging
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkace_flwr.data import inbox_files as arrivals
from fedkace_flwr.data.inbox_files import Arrived
from fedkace_flwr.errors import DataError
from fedkace_flwr.storage.atomic import sync_folder

logger = logging.getLogger(__name__)

_PARTIAL, _LEARNED, _GONE = ".partial", ".learned", ".gone"
_UNREADABLE = (PermissionError,)  # concerns a single file; other errors of the disk concern them all
_CLAIM = re.compile(r"(?P<run>.*)-(?P<round>\d+)(?P<mark>|\.partial|\.learned|\.gone)", re.DOTALL)


@dataclass(frozen=True)
class _Claim:
    """A folder in ``taken/``: the files of one round of one run."""

    path: Path
    run: str
    round: int
    mark: str


class Inbox:
    """One client's inbox.

    Parameters
    ----------
    folder : Path
        Holds the four folders, which are created if necessary, all on one file system.
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

    Raises
    ------
    DataError
        The folder cannot be used.
    """

    def __init__(
        self, folder: Path, run: str, class_names: Sequence[str], image_size: int, *, bound: int, keep: bool = True
    ) -> None:
        self.folder = folder
        self._run = run or "run"
        self._classes = class_names
        self._size = image_size
        self._bound = bound
        self._keep = keep
        self._new, self._taken, self._done, self._rejected = (
            folder / name for name in ("new", "taken", "done", "rejected")
        )
        try:
            for path in (self._new, self._taken, self._done, self._rejected):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise DataError(f"inbox = {folder}: cannot be used ({fault}); must be a writable folder") from fault

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
        try:
            self._tidy(learned)
            claim = self._claim_of(number)
            if claim is None and number > learned:
                claim = self._fill(number, learned)
            return self._read(claim) if claim is not None else self._nothing()
        except OSError as fault:
            raise self._unusable(fault) from fault

    def learned(self, number: int) -> None:
        """Mark a round's files as learned, once the round's outcome is on disk."""
        try:
            claim = self._claim_of(number)
            if claim is not None:
                self._mark(claim)
        except OSError as fault:
            raise self._unusable(fault) from fault

    def _unusable(self, fault: OSError) -> DataError:
        return DataError(f"inbox = {self.folder}: cannot be used ({fault})")

    def _claims(self) -> list[_Claim]:
        found = []
        for path in sorted(self._taken.iterdir()):
            parts = _CLAIM.fullmatch(path.name)
            if parts and path.is_dir():
                found.append(_Claim(path, parts["run"], int(parts["round"]), parts["mark"]))
        return found

    def _claim_of(self, number: int) -> _Claim | None:
        own = [claim for claim in self._claims() if (claim.run, claim.round) == (self._run, number)]
        return next((claim for claim in own if claim.mark in ("", _LEARNED)), None)

    def _tidy(self, learned: int) -> None:
        """Put away files that are learned and no longer needed; set the mark if a crash prevented it."""
        for claim in self._claims():
            own = claim.run == self._run
            if claim.mark == _GONE:
                shutil.rmtree(claim.path)
            elif claim.mark != _PARTIAL and own and claim.round == learned:
                self._mark(claim)
            elif claim.mark != _PARTIAL and (claim.round < learned if own else claim.mark == _LEARNED):
                self._put_away(claim)

    def _mark(self, claim: _Claim) -> None:
        if not claim.mark:
            claim.path.rename(claim.path.with_name(claim.path.name + _LEARNED))
            sync_folder(self._taken)

    def _put_away(self, claim: _Claim) -> None:
        name = f"{claim.run}-{claim.round:06d}"
        if self._keep:
            claim.path.rename(_free(self._done / name))
            sync_folder(self._done)
        else:
            gone = claim.path.with_name(name + _GONE)  # a half-deleted folder must not look as if it had to be learned
            claim.path.rename(gone)
            sync_folder(self._taken)
            shutil.rmtree(gone)
        sync_folder(self._taken)

    def _fill(self, number: int, learned: int) -> _Claim | None:
        """Take files for a round: first those of a round that was taken but never learned, then new ones."""
        name = f"{self._run}-{number:06d}"
        partial = self._taken / (name + _PARTIAL)
        partial.mkdir(exist_ok=True)
        for claim in self._claims():
            waits = claim.run == self._run and claim.mark != _PARTIAL and claim.round <= learned
            if claim.path != partial and not waits:
                self._move_all(arrivals.listing(claim.path), claim.path, partial)
                shutil.rmtree(claim.path)
        samples = sum(self._count(path, class_name) for path, class_name in arrivals.listing(partial))
        chosen = []
        for path, class_name in arrivals.listing(self._new):
            expected = self._count(path, class_name)
            if samples + expected > self._bound:
                break
            chosen += [(path, class_name)] if expected else []
            samples += expected
        self._move_all(chosen, self._new, partial)
        if not samples:
            shutil.rmtree(partial)
            return None
        partial.rename(self._taken / name)
        sync_folder(self._taken)
        return _Claim(self._taken / name, self._run, number, "")

    def _read(self, claim: _Claim) -> Arrived:
        images, labels = self._nothing()
        parts = [(images, labels)]
        for path, class_name in arrivals.listing(claim.path):
            try:
                parts.append(arrivals.read(path, class_name, self._classes, self._size))
            except (DataError, *_UNREADABLE) as fault:
                self._reject(path, fault)
        images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        return images, labels

    def _nothing(self) -> Arrived:
        return np.empty((0, 3, self._size, self._size), dtype=np.uint8), np.empty(0, dtype=np.int64)

    def _count(self, path: Path, class_name: str | None) -> int:
        """Number of samples in a file; a file that cannot be used is rejected and counts as 0."""
        try:
            if not path.is_file() or path.is_symlink():
                raise DataError(f"{path.name}: must be a plain file")
            samples = arrivals.count(path, class_name)
            if samples > self._bound:
                raise DataError(f"{path.name}: holds {samples} samples; must be at most inbox-bound = {self._bound}")
            return samples
        except FileNotFoundError:  # its producer has removed it
            return 0
        except (DataError, *_UNREADABLE) as fault:
            self._reject(path, fault)
            return 0

    def _reject(self, path: Path, fault: Exception) -> None:
        target, reason = _free(self._rejected / path.name), str(fault)
        target.with_name(f"{target.name}.reason.txt").write_bytes(f"{reason}\n".encode(errors="backslashreplace"))
        path.rename(target)
        sync_folder(self._rejected)
        logger.warning("%s was rejected: %s", target, reason)

    def _move_all(self, files: Sequence[tuple[Path, str | None]], source: Path, target: Path) -> None:
        """Move files to another folder, keeping their class folders; the change is on disk when this returns."""
        touched = {source, target}
        for path, _ in files:
            place = target / path.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            touched |= {path.parent, place.parent}
            with suppress(FileNotFoundError):  # its producer has removed it
                path.rename(_free(place))
        for folder in touched:
            sync_folder(folder)


def _free(path: Path) -> Path:
    """The path, or a numbered variant of it that does not exist yet."""
    number, free = 1, path
    while os.path.lexists(free):
        free = path.with_name(f"{path.stem}~{number}{path.suffix}")
        number += 1
    return free
