"""MLflow: a run in the store that ``MLFLOW_TRACKING_URI`` names, or else in ``mlflow.db`` beside the run's folder."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.results.trackers.tracker import Tracker, keep_run, known_run, naming, scalars, summarised

NAME = "mlflow"
_MOST_AT_ONCE = 100  # parameters, which MLflow's servers take in one request
# Of the check before the first round, where MLflow's own (7 and 120) would mean minutes of silence.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
_WITNESS = "run/failures"  # a metric that every round has


class MlflowRun(Tracker):
    """A run of MLflow.

    Its experiment is ``MLFLOW_EXPERIMENT_NAME`` or else named like the folder of the study, its parameters are the
    configuration, and metrics have the names of TensorBoard's tags. Histograms are left out: MLflow has none.
    """

    def __init__(self, folder: Path, config: Config, first_round: int) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._metric, self._done = Metric, 0
        place = folder.resolve().parent
        number = _experiment(place)
        with _naming(place):
            self._client: Any = MlflowClient(tracking_uri=_store(place))
            known = known_run(folder, NAME)
            if known is not None:
                self._run: str = self._client.get_run(known).info.run_id
                self._client.update_run(self._run, status="RUNNING")
                shown = self._client.get_metric_history(self._run, _WITNESS)
                self._done = max((each.step for each in shown), default=0)
                return
            self._run = self._client.create_run(number, run_name=folder.name).info.run_id
            keep_run(folder, NAME, self._run)
            params = [Param(key, str(value)) for key, value in config.effective().items()]
            for first in range(0, len(params), _MOST_AT_ONCE):
                self._client.log_batch(self._run, params=params[first : first + _MOST_AT_ONCE])
            self._client.log_batch(self._run, tags=[RunTag("folder", str(folder.resolve()))])

    @classmethod
    def check(cls, place: Path) -> None:
        """Make the store and the experiment, which the runs of a study share, and do not wait long for a server."""
        _experiment(place.resolve())

    def add(self, record: Mapping[str, Any], average: float | None) -> None:
        """Send a round's numbers; a round that an earlier process has sent is left as it is."""
        if record["round"] > self._done:
            self._send(scalars(record, average), record["round"])
            self._done = record["round"]

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the summary's numbers and mark the run as finished."""
        self._send({f"summary/{name}": value for name, value in summarised(summary).items()}, self._done)
        self._client.set_terminated(self._run, status="FINISHED")
        self._run = ""

    def close(self) -> None:
        """Mark a run that is not finished as killed; it is running again once it is resumed."""
        if self._run:
            self._client.set_terminated(self._run, status="KILLED")

    def _send(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)


def _store(place: Path) -> str:
    """Return where the runs of a study's folder are shown."""
    if told := os.environ.get("MLFLOW_TRACKING_URI"):
        return told
    from sqlalchemy.engine import URL

    # With the driver's name MLflow makes no folder for the path as the URL quotes it.
    return URL.create("sqlite+pysqlite", database=str(place / "mlflow.db")).render_as_string()


def _experiment(place: Path) -> str:
    """Return the id of the experiment of a study's folder; make it, and its store, if there is none."""
    from mlflow.tracking import MlflowClient

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or place.name
    with _naming(place), _impatient(), FileLock(place / ".mlflow.lock"):  # of two that make a store at once, one fails
        client: Any = MlflowClient(tracking_uri=_store(place))
        found = client.get_experiment_by_name(name)
        if found is None:
            return str(client.create_experiment(name))
    if found.lifecycle_stage != "active":
        raise RunError(f"tracker = 'mlflow': experiment {name} was deleted; MLFLOW_EXPERIMENT_NAME names another")
    return str(found.experiment_id)


def _naming(place: Path) -> AbstractContextManager[None]:
    return naming(NAME, f"MLflow at {_store(place)}", "MLFLOW_TRACKING_URI names another")


@contextmanager
def _impatient() -> Iterator[None]:
    """Let MLflow's client give up soon; what the user has set remains."""
    added = {name: value for name, value in _PATIENCE.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
