"""Orders to a run, which another process leaves in the run's folder and the run reads between rounds and while it waits.

An order is an empty file in ``orders/`` that stays, so that a run that is started again finds it: ``stop``; ``remove-N``
for client N; or, until it is done, ``rollback-N`` for the model of round N. A run over inboxes orders itself ``finish-N``
while it is in round N: devices may have learned all that they had before the server was killed.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fedkace_flwr.storage.folders import make_folder

_STOP = "stop"
_REMOVE = re.compile(r"remove-(\d{1,6})", re.ASCII)
_ROLLBACK = re.compile(r"rollback-(\d{1,18})", re.ASCII)


class Orders:
    """The orders in a run's folder.

    Parameters
    ----------
    folder : Path
        The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "orders"

    def finish(self, number: int) -> None:
        """Order that a round takes place whether or not samples wait."""
        self._give(f"finish-{number}")

    def finished(self, number: int) -> None:
        """Take away the order of :meth:`finish`."""
        (self._folder / f"finish-{number}").unlink(missing_ok=True)

    def must_finish(self, number: int) -> bool:
        """Whether a round takes place whether or not samples wait."""
        return (self._folder / f"finish-{number}").exists()

    def stop(self) -> None:
        """Order the run to end after the present round."""
        self._give(_STOP)

    def go_on(self) -> None:
        """Take back :meth:`stop`."""
        (self._folder / _STOP).unlink(missing_ok=True)

    def remove(self, client: int) -> None:
        """Order that a client takes part no longer, for good."""
        self._give(f"remove-{client}")

    def roll_back(self, to: int) -> None:
        """Order that the next round goes back to the model of an earlier one, instead of any that was ordered before."""
        self._give(f"rollback-{to}")
        for other in [number for number, _ in self._rollbacks() if number != to]:
            self.rolled_back(other)

    def rolled_back(self, to: int) -> None:
        """Take away the order of :meth:`roll_back`, which is done."""
        (self._folder / f"rollback-{to}").unlink(missing_ok=True)

    @property
    def rollback(self) -> int | None:
        """The round whose model the next round goes back to; None if that is not ordered."""
        return max(self._rollbacks(), key=lambda order: order[1], default=(None, 0))[0]

    @property
    def stopped(self) -> bool:
        """Whether the run is to end."""
        return (self._folder / _STOP).exists()

    def removed(self) -> frozenset[int]:
        """The clients that take part no longer."""
        return frozenset(int(found[1]) for path in self._files() if (found := _REMOVE.fullmatch(path.name)))

    def _rollbacks(self) -> Iterator[tuple[int, int]]:
        """Round and time of each rollback that is ordered: two if a process was killed while it replaced one."""
        for path in self._files():
            if found := _ROLLBACK.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    yield int(found[1]), path.stat().st_mtime_ns

    def _files(self) -> list[Path]:
        try:
            return list(self._folder.iterdir())
        except FileNotFoundError:
            return []

    def _give(self, name: str) -> None:
        make_folder(self._folder)
        (self._folder / name).touch()
        if os.geteuid() == 0:  # the run may be another user's, who has to read this
            owner = self._folder.parent.stat()
            for path in (self._folder, self._folder / name):
                os.chown(path, owner.st_uid, owner.st_gid)
