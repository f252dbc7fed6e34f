"""Show the progress of a study: live bars on a terminal and in a notebook, plain lines elsewhere."""

import importlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from fedkace_flwr.experiments.results.averages import mean
from fedkace_flwr.experiments.results.summary_table import percent
from fedkace_flwr.experiments.running.cells import Cell
from fedkace_flwr.storage.files import LARGEST_LOG, read_text

_ROUNDS_LISTED = 200  # rounds of a study that are listed above the live bars
_FRAME = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


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
        Live bars; without them, and above them in short studies on a terminal, each round is printed as a line.
    """

    def __init__(self, console: Console, total: int, rounds: int, progress: Progress | None) -> None:
        self._console, self._total, self._done = console, total, 0
        self._progress = progress
        self._lists_rounds = progress is None or (rounds <= _ROUNDS_LISTED and not console.is_jupyter)
        self._whole = progress.add_task("all runs", total=rounds, note=f"0 of {total} runs done") if progress else None
        self._bars: dict[str, TaskID] = {}
        self._shown: dict[str, int] = {}
        self._accuracies: dict[str, list[float | None]] = {}

    def begin(self, cell: Cell, attempt: int) -> None:
        """Show that a run starts, or after which round it continues; rounds on record are counted, but not listed."""
        total, records = cell.config.stream.rounds, self._recorded(cell)
        if self._progress and cell.name not in self._bars:
            self._bars[cell.name] = self._progress.add_task(cell.name, total=total, note="starting")
        self._catch_up(cell, records, listed=False)
        if records and self._lists_rounds:
            text = f"continuing after round {len(records)} of {total}"
            self._console.print(f"{cell.name}: {text}", highlight=False)
        elif not self._progress:
            again = "starting again" if attempt > 1 else "starting"
            self._console.print(f"{cell.name}: {again}, {total} rounds", highlight=False)

    def follow(self, cell: Cell) -> None:
        """Show each round of a run once its line is in ``rounds.jsonl``."""
        self._catch_up(cell, self._recorded(cell), listed=self._lists_rounds)

    def end(self, cell: Cell, *, note: str) -> None:
        """Show that a run has ended, successfully or not."""
        self._done += 1
        shown = self._shown.get(cell.name, 0)
        if self._progress:
            if cell.name in self._bars:
                self._progress.remove_task(self._bars.pop(cell.name))
            assert self._whole is not None
            left, done = cell.config.stream.rounds - shown, f"{self._done} of {self._total} runs done"
            self._progress.update(self._whole, advance=left, note=done, refresh=True)
        if note or not self._progress:
            self._console.print(f"{cell.name}: {note or 'done'} ({self._done} of {self._total})", highlight=False)

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @staticmethod
    def _recorded(cell: Cell) -> list[str]:
        path = cell.folder / "rounds.jsonl"
        text = read_text(path, LARGEST_LOG) if path.exists() else ""
        return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _catch_up(self, cell: Cell, records: list[str], *, listed: bool) -> None:
        shown, accuracies = self._shown.get(cell.name, 0), self._accuracies.setdefault(cell.name, [])
        del accuracies[len(records) :]  # a resumed run may have dropped lines that have already been shown
        with suppress(KeyError, TypeError, ValueError):  # a damaged record, which the run itself names
            for line in records[len(accuracies) :]:
                record = json.loads(line)
                accuracies.append(record["accuracy"])
                if len(accuracies) > shown:
                    self._show(cell, record, mean(accuracies), listed=listed)
        self._shown[cell.name] = max(len(records), shown)

    def _show(self, cell: Cell, record: dict[str, Any], so_far: float | None, *, listed: bool) -> None:
        note = f"accuracy {percent(record['accuracy'])} %, so far {percent(so_far)} %"
        if self._progress:
            assert self._whole is not None
            self._progress.update(self._bars[cell.name], completed=record["round"], note=note)
            self._progress.update(self._whole, advance=1, refresh=True)
        if listed:
            rounds = cell.config.stream.rounds
            self._console.print(f"{cell.name}: round {record['round']} of {rounds}, {note}", highlight=False)


class _NotebookBars(Progress):
    """Bars in a notebook: one piece of output, as HTML, that is drawn anew in place. No widgets are needed."""

    def __init__(self, *columns: ProgressColumn, console: Console, expand: bool) -> None:
        super().__init__(*columns, console=console, expand=expand, auto_refresh=False)
        self._width = console.width
        self._shown: Any = None

    def start(self) -> None:
        """Begin the output, in the cell that is being executed."""
        display = importlib.import_module("IPython.display").display
        self._shown = display(in_notebook(self.get_renderable(), self._width), raw=True, display_id=True)

    def stop(self) -> None:
        """Draw what was reached; it stays."""
        self.refresh()
        self._shown = None

    def refresh(self) -> None:
        """Draw the bars anew."""
        if self._shown is not None:
            self._shown.update(in_notebook(self.get_renderable(), self._width), raw=True)


def in_notebook(shown: RenderableType, width: int) -> dict[str, str]:
    """Return something as the kinds of output that a notebook shows, ``width`` characters wide."""
    page = Console(file=io.StringIO(), record=True, width=width, force_jupyter=False, force_terminal=True)
    page.print(shown)
    html = page.export_html(inline_styles=True, code_format=_FRAME, clear=False)
    return {"text/html": html, "text/plain": page.export_text()}


@contextmanager
def display(console: Console, cells: list[Cell]) -> Iterator[Display]:
    """Show the progress of a study's runs until the block ends."""
    rounds = sum(cell.config.stream.rounds for cell in cells)
    if console.quiet or not (console.is_terminal or console.is_jupyter):
        yield Display(console, len(cells), rounds, None)
        return
    whole = Column(min_width=len("0:00:00"), no_wrap=True)  # no narrow terminal cuts it
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),  # what is left of the line
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(table_column=whole),
        TextColumn("left"),
    )
    bars = _NotebookBars if console.is_jupyter else Progress
    with bars(*columns, console=console, expand=True) as progress:
        yield Display(console, len(cells), rounds, progress)
