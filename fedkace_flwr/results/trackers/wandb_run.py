"""Weights & Biases: a run that is sent to its server, or kept in the run's folder until ``wandb sync`` sends it."""

import os
import uuid
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.config import Config
from fedkace_flwr.results.trackers.tracker import (
    Tracker,
    class_counts,
    keep_run,
    known_run,
    naming,
    over_epochs,
    scalars,
    summarised,
)

NAME = "wandb"
_NAMED = (NAME, "Weights & Biases", "WANDB_MODE=offline needs no server")
_SENT = ("online", "run", "shared")  # modes
_SECONDS = 5  # waited for the server


class WandbRun(Tracker):
    """A run of Weights & Biases.

    Its project is ``WANDB_PROJECT`` or else ``fedkace``, its group is the study's folder. Without ``WANDB_MODE`` it is
    offline unless the user has logged in.
    """

    def __init__(self, folder: Path, config: Config, first_round: int) -> None:
        wandb: Any = import_module("wandb")
        self._histogram = wandb.Histogram
        identity = known_run(folder, NAME) or uuid.uuid4().hex[:8]
        with naming(*_NAMED):
            self._run: Any = wandb.init(
                project=_project(),
                group=folder.resolve().parent.name,
                name=folder.name,
                id=identity,
                resume="allow",
                dir=str(folder),
                mode=_mode(wandb),
                config=config.effective(),
                settings=wandb.Settings(silent=True, console="off"),
            )
        keep_run(folder, NAME, identity)

    @classmethod
    def check(cls, place: Path) -> None:
        """Check mode, project and, where runs are sent to it, the server; do not wait long for it."""
        wandb: Any = import_module("wandb")
        with naming(*_NAMED):
            mode = _mode(wandb)
            wandb.Settings(mode=mode, project=_project())
            if mode in _SENT and not wandb.login(prompt=False, verify=True, timeout=_SECONDS):
                raise ValueError("nobody has logged in")

    def add(self, record: Mapping[str, Any], average: float | None) -> None:
        """Hand over a round's numbers and histograms."""
        shown: dict[str, Any] = dict(scalars(record, average))
        for column, values in over_epochs(record).items():
            shown[column] = self._histogram(values)
        for tag, counts in class_counts(record).items():
            edges = np.arange(len(counts) + 1) - 0.5
            shown[tag] = self._histogram(np_histogram=(np.array(counts), edges))
        self._run.log(shown, step=record["round"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Hand over the summary's numbers and end the run."""
        self._run.summary.update(summarised(summary))
        self._run.finish()
        self._run = None

    def close(self) -> None:
        """End a run that is not finished as failed; it goes on once it is resumed."""
        if self._run is not None:
            self._run.finish(exit_code=1)


def _project() -> str:
    return os.environ.get("WANDB_PROJECT") or "fedkace"


def _mode(wandb: Any) -> str:
    """The mode of ``WANDB_MODE``, which is read anew for each run, or else online if the user has logged in."""
    return os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
