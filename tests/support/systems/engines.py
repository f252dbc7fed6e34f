"""Engines that start no processes."""

from collections.abc import Sequence
from pathlib import Path

from fedkace_flwr.config import Config
from fedkace_flwr.errors import FedkaceError, RunError
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.jobs import Job


class InProcessEngine:
    """The inline engine without a process per run, whose imports would take most of a small run's time.

    Parameters
    ----------
    places : optional
        As for the inline engine; not used.
    """

    def __init__(self, places: Sequence[tuple[str, float]] | None = None) -> None:
        pass

    def start(self, config: Config, log: Path) -> Job:
        """Run a configuration and wait for its end."""
        return _FinishedJob(config)


class _FinishedJob(Job):
    def __init__(self, config: Config) -> None:
        self._error: FedkaceError | None = None
        try:
            run_inline(config)
        except FedkaceError as error:
            self._error = error

    def running(self) -> bool:
        return False

    def check(self) -> None:
        if self._error is not None:
            raise RunError(str(self._error))

    def stop(self) -> None:
        pass
