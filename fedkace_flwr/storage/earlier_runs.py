"""Moving the files of earlier runs aside, in a client's folder.

A run that is started by mistake must not destroy what an earlier one has learned. Every step is a renaming, so each
file is in one of its two places at any moment.
"""

import contextlib
import os
from pathlib import Path

from fedkace_flwr.storage import atomic
from fedkace_flwr.storage.folders import EARLIER, make_folder, sync_folder
from fedkace_flwr.storage.names import token

_KEPT_RUNS = 1
_KINDS = ("answer", "state")


class EarlierRuns:
    """The part of a client's folder that holds earlier runs, ``earlier/RUN/``.

    Parameters
    ----------
    folder : Path
        The client's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def place_of(self, run: str) -> Path:
        """The folder of a run."""
        return self._folder / EARLIER / token(run)

    def move_out(self, round_number: int, run: str) -> None:
        """Move the answer and the state of a round to their run's folder."""
        place = self.place_of(run)
        make_folder(place)
        for kind in _KINDS:
            path = atomic.path_of(self._folder, kind, round_number)
            if path.exists():
                os.replace(path, place / path.name)
                # Before the state is moved: otherwise a power cut could keep the state's move alone, and the answer
                # that stays behind would belong to no state.
                sync_folder(place)
                sync_folder(self._folder)

    def move_in(self, run: str) -> None:
        """Move the files of a run back to the client's folder."""
        place = self.place_of(run)
        if not place.is_dir():
            return
        for kind in _KINDS:
            for number in atomic.numbered(place, kind):
                os.replace(atomic.path_of(place, kind, number), atomic.path_of(self._folder, kind, number))
        sync_folder(self._folder)
        sync_folder(place)
        with contextlib.suppress(OSError):
            place.rmdir()

    def forget(self) -> None:
        """Remove all earlier runs but the last."""
        # Empty folders belong to runs that were moved back in; they do not count as earlier runs.
        places = [path for path in (self._folder / EARLIER).glob("*") if any(path.glob("state-*.npz"))]
        for place in sorted(places, key=lambda path: path.stat().st_mtime_ns)[:-_KEPT_RUNS]:
            for kind in _KINDS:
                for path in place.glob(f"{kind}-*.npz"):
                    path.unlink()
            with contextlib.suppress(OSError):
                place.rmdir()
