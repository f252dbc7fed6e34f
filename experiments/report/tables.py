"""Results as tables: methods and their variants as rows, the other axes as columns, and the paper's numbers for comparison.

A cell is the mean over its finished runs, which differ only in their seed. A cell without a finished run is a dash,
even if the paper has a number for it.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from numbers import Real
from typing import Any

import pandas as pd

from fedkace_flwr.experiments.report.markup import Table
from fedkace_flwr.experiments.report.names import (
    axis_label,
    data_name,
    data_of,
    labelled,
    method_name,
    method_rank,
    role,
    symbols_note,
    variant_name,
)
from fedkace_flwr.experiments.report.paper import CONDITION, paper, paper_row, printed
from fedkace_flwr.experiments.results.loading import Results, StudyInfo, rows_of
from fedkace_flwr.experiments.studies.names import TABLES

CHANCE = "chance"
NO_CHANCE = "Chance is left out where it differs between runs with the same seed."
DASH = "-"
_MEDIAN = "median over clients and the final three quarters of the rounds"
_UNMASKED = "if every class counts as a possible answer, %"
_METRICS = {
    "aa": ("AA", "Average accuracy (AA), %"),
    "ar": ("AR", "Average regret against Centralized (AR), % points"),
    "early": ("early", "Accuracy, mean over the first quarter of the rounds, %"),
    "late": ("late", "Accuracy, mean over the second half of the rounds, %"),
    "final": ("final", "Accuracy after the last round, %"),
    "aa_local": ("AA, local", "Average accuracy of the local models, whichever a client predicts with, %"),
    "aa_global": ("AA, global", "Average accuracy of the global model, whichever a client predicts with, %"),
    "aa_unmasked": ("AA, unmasked", f"Average accuracy, {_UNMASKED}"),
    "aa_local_unmasked": ("AA, local, unmasked", f"Average accuracy of the local models, {_UNMASKED}"),
    "aa_global_unmasked": ("AA, global, unmasked", f"Average accuracy of the global model, {_UNMASKED}"),
    "forgetting": ("forgetting", "Forgetting, % points"),
    "backward_transfer": ("backward transfer", "Backward transfer, % points"),
    "forward_transfer": ("forward transfer", "Forward transfer, % points"),
    "condition": (CONDITION, f"Condition number of the whole buffer's kernel matrix, {_MEDIAN}"),
    "class_condition": (CONDITION, f"Condition number of each class's kernel matrix, averaged over classes, {_MEDIAN}"),
}
"""Columns of ``runs.csv`` with the metric's name in the paper, and the title of its table."""

_OF_ALL = ("aa", "ar", "early", "late", "final")  # other metrics are recorded by some runs, which alone have rows
_CONDITIONS = ("condition", "class_condition")
_ALWAYS = {"AA, local": "AS3", "AA, global": "AS2"}  # FedKACE that always predicts so; their rows in table2
_MEANINGS = {
    "aa_local": "As if all clients always predicted with their local models. FedKACE's ablation AS3 does, and trains alike.",
    "aa_global": "As if all clients always predicted with the global model. FedKACE's ablation AS2 does, and trains alike.",
    "forgetting": "Forgetting: by how much each class was answered better in some earlier round than in the last one.",
    "backward_transfer": "Backward transfer: each class's accuracy in the last round minus that of its first round.",
    "forward_transfer": "Forward transfer: accuracy of the received model on classes new to a client, minus chance.",
}


@dataclass(frozen=True)
class Cell:
    """Mean and sample standard deviation over ``n`` seeds, and the paper's number."""

    mean: float
    sd: float | None
    n: int
    paper: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], paper: float | None = None) -> "Cell":
        """Return the cell of the values of several seeds; the deviation is None for one seed, or an infinite value."""
        sd = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
        return cls(statistics.fmean(values), sd, len(values), paper)

    @property
    def difference(self) -> float | None:
        """The mean minus the paper's number."""
        return None if self.paper is None else self.mean - self.paper


@dataclass(frozen=True)
class ResultTable:
    """One metric of one study.

    Attributes
    ----------
    study : str
        The study's name.
    key, title : str
        The metric's column in ``runs.csv``, and the title.
    head : str
        Heading of the first column.
    rows, columns : sequence of str
        Names in order; every pair without an entry in ``cells`` is a dash.
    cells : mapping
        Cells by (row, column). Accuracy and regret are in percent.
    notes : sequence of str
        Remarks for the reader.
    """

    study: str
    key: str
    title: str
    head: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Mapping[tuple[str, str], Cell]
    notes: Sequence[str] = ()

    @property
    def with_paper(self) -> bool:
        """Whether any cell has a number from the paper."""
        return any(cell.paper is not None for cell in self.cells.values())

    def text(self) -> Table:
        """Return the table as text: ``26.10 ± 0.40 (n=3)`` and, where there are any, the paper's numbers beside."""
        forms: list[Callable[[Cell], str]] = [lambda cell: f"{spread(cell)} (n={cell.n})"]
        if self.with_paper:
            forms += [lambda cell: number(cell.paper), lambda cell: signed(cell.difference)]
        names = ("paper", "difference")[: len(forms) - 1]
        head = [self.head, *(name for column in self.columns for name in (column, *names))]
        body = []
        for row in self.rows:
            cells = [self.cells.get((row, column)) for column in self.columns]
            body.append([row, *(form(cell) if cell else DASH for cell in cells for form in forms)])
        return Table(self.title, head, body, self.notes)


def study_tables(results: Results, study: StudyInfo) -> list[ResultTable]:
    """Return a study's tables: AA, AR, accuracy early, late and at the end.

    The accuracies of both models, forgetting, transfer and condition numbers follow if they were recorded. There is no
    AR table if no run has a Centralized run to compare with.
    """
    runs = rows_of(results.counted(study))
    for run in runs:
        run["_row"], run["_column"] = place(study, run)
    rows = rows_in_order(study, runs)
    columns = _ordered((run["_column"], _column_rank(study, run)) for run in runs)
    finished = [run for run in runs if run["finished"]]
    down = _down(study)
    head = "method" if study.paper != "table4" and ("method" in down or not down) else "setting"
    tables = []
    for key, (metric, title) in _METRICS.items():
        scale = 1.0 if key in _CONDITIONS else 100.0
        cells = {}
        for where, part in _by_place(finished, key).items():
            cells[where] = Cell.of([scale * run[key] for run in part], _printed(study, part[-1], metric))
        if not cells and key != "aa":
            continue
        own = {row for row, _ in cells}
        shown = [row for row in rows if key in _OF_ALL or row in own]
        if key == "aa":
            cells |= _chances(finished)
            shown.append(CHANCE)
        table = ResultTable(study.name, key, title, head, shown, columns, cells)
        tables.append(replace(table, notes=_notes(table, results, study, runs)))
    return tables


def study_notes(study: StudyInfo, tables: Sequence[ResultTable]) -> list[str]:
    """Return what the reader must know of all tables of a study: its note, how its runs were put together, symbols."""
    texts = [text for table in tables for text in (*table.rows, *table.columns)]
    alone = (
        "" if "method" in _down(study) else "".join(f"All runs are of {method_name(name)}." for name in study.methods)
    )
    return [note for note in (study.note, alone, *study.remarks, symbols_note(texts)) if note]


def rows_in_order(study: StudyInfo, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the rows of a study's tables, given its runs."""
    return _ordered((place(study, run)[0], _rank(study, run)) for run in runs)


def place(study: StudyInfo, run: Mapping[str, Any]) -> tuple[str, str]:
    """Return the row and column of a run.

    Rows are methods and their variants or, if all runs are of one method, axes other than data and overlap.
    """
    cell = {axis: _axis_value(study, run, axis) for axis in ("data", "overlap")}
    streams = run["dataset"] != "inbox"
    kind = run["stream"].partition(":")[0]
    if (kind == "dirichlet" or not streams) and "overlap" not in study.axes:
        del cell["overlap"]  # there are no windows
    if run["stream"] != "windows" and streams and "stream" not in study.axes:
        cell["stream"] = run["stream"]
    others = {axis: run[f"axis.{axis}"] for axis in _down(study) if axis not in cell}
    if study.paper != "table4" and ("method" in others or not others):
        rest = {axis: value for axis, value in others.items() if axis not in ("method", *study.variants)}
        return variant_name(run["method"], [others[axis] for axis in study.variants]), labelled({**cell, **rest})
    if role(run["method"]) == "reference" or not others:
        return method_name(run["method"]), labelled(cell)
    return labelled(others), labelled(cell)


def long_frame(tables: Sequence[ResultTable]) -> pd.DataFrame:
    """Return one row per cell of every table; cells without a run have ``n`` 0."""
    blank = {"mean": None, "sd": None, "n": 0, "paper": None, "difference": None}
    lines = []
    for table in tables:
        for where in product(table.rows, table.columns):
            values = {**vars(cell), "difference": cell.difference} if (cell := table.cells.get(where)) else blank
            row, column = where
            lines.append({"study": table.study, "metric": table.key, "row": row, "column": column, **values})
    return pd.DataFrame(lines)


def spread(cell: Cell) -> str:
    """Return a cell's mean and deviation: ``26.10 ± 0.40``, or ``26.10`` for one seed."""
    return number(cell.mean) + (f" ± {number(cell.sd)}" if cell.sd is not None else "")


def signed(value: float | None) -> str:
    """Return a difference's text: ``+1.20``; a dash for None."""
    return DASH if value is None else f"{value:+.2f}"


def number(value: float | None) -> str:
    """Return a number's text: two decimals, or fewer if it is large; a dash for None."""
    if value is None:
        return DASH
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.1f}" if abs(value) < 1e5 else f"{value:.3g}"


def _axis_value(study: StudyInfo, run: Mapping[str, Any], axis: str) -> Any:
    """Return a run's value on ``data`` or ``overlap``: the study's name for it, or the configuration's value."""
    return run[f"axis.{axis}"] if axis in study.axes else data_of(run) if axis == "data" else run[axis]


def _down(study: StudyInfo) -> list[str]:
    """Return the axes that name rows; the method is not among them if there is only one, and other axes."""
    down = [axis for axis in study.axes if axis not in ("data", "overlap", "seed")]
    if len(study.methods) == 1 and len(down) > 1 and not study.variants:
        return [axis for axis in down if axis != "method"]
    return down


def _by_place(runs: Sequence[Mapping[str, Any]], key: str) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """Return the runs that have a value of ``key`` by row and column."""
    parts: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        if not pd.isna(run[key]):
            parts.setdefault((run["_row"], run["_column"]), []).append(run)
    return parts


def _printed(study: StudyInfo, run: Mapping[str, Any], metric: str) -> float | None:
    """Return the paper's number for a run's cell, if the study names a table that has one."""
    if study.paper not in TABLES or (metric == CONDITION and study.paper not in ("table2", "table3")):
        return None
    where = f"{_axis_value(study, run, 'data')}_O{_axis_value(study, run, 'overlap')}"
    if metric in _ALWAYS:
        comparable = study.paper in ("table1", "table2") and run["method"] == "fedkace"
        return printed("table2", _ALWAYS[metric], where, "AA") if comparable else None
    table = "table3" if metric == CONDITION else "table2" if study.paper == "table3" else study.paper
    values = [str(run[f"axis.{axis}"]) for axis in study.axes]
    row = next((value for value in values if value in paper()[table]), paper_row(table, run))
    return printed(table, row, where, metric)


def _chances(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Cell]:
    """Return the accuracy of guessing among the classes met, by column; none where runs with the same seed disagree."""
    chances: dict[tuple[str, str], dict[int, list[float]]] = {}
    for (_, column), part in _by_place(runs, "chance").items():
        for run in part:
            chances.setdefault((CHANCE, column), {}).setdefault(run["seed"], []).append(100 * run["chance"])
    return {
        where: Cell.of([each[-1] for each in seeds.values()])
        for where, seeds in chances.items()
        if all(math.isclose(min(each), max(each)) for each in seeds.values())
    }


def _notes(
    table: ResultTable, results: Results, study: StudyInfo, runs: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    notes = []
    listed, finished = len(study.labels) - len(study.repeats), sum(bool(run["finished"]) for run in runs)
    if finished < listed:
        notes.append(f"{finished} of {listed} runs are finished; means leave out the others.")
    columns = {column for row, column in table.cells if row != CHANCE}
    if table.key == "aa" and any((CHANCE, column) not in table.cells for column in columns):
        notes.append(NO_CHANCE)
    if table.key == "ar" and (without := _without_reference(table, runs)):
        notes.append(
            f"Without AR: {', '.join(without)}. It needs accuracies in all rounds, and those of Centralized with the same "
            "data, stream, training and seed."
        )
    if table.key in ("aa", "ar") and _interpolated(results, runs):
        notes.append("Centralized was trained only in some rounds; its accuracy in the others is interpolated.")
    if table.key in _MEANINGS:
        notes.append(_MEANINGS[table.key])
    if table.key in _CONDITIONS:
        parts = _by_place([run for run in runs if run["finished"]], f"{table.key}_singular")
        shares = {where: [100 * run[f"{table.key}_singular"] for run in part] for where, part in parts.items()}
        found = [f"{', '.join(where)}: {statistics.fmean(each):.1f} %" for where, each in shares.items() if any(each)]
        notes += [f"Singular matrices, which count as infinite: {'; '.join(found)}."] if found else []
    if table.with_paper and table.key in _CONDITIONS:
        notes.append(
            "The paper labels the rows of its Table 3 AS5, AS6 and FedKACE, but its text describes AS6, AS7 and "
            "FedKACE, and its numbers fit these. They stand here by their printed labels."
        )
    if table.with_paper and (differs := _setting_differences(study, runs)):
        notes.append(
            f"These settings differ from the paper's: {differs}. The differences are due to them as well as to the program."
        )
    for slip in paper()["slips"] if table.with_paper else ():
        data, _, overlap = slip["column"].partition("_O")
        held = any(cell.paper == slip["printed"] for cell in table.cells.values())
        if slip["table"] == study.paper and slip["metric"] == _METRICS[table.key][0] and held:
            notes.append(
                f"The paper prints {slip['printed']:.2f} for {slip['row']}, {data_name(data)}, "
                f"{axis_label('overlap', overlap)}, but its own AA values give {slip['derived']:.2f}."
            )
    return tuple(notes)


def _without_reference(table: ResultTable, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rows that have no AR in a column where they have finished runs."""
    finished = {(run["_row"], run["_column"]) for run in runs if run["finished"] and not pd.isna(run["aa"])}
    return [row for row in table.rows if any(own == row for own, _ in finished - table.cells.keys())]


def _interpolated(results: Results, runs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a reference among these runs was trained in some rounds only."""
    own = {(run["study"], run["run"]) for run in runs if role(run["method"]) == "reference"}
    marked = results.rounds[results.rounds["interpolated"]] if len(results.rounds) else results.rounds
    return any((row["study"], row["run"]) in own for row in rows_of(marked))


def _setting_differences(study: StudyInfo, runs: Sequence[Mapping[str, Any]]) -> str:
    """List the runs' settings that differ from the paper's, for example ``clients 4 (paper 10)``."""
    words = []
    for key, value in paper()["setting"].items():
        own = {(100 if key == "num-classes" and run[key] == 0 else run[key], data_of(run)) for run in runs}
        pairs = {(each, value.get(data, each) if isinstance(value, dict) else value) for each, data in own}
        if key not in study.axes and any(each != printed for each, printed in pairs):
            here, there = (", ".join(map(str, sorted(set(values)))) for values in zip(*pairs, strict=True))
            words.append(f"{key} {here} (paper {there})")
    return ", ".join(words)


def _rank(study: StudyInfo, run: Mapping[str, Any]) -> tuple[Any, ...]:
    return method_rank(run["method"])[:2], run["clients"], run["capacity"], _sizes(study, run), place(study, run)[0]


def _column_rank(study: StudyInfo, run: Mapping[str, Any]) -> tuple[Any, ...]:
    return str(_axis_value(study, run, "data")), -int(run["overlap"]), _sizes(study, run)


def _sizes(study: StudyInfo, run: Mapping[str, Any]) -> list[tuple[bool, float, str]]:
    """Return a run's values on the other axes for sorting: numbers by size, before words by letter."""
    values = [run[f"axis.{axis}"] for axis in study.axes if axis not in ("seed", "method")]
    return [(False, float(value), "") if isinstance(value, Real) else (True, 0.0, str(value)) for value in values]


def _ordered(pairs: Any) -> list[str]:
    """Return each name once, sorted by its lowest rank."""
    lowest: dict[str, Any] = {}
    for name, rank in pairs:
        lowest[name] = min(rank, lowest.get(name, rank))
    return sorted(lowest, key=lowest.__getitem__)
