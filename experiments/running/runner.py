"""Run a study: check all runs, skip finished ones, resume interrupted ones, and retry failed ones.

Several runners may work on one study. Each run is claimed by one of them. A runner with nothing left to start waits
for the others' runs, and takes over those whose runner has ended.
"""

import json
import os
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.running.cells import Cell, naming
from experiments.running.display import Display, display
from experiments.running.engines import CLUSTER, Engine, FlowerEngine, InlineEngine, Job
from experiments.running.guard import Guard
from experiments.running.workers import Workers, plan_workers
from experiments.studies.study import Study
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, FedkaceError, MissingDataError, RunError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.registry import configured
from fedkace_flwr.results.run_folder import SCHEMA, RunFolder
from fedkace_flwr.results.tensorboard import check_events

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
        The last error of each run that failed twice without finishing a round in between.
    """

    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def run_study(study: Study, console: Console) -> Outcome:
    """Run the unfinished runs of a study; those whose data are not on this machine are named and left out.

    Raises
    ------
    FedkaceError
        A run's configuration, data, folder or GPUs are unsuitable, or no run has its data; raised before any run
        starts.
    """
    study, missing = with_data(study, progress=console.is_terminal)
    cells = [Cell(name, config) for name, config in study.runs.items()]
    for config in study.runs.values():
        RunFolder.check(Path(config.run.results_dir))
    workers = plan_workers(study)
    describe(study)
    show_missing(missing, console)
    show_workers(study, workers, console)
    try:
        with display(console, cells) as shown, Guard() as guard, ExitStack() as engines:
            failures = _Shift(study, workers, cells, shown, guard, engines).work()
    except KeyboardInterrupt:
        if not all(cell.finished for cell in cells):
            raise
        failures = {}  # the last round ended while the processes were being stopped
    summaries = {cell.name: cell.summary() for cell in cells if cell.finished}
    return Outcome(summaries, failures)


def with_data(study: Study, *, progress: bool = False, download: bool = True) -> tuple[Study, dict[str, str]]:
    """Make the server's checks for every run, and prepare the data sets.

    Returns
    -------
    study : Study
        The study without the runs whose data are missing.
    missing : dict of str to str
        The reason for each run that is left out.

    Raises
    ------
    FedkaceError
        The first check that fails, or no run has its data.
    """
    found: dict[str, Config] = {}
    missing: dict[str, str] = {}
    for name, config in study.runs.items():
        try:
            experiment = Experiment(configured(config)[1], progress=progress, download=download)
        except MissingDataError as error:
            missing[name] = str(error)
            continue
        experiment.check_streams()
        check_events(config)
        if config.run.device.startswith("cuda") and study.gpu_fraction == 0 and study.engine == "flower":
            raise ConfigError(
                f'device = "{config.run.device}" with gpu-fraction = 0: Ray hides the GPUs from clients that do not '
                "request one; set --gpu-fraction, for example 0.1"
            )
        _ = experiment.device
        found[name] = config
    if missing and not found:
        raise MissingDataError(next(iter(missing.values())))
    return replace(study, runs=found), missing


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
    """Add the study's runs and axes to ``study.json`` in its folder."""
    path = study.folder / "study.json"
    runs: dict[str, Any] = {}
    if path.exists():
        try:
            runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        except (ValueError, KeyError, TypeError):
            runs = {}
    content = {
        "schema": SCHEMA,
        "study": study.name,
        "scale": study.scale,
        "title": study.title,
        "paper": study.paper,
        "axes": study.axes,
        "runs": {**runs, **study.cells},
    }
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


@dataclass
class _Running:
    cell: Cell
    job: Job


class _Shift:
    """One runner's work on a study."""

    def __init__(
        self, study: Study, workers: Workers, cells: list[Cell], shown: Display, guard: Guard, engines: ExitStack
    ) -> None:
        self._study, self._workers = study, workers
        self._shown, self._guard, self._engines = shown, guard, engines
        self._left = deque(cells)
        self._slots = workers.count if study.engine == "inline" else 1
        self._running: list[_Running] = []
        self._starts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()  # in a row
        self._reached: Counter[str] = Counter()  # rounds on record at the last failure
        self._errors: dict[str, str] = {}
        self._engine: Engine | None = None

    def work(self) -> dict[str, str]:
        """Work until no run is left; return the errors of the runs that failed twice."""
        try:
            while self._left or self._running:
                started = len(self._running) < self._slots and self._start_one()
                ended = [running for running in self._running if not self._follow(running)]
                for running in ended:
                    self._running.remove(running)
                    self._settle(running)
                if not started and not ended:
                    time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            self._shown.say("stopping; finished rounds are kept. Flower and Ray may take some seconds to end.")
            raise
        finally:
            for running in self._running:
                running.job.stop()
                running.cell.release()
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
            self._starts[cell.name] += 1
            self._shown.begin(cell, self._starts[cell.name])
            try:
                with naming(cell):
                    prepared = cell.prepare()
                    if cell.set_aside:
                        self._shown.say(cell.set_aside)
                    job = self._ready_engine().start(prepared, cell.folder / "app.log")
            except FedkaceError as error:
                self._after_failure(cell, str(error))
                cell.release()
            else:
                self._running.append(_Running(cell, job))
            return True
        return False

    def _follow(self, running: _Running) -> bool:
        going = running.job.running()
        self._shown.follow(running.cell)
        return going

    def _settle(self, running: _Running) -> None:
        cell = running.cell
        try:
            with naming(cell):
                running.job.check()
                cell.drop_answers()
                if not cell.finished:
                    raise RunError(f"ended without a result; see {cell.folder / 'app.log'}")
        except FedkaceError as error:
            self._after_failure(cell, str(error))
        else:
            self._shown.end(cell, note="")
        finally:
            running.job.stop()
            cell.release()

    def _after_failure(self, cell: Cell, error: str) -> None:
        if not self._running:
            self._engines.close()  # Flower or Ray itself may have failed, so start them anew
            self._engine = None
        if cell.rounds > self._reached[cell.name]:
            self._failures[cell.name] = 0
        self._failures[cell.name] += 1
        self._reached[cell.name] = cell.rounds
        if self._failures[cell.name] < _ATTEMPTS:
            self._shown.say(f"{error}; retrying")
            self._left.appendleft(cell)
        else:
            self._errors[cell.name] = error
            self._shown.end(cell, note="failed twice")

    def _ready_engine(self) -> Engine:
        if self._engine is None:
            environment, home = self._guard.environment, self._guard.home
            if self._study.engine == "inline":
                self._engine = self._engines.enter_context(InlineEngine(environment))
            else:
                flower = FlowerEngine(self._workers.count, self._workers.gpu_fraction, environment, home)
                self._engine = self._engines.enter_context(flower)
        return self._engine
