"""The trackers by name (key ``tracker``)."""

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.results.trackers.mlflow_run import MlflowRun
from fedkace_flwr.results.trackers.tensorboard_events import TensorBoard
from fedkace_flwr.results.trackers.tracker import Tracker
from fedkace_flwr.results.trackers.wandb_run import WandbRun

logger = logging.getLogger(__name__)

_TRACKERS: Mapping[str, tuple[type[Tracker], str]] = {
    "tensorboard": (TensorBoard, "torch.utils.tensorboard"),
    "mlflow": (MlflowRun, "mlflow.tracking"),
    "wandb": (WandbRun, "wandb"),
}


def check_tracker(config: Config) -> None:
    """Check that the package of the tracker that the configuration chooses is installed.

    Raises
    ------
    ConfigError
        It is not.
    """
    name = config.run.tracker
    if name == "none":
        return
    try:
        import_module(_TRACKERS[name][1])
    except ImportError as fault:
        raise ConfigError(
            f"tracker = {name!r}: the package {name} cannot be imported ({fault}); pip install 'fedkace-flwr[{name}]'"
        ) from fault


def check_server(config: Config) -> None:
    """Check the settings of the tracker that the configuration chooses, and that its server answers.

    What the runs of a study share there is made. Raises as :func:`check_tracker`, and RunError if it cannot be used.
    """
    check_tracker(config)
    if config.run.tracker != "none":
        _TRACKERS[config.run.tracker][0].check(Path(config.run.results_dir))


class Tracking:
    """A run's tracker, if it has one. A tracker that fails is left, and the run goes on: its records are complete.

    Parameters
    ----------
    folder : Path
        The run's folder.
    config : Config
        The run's configuration.
    first_round : int
        The next round.

    Raises
    ------
    RunError
        The tracker cannot be used.
    """

    def __init__(self, folder: Path, config: Config, first_round: int) -> None:
        self._name = config.run.tracker
        self._tracker: Tracker | None = None
        if self._name != "none":
            self._tracker = _TRACKERS[self._name][0](folder, config, first_round)

    def add(self, record: Mapping[str, Any], average: float | None) -> None:
        """Show a round; arguments as of :meth:`Tracker.add`."""
        self._try(lambda tracker: tracker.add(record, average))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Show that the run is finished."""
        self._try(lambda tracker: tracker.finish(summary))

    def close(self) -> None:
        """Let go of the tracker."""
        self._try(lambda tracker: tracker.close())
        self._tracker = None

    def _try(self, act: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as fault:  # a server that is down, a full disk: trackers raise what they like
            reason = (str(fault).splitlines() or [type(fault).__name__])[0]
            logger.warning(
                "tracker = %r fails (%s) and is left for the rest of this run; rounds.jsonl has every round",
                self._name,
                reason,
            )
            self._tracker = None
