"""Orders to a run, which another process leaves in the run's folder and the run reads between rounds and while it waits.

An order is an empty file in ``orders/`` that stays: ``stop``, or ``remove-N`` for client N. A run that is started again
finds it.
"""

import re
from pathlib import Path

from fedkace_flwr.storage.folders import make_folder

_STOP = "stop"
_REMOVE = re.compile(r"remove-(\d{1,6})", re.ASCII)


class Orders:
    """The orders in a run's folder.

    Parameters
    ----------
    folder : Path
        The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "orders"

    def stop(self) -> None:
        """Order the run to end after the present round."""
        self._give(_STOP)

    def go_on(self) -> None:
        """Take back :meth:`stop`."""
        (self._folder / _STOP).unlink(missing_ok=True)

    def remove(self, client: int) -> None:
        """Order that a client takes part no longer, for good."""
        self._give(f"remove-{client}")

    @property
    def stopped(self) -> bool:
        """Whether the run is to end."""
        return (self._folder / _STOP).exists()

    def removed(self) -> frozenset[int]:
        """The clients that take part no longer."""
        try:
            names = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return frozenset()
        return frozenset(int(found[1]) for name in names if (found := _REMOVE.fullmatch(name)))

    def _give(self, name: str) -> None:
        make_folder(self._folder)
        (self._folder / name).touch()
