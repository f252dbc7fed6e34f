"""How far a study in the background has come, and about how long it still takes."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from experiments.background.folder import Command, Folder
from experiments.durations import span
from experiments.studies.study import Study
from fedkace_flwr.storage.files import LARGEST_LOG, read_text

_FEW = 20  # runs that fit on a screen
_PLANNED = re.compile(r"^plan: (\d+) workers? of", re.MULTILINE)


@dataclass(frozen=True)
class Progress:
    """How far one run has come.

    Attributes
    ----------
    name, method : str
        Of the run.
    seconds : list of float
        The duration of each round that is done.
    rounds : int
        The rounds of the whole run.
    finished : bool
        Whether the run has its summary.
    """

    name: str
    method: str
    seconds: list[float]
    rounds: int
    finished: bool

    @property
    def state(self) -> str:
        """``finished``, ``started`` or ``to do``."""
        return "finished" if self.finished else "started" if self.seconds else "to do"

    @property
    def left(self) -> int:
        """Rounds that are not done yet."""
        return 0 if self.finished else max(0, self.rounds - len(self.seconds))


def progress_of(study: Study) -> list[Progress]:
    """How far each run of a study has come, from the folders of its results."""
    found = []
    for name, config in study.runs.items():
        folder = study.folder / name
        path = folder / "rounds.jsonl"
        text = read_text(path, LARGEST_LOG) if path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        seconds = [float(json.loads(line)["seconds"]["round"]) for line in lines]
        found.append(Progress(name, config.method, seconds, config.stream.rounds, (folder / "summary.json").exists()))
    return found


def seconds_left(runs: list[Progress], at_once: int) -> float | None:
    """An estimate of the time that the rest takes; None before the first round.

    A round is taken to last as long as the mean round of its run so far, else of its method, else of the study.
    """
    every = [value for run in runs for value in run.seconds]
    if not every:
        return None
    total = 0.0
    for run in runs:
        alike = [value for other in runs if other.method == run.method for value in other.seconds]
        total += run.left * fmean(run.seconds or alike or every)
    unfinished = sum(run.left > 0 for run in runs)
    return total / max(1, min(at_once, unfinished))


def show_status(folder: Folder, study_of: Callable[[Command, Folder], Study], console: Console) -> None:
    """Print state, progress and estimate; of a study with many runs, only those that have started and are not finished.

    Parameters
    ----------
    folder : Folder
        The study's folder.
    study_of : callable
        Reads the study of a command.
    console : Console
        Where to print.

    Raises
    ------
    RunError
        Nothing was ever started there.
    """
    command = folder.known_command()
    study = study_of(command, folder)
    runs = progress_of(study)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("run", "state", "rounds"):
        table.add_column(heading, justify="right" if heading == "rounds" else "left")
    shown = runs if len(runs) <= _FEW else [run for run in runs if run.state == "started"]
    for run in shown:
        table.add_row(run.name, run.state, f"{len(run.seconds)} of {run.rounds}")
    if shown:
        console.print(table)
    done, rounds = sum(len(run.seconds) for run in runs), sum(run.rounds for run in runs)
    finished = sum(run.finished for run in runs)
    console.print(f"{finished} of {len(runs)} runs and {done} of {rounds} rounds are done", highlight=False)
    console.print(f"{_state(folder)}; commit {command.commit[:12]}; log: {folder.log}", highlight=False, soft_wrap=True)
    if finished < len(runs):
        left = seconds_left(runs, _at_once(folder.log) if study.engine == "inline" else 1)
        text = "unknown before the first round" if left is None else f"about {span(left)}"
        console.print(f"time left: {text}", highlight=False)


def _state(folder: Folder) -> str:
    started, ended = folder.read("running.json"), folder.read("ended.json")
    since = started["started"] if started else "never"
    if folder.locked:
        return f"running since {since}"
    if ended is None:
        return f"not running; started {since}, then killed, or the machine was restarted"
    word = {0: "finished", 143: "paused", -15: "paused"}.get(ended["status"], f"failed with status {ended['status']}")
    return f"{word} since {ended['ended']}"


def _at_once(log: Path) -> int:
    """The workers of the latest start, as the runner printed them."""
    found = _PLANNED.findall(read_text(log, LARGEST_LOG, "replace")) if log.exists() else []
    return int(found[-1]) if found else 1
