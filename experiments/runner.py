"""Run a study: check all of it, run it with a live display, sum it up."""

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.compare import percent
from experiments.engines import FlowerEngine, InlineEngine, Job
from experiments.study import Study
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.methods import configured
from fedkace_flwr.record import RunFolder

_POLL_SECONDS = 0.25


def run_study(study: Study, console: Console) -> dict[str, dict[str, Any]]:
    """Run every run of a study and return their summaries by name.

    Raises
    ------
    FedkaceError
        Before anything is started: a run's configuration, data, folder or GPUs will not do. Later: a run
        failed, with the app's own error.
    """
    check_study(study, progress=console.is_terminal)
    summaries = {}
    with _display(console) as display, _engine(study) as engine:
        for name, config in study.runs.items():
            folder = Path(config.run.results_dir) / name
            _set_aside(folder)
            folder.mkdir(parents=True)
            job = engine.start(config, folder / "app.log")
            try:
                _follow(job, name, config, folder, display)
                job.check()
            finally:
                job.stop()
            _drop_answers(folder)
            summaries[name] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summaries


def check_study(study: Study, *, progress: bool = False) -> None:
    """Check every run as its server would, and the machine's GPUs; prepare the data sets.

    Raises
    ------
    FedkaceError
        The first thing that will not do.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if study.gpu_fraction > gpus:
        raise ConfigError(f"gpu-fraction = {study.gpu_fraction:g}: this machine has {gpus} GPUs")
    for config in study.runs.values():
        experiment = Experiment(configured(config)[1], progress=progress)
        experiment.check_streams()
        if config.run.device.startswith("cuda") and study.gpu_fraction == 0 and study.engine == "flower":
            raise ConfigError(
                f'device = "{config.run.device}" with gpu-fraction = 0: Ray hides the GPUs from clients that ask for '
                "none; set --gpu-fraction, for example 0.1"
            )
        _ = experiment.device
        RunFolder.check(Path(config.run.results_dir))


def _engine(study: Study) -> AbstractContextManager[InlineEngine | FlowerEngine]:
    return InlineEngine() if study.engine == "inline" else FlowerEngine(study.workers, study.gpu_fraction)


class _Display:
    """Progress bars on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, progress: Progress | None) -> None:
        self._console = console
        self._progress = progress
        self._task: Any = None
        self._accuracies: list[float] = []

    def begin(self, name: str, rounds: int) -> None:
        self._accuracies = []
        self._name, self._rounds = name, rounds
        if self._progress:
            self._task = self._progress.add_task(name, total=rounds, note="starting")
        else:
            self._console.print(f"{name}: starting, {rounds} rounds")

    def add(self, record: dict[str, Any]) -> None:
        if record["accuracy"] is not None:
            self._accuracies.append(record["accuracy"])
        mean = sum(self._accuracies) / len(self._accuracies) if self._accuracies else None
        note = f"accuracy {percent(record['accuracy'])} %, so far {percent(mean)} %"
        if self._progress:
            self._progress.update(self._task, completed=record["round"], note=note)
        else:
            self._console.print(f"{self._name}: round {record['round']} of {self._rounds}, {note}", highlight=False)


@contextmanager
def _display(console: Console) -> Iterator[_Display]:
    if not console.is_terminal:
        yield _Display(console, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Display(console, progress)


def _follow(job: Job, name: str, config: Config, folder: Path, display: _Display) -> None:
    """Show each round as its line appears in ``rounds.jsonl``."""
    display.begin(name, config.stream.rounds)
    lines, read = folder / "rounds.jsonl", 0
    going = True
    while going:
        going = job.running()
        complete = [line for line in _text(lines).splitlines(keepends=True) if line.endswith("\n")]
        for line in complete[read:]:
            display.add(json.loads(line))
        read = len(complete)
        if going:
            time.sleep(_POLL_SECONDS)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _set_aside(folder: Path) -> None:
    """Keep an earlier run of the same name under another one."""
    if folder.exists():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
        target = folder.with_name(f"{folder.name}.{stamp}")
        number = 1
        while target.exists():
            number += 1
            target = folder.with_name(f"{folder.name}.{stamp}-{number}")
        folder.rename(target)


def _drop_answers(folder: Path) -> None:
    """Stored replies serve repeated messages; of a run that is over none will come."""
    for path in folder.glob("clients/client-*/answer-*.npz"):
        path.unlink()
