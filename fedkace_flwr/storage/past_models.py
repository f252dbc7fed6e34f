"""Past models of a run, ``server/past/checkpoint-<round>.npz``: what a rollback goes back to.

They are hard links to the checkpoints of their rounds, or copies where the file system has no links, and cost no time
and no writing; the fewer, the older they are.
"""

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedkace_flwr.storage import atomic
from fedkace_flwr.storage.atomic import CHECKPOINT
from fedkace_flwr.storage.files import PARTIAL, remove_partials
from fedkace_flwr.storage.folders import PAST, make_folder, sync_folder

_LAST = 10
_HOUR, _DAY, _WEEK = 3600.0, 86400.0, 604800.0
_MONTH = 30 * _DAY


@dataclass(frozen=True)
class PastModel:
    """A stored model: its round, when it was written, in seconds since the epoch, and its bytes."""

    round: int
    written: float
    size: int


class PastModels:
    """The past models of a run.

    Parameters
    ----------
    folder : Path
        That of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._checkpoints, self._folder = folder, folder / PAST

    def add(self, number: int, most: int) -> None:
        """Keep the checkpoint of a round, and others that a killed process did not come to; thin the older ones.

        Models of later rounds belong to a course that the server has given up, and go.

        Parameters
        ----------
        number : int
            The round.
        most : int
            Most bytes that they may have together.

        Raises
        ------
        OSError
            The system refuses; the checkpoints are as they were.
        """
        make_folder(self._folder)
        remove_partials(self._folder)
        before = atomic.numbered(self._folder, CHECKPOINT)
        for each in atomic.numbered(self._checkpoints, CHECKPOINT):
            if each == number or (each < number and each not in before):
                _link(self.path_of(each, self._checkpoints), self.path_of(each))
        found = self.found()
        kept = thinned([model for model in found if model.round <= number], most)
        for model in found:
            if model.round not in kept:
                self.path_of(model.round).unlink(missing_ok=True)
        sync_folder(self._folder)

    def found(self) -> list[PastModel]:
        """The models that are there, the newest first."""
        models = []
        for number in atomic.numbered(self._folder, CHECKPOINT):
            with suppress(FileNotFoundError):  # the run goes on meanwhile
                facts = self.path_of(number).stat()
                models.append(PastModel(number, facts.st_mtime, facts.st_size))
        return models

    def path_of(self, number: int, folder: Path | None = None) -> Path:
        """The file of a round's model."""
        return atomic.path_of(folder or self._folder, CHECKPOINT, number)


def thinned(models: Collection[PastModel], most: int) -> set[int]:
    """Choose the models to keep: the last ten, then one an hour for a day, one a day for 30 days, and one a week.

    Of an hour, a day or a week (of UTC) the last one is kept. Ages count from the newest model, so that a run that rests
    loses nothing. What has been thinned before is thinned to the same.

    Parameters
    ----------
    models : collection of PastModel
        The models.
    most : int
        Most bytes of those that are kept; the newest come first, and none after one that does not fit.

    Returns
    -------
    set of int
        Their rounds.
    """
    ordered = sorted(models, key=lambda model: -model.round)
    now = ordered[0].written if ordered else 0.0  # not the largest: a clock may have been wrong for a round
    kept, spent, taken = set[int](), 0, set[tuple[float, float]]()
    for place, model in enumerate(ordered):
        age = now - model.written
        every = _HOUR if age <= _DAY else _DAY if age <= _MONTH else _WEEK
        slot = every, model.written // every
        if place >= _LAST and slot in taken:
            continue
        taken.update((each, model.written // each) for each in (_HOUR, _DAY, _WEEK))
        spent += model.size
        if spent > most:
            break
        kept.add(model.round)
    return kept


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it; at any moment the name is that of a whole file, or of none."""
    partial = target.with_name(target.name + PARTIAL)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copy2(source, partial)
        with partial.open("rb") as copy:
            os.fsync(copy.fileno())
    os.replace(partial, target)
    partial.unlink(missing_ok=True)  # two names of one file are left as they are
