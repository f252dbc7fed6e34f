"""Show the progress of a study: live bars on a terminal, plain lines elsewhere."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from experiments.results.summary_table import percent
from experiments.running.cells import Cell
from fedkace_flwr.storage.files import LARGEST_LOG, read_text

_ROUNDS_LISTED = 200  # rounds of a study that are listed above the live bars


class Display:
    """Show how many runs are done, and the rounds and accuracy of each current run.

    Parameters
    ----------
    console : Console
        Where to print.
    total : int
        Number of runs in the study.
    rounds : int
        Number of rounds of all runs together.
    progress : Progress, optional
        Live bars; without them, and above them in short studies, each round is printed as a line.
    """

    def __init__(self, console: Console, total: int, rounds: int, progress: Progress | None) -> None:
        self._console, self._total, self._done, self._rounds = console, total, 0, rounds
        self._progress = progress
        self._whole = progress.add_task("all runs", total=rounds, note=f"0 of {total} runs done") if progress else None
        self._bars: dict[str, TaskID] = {}
        self._shown: dict[str, int] = {}
        self._sums: dict[str, tuple[float, int]] = {}

    def begin(self, cell: Cell, attempt: int) -> None:
        """Show that a run starts or resumes."""
        total = cell.config.stream.rounds
        if self._progress:
            if cell.name not in self._bars:
                self._bars[cell.name] = self._progress.add_task(cell.name, total=total, note="starting")
        else:
            again = "starting again" if attempt > 1 else "starting"
            self._console.print(f"{cell.name}: {again}, {total} rounds", highlight=False)

    def follow(self, cell: Cell) -> None:
        """Show each round of a run once its line is in ``rounds.jsonl``."""
        path = cell.folder / "rounds.jsonl"
        text = read_text(path, LARGEST_LOG) if path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        for line in lines[self._shown.get(cell.name, 0) :]:
            self._show(cell, json.loads(line))
        # A resumed run may have dropped lines that have already been shown.
        self._shown[cell.name] = max(len(lines), self._shown.get(cell.name, 0))

    def end(self, cell: Cell, *, note: str) -> None:
        """Show that a run has ended, successfully or not."""
        self._done += 1
        shown = self._shown.get(cell.name, 0)
        if self._progress:
            if cell.name in self._bars:
                self._progress.remove_task(self._bars.pop(cell.name))
            assert self._whole is not None
            self._progress.update(
                self._whole,
                advance=cell.config.stream.rounds - shown,
                note=f"{self._done} of {self._total} runs done",
            )
        if note or not self._progress:
            self._console.print(f"{cell.name}: {note or 'done'} ({self._done} of {self._total})", highlight=False)

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _show(self, cell: Cell, record: dict[str, Any]) -> None:
        total, count = self._sums.get(cell.name, (0.0, 0))
        if record["accuracy"] is not None:
            total, count = total + record["accuracy"], count + 1
        self._sums[cell.name] = total, count
        note = f"accuracy {percent(record['accuracy'])} %, so far {percent(total / count if count else None)} %"
        if self._progress:
            assert self._whole is not None
            self._progress.update(self._bars[cell.name], completed=record["round"], note=note)
            self._progress.advance(self._whole)
        if not self._progress or self._rounds <= _ROUNDS_LISTED:
            rounds = cell.config.stream.rounds
            self._console.print(f"{cell.name}: round {record['round']} of {rounds}, {note}", highlight=False)


@contextmanager
def display(console: Console, cells: list[Cell]) -> Iterator[Display]:
    """Show the progress of a study's runs until the block ends."""
    rounds = sum(cell.config.stream.rounds for cell in cells)
    if not console.is_terminal:
        yield Display(console, len(cells), rounds, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        Remaining(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console) as progress:
        yield Display(console, len(cells), rounds, progress)
