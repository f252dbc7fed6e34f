"""Run a study: check all runs, skip finished ones, resume interrupted ones, and retry failed ones.

Several runners may work on one study. Each run is claimed by one of them. A runner with nothing left to start waits
for the others' runs, and takes over those whose runner has ended.
"""

import json
import os
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console

from fedkace_flwr.compute.devices import index_of
from fedkace_flwr.config import Config
from fedkace_flwr.configured import check_network, configured
from fedkace_flwr.errors import ConfigError, FedkaceError, MissingDataError, ResultsError, RunError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.results.folders import is_set_aside
from fedkace_flwr.experiments.results.reading import merged, read_study
from fedkace_flwr.experiments.running.cells import Cell, naming
from fedkace_flwr.experiments.running.display import Display, display
from fedkace_flwr.experiments.running.engines import Engine, FlowerEngine, InlineEngine, check_ray
from fedkace_flwr.experiments.running.jobs import Job
from fedkace_flwr.experiments.running.simulation import CLUSTER
from fedkace_flwr.experiments.running.workers import VISIBLE, Machine, Workers, plan_workers
from fedkace_flwr.experiments.studies.study import Study
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.results.run_folder import SCHEMA, is_run
from fedkace_flwr.results.trackers.catalogue import check_server, check_tracker
from fedkace_flwr.storage.files import write_text
from fedkace_flwr.storage.folders import make_folder
from fedkace_flwr.storage.targets import claim

_POLL_SECONDS = 0.25
_NAMED = 4  # runs without data that are named
_ATTEMPTS = 2  # without a finished round between them


@dataclass
class Outcome:
    """The results of a study.

    Attributes
    ----------
    summaries : dict of str to dict
        Summaries of the finished runs by name, in the study's order.
    failures : dict of str to str
        The last error of each run that failed twice without finishing a round in between, or that another process
        replaced by one with other settings.
    missing : dict of str to str
        The reason for each run that was left out because its data are missing.
    """

    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def run_study(study: Study, console: Console, waiting: Job | None = None) -> Outcome:
    """Run the unfinished runs of a study; those whose data are not on this machine are named and left out.

    Parameters
    ----------
    study : Study
        The study.
    console : Console
        Where progress is shown.
    waiting : Job, optional
        A process for Flower's engine that waits for the first run.

    Raises
    ------
    FedkaceError
        A run's configuration, data, folder or GPUs are unsuitable, no run has its data, or a tracker's server does not
        answer; raised before any run starts.
    """
    study, missing, workers = check_study(study, progress=console.is_terminal)
    cells = [Cell(name, config, study.data[name]) for name, config in study.runs.items()]
    runs = study.folder.glob("*/environment.json")
    claim(
        study.folder, "a study", known=(study.folder / ".claims").is_dir() or any(is_run(path.parent) for path in runs)
    )
    for cell in cells:
        cell.check()
    if study.engine == "flower":
        check_ray()
    for config in {cell.config.run.tracker: cell.config for cell in cells if not cell.finished}.values():
        check_server(config)
    describe(study)
    show_missing(missing, console)
    show_workers(study, workers, console)
    engine: Engine
    if study.engine == "inline":
        engine = InlineEngine(workers.places)
    else:
        engine = FlowerEngine(workers.count, workers.gpu_fraction, waiting, workers.visible)
    try:
        with display(console, cells) as shown:
            failures = _Shift(engine, workers.count if study.engine == "inline" else 1, cells, shown).work()
    except KeyboardInterrupt:
        if not all(cell.finished for cell in cells):
            raise
        failures = {}  # the last round ended while the processes were being stopped
    summaries = {cell.name: cell.summary() for cell in cells if cell.finished}
    for cell in cells:
        if cell.name not in summaries and cell.name not in failures:
            failures[cell.name] = f"{cell.name}: another process has replaced it by a run with other settings or data"
    return Outcome(summaries, failures, missing)


def check_study(
    study: Study, *, progress: bool = False, download: bool = True, machine: Machine | None = None
) -> tuple[Study, dict[str, str], Workers]:
    """Make the server's checks for every run, prepare the data sets, and choose the number of workers.

    Parameters
    ----------
    study : Study
        The study.
    progress : bool
        Show a progress bar while a data set is prepared.
    download : bool
        Whether missing files may be downloaded.
    machine : Machine, optional
        The machine to plan for; by default this one.

    Returns
    -------
    study : Study
        The study without the runs whose data are missing, and with the digests of the others' data.
    missing : dict of str to str
        The reason for each run that is left out.
    workers : Workers
        The plan.

    Raises
    ------
    FedkaceError
        The first check that fails, or no run has its data.
    """
    found: dict[str, Config] = {}
    data: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name, config in study.runs.items():
        try:
            method, complete = configured(config)
            check_network(method, complete)
            experiment = Experiment(complete, progress=progress, download=download)
        except MissingDataError as error:
            missing[name] = str(error)
            continue
        experiment.check_streams()
        experiment.check_given_weights()
        check_tracker(config)
        found[name], data[name] = config, experiment.dataset.digest
    if missing and not found:
        raise MissingDataError(next(iter(missing.values())))
    study = replace(study, runs=found, data=data)
    workers = plan_workers(study, machine)
    check_devices(study, workers)
    return study, missing, workers


def check_devices(study: Study, workers: Workers) -> None:
    """Check that every run can have the GPU that it asks for, without touching one.

    Raises
    ------
    ConfigError
        It cannot, or it asks for a GPU by a number of its own.
    """
    for config in study.runs.values():
        name = config.run.device
        number = index_of(name)
        if number is None:
            continue
        if number > 0:
            raise ConfigError(
                f"device = {name!r}: the runner gives each worker its GPU, which is then its only one; set "
                f'device = "cuda", and {VISIBLE} to choose among the GPUs'
            )
        if study.gpu_fraction == 0:
            raise ConfigError(
                f"device = {name!r} with gpu-fraction = 0: clients see no GPU then; set --gpu-fraction, for example 0.1"
            )
        if not workers.gpus:
            raise ConfigError(f'device = {name!r}: {workers.why_no_gpu}; use device = "cpu" or auto')


def show_missing(missing: Mapping[str, str], console: Console) -> None:
    """Name the runs that are left out because their data are missing, with the reason."""
    for reason in dict.fromkeys(missing.values()):
        names = [name for name, why in missing.items() if why == reason]
        shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        text = f"left out, without data: {shown} ({reason})"
        console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)


def show_workers(study: Study, workers: Workers, console: Console) -> None:
    """Print the plan and its warnings."""
    if study.engine == "flower" and (cluster := os.environ.get(CLUSTER)):
        console.print(f"plan: one worker for each CPU of the Ray cluster at {cluster}", highlight=False)
        return
    console.print(f"plan: {workers}", highlight=False, soft_wrap=True)
    for warning in workers.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)


def describe(study: Study) -> None:
    """Add the study's runs and axes to ``study.json`` in its folder, one runner after the other."""
    path = study.folder / "study.json"
    content = {
        "schema": SCHEMA,
        "study": study.name,
        "scale": study.scale,
        "title": study.title,
        "note": study.note,
        "paper": study.paper,
        "axes": study.axes,
        "keys": {axis: sorted(own) for axis, own in study.keys.items()},
        "runs": study.cells,
    }
    make_folder(study.folder / ".claims")
    with FileLock(study.folder / ".claims" / "study"):
        with suppress(ResultsError):
            if before := read_study(path):
                runs = {name: labels for name, labels in before["runs"].items() if not is_set_aside(Path(name))}
                content = merged({**before, "runs": runs}, content)
        write_text(path, json.dumps(content, indent=1) + "\n")


class _Shift:
    """One runner's work on a study: ``slots`` runs at a time."""

    def __init__(self, engine: Engine, slots: int, cells: list[Cell], shown: Display) -> None:
        self._engine, self._slots, self._shown = engine, slots, shown
        self._left = deque(cells)
        self._running: dict[Cell, Job] = {}
        self._starts: Counter[Cell] = Counter()
        self._failures: Counter[Cell] = Counter()  # in a row
        self._reached: Counter[Cell] = Counter()  # rounds on record at the last failure
        self._errors: dict[str, str] = {}
        self._awaited: set[Cell] = set()  # others' runs that have been named

    def work(self) -> dict[str, str]:
        """Work until no run is left; return the errors of the runs that failed twice."""
        try:
            while self._left or self._running:
                started = len(self._running) < self._slots and self._start_one()
                ended = [cell for cell, job in self._running.items() if not job.running()]
                for cell in self._running:
                    self._shown.follow(cell)
                for cell in ended:
                    self._settle(cell, self._running.pop(cell))
                if not started and not ended:
                    time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            self._shown.say("stopping; finished rounds are kept")
            raise
        finally:
            for cell, job in self._running.items():
                job.stop()
                cell.release()
        return self._errors

    def _start_one(self) -> bool:
        """Start the first run that no other runner has claimed; return False if there is none."""
        for _ in range(len(self._left)):
            cell = self._left.popleft()
            if not cell.claim():
                self._left.append(cell)
                continue
            if cell.finished:
                cell.release()
                self._shown.end(cell, note="already finished")
                return True
            self._starts[cell] += 1
            try:
                with naming(cell):
                    prepared = cell.prepare()
                    if cell.set_aside:
                        self._shown.say(cell.set_aside)
                    self._shown.begin(cell, self._starts[cell])
                    self._running[cell] = self._engine.start(prepared, cell.folder / "app.log")
            except FedkaceError as error:
                self._after_failure(cell, str(error))
                cell.release()
            return True
        if not self._running:  # only the runs of other runners are left
            for cell in self._left:
                if cell not in self._awaited:
                    self._awaited.add(cell)
                    self._shown.say(f"{cell.name}: another process is working on it; waiting")
        return False

    def _settle(self, cell: Cell, job: Job) -> None:
        try:
            with naming(cell):
                job.check()
                if not cell.finished:
                    if Orders(cell.folder).stopped:
                        raise RunError(f"ended, as it was ordered; fedkace stop {cell.folder} --undo lets it go on")
                    raise RunError(f"ended without a result; see {cell.folder / 'app.log'}")
        except FedkaceError as error:
            self._after_failure(cell, str(error))
        else:
            self._shown.end(cell, note="")
        finally:
            job.stop()
            cell.release()

    def _after_failure(self, cell: Cell, error: str) -> None:
        if cell.rounds > self._reached[cell]:
            self._failures[cell] = 0
        self._failures[cell] += 1
        self._reached[cell] = cell.rounds
        if self._failures[cell] < _ATTEMPTS:
            self._shown.say(f"{error}; retrying")
            self._left.appendleft(cell)
        else:
            self._errors[cell.name] = error
            self._shown.end(cell, note="failed twice")
