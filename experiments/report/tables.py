"""Results as tables: methods and their variants as rows, the other axes as columns, and the paper's numbers for comparison.

A cell is the mean over its finished runs, which differ only in their seed. A cell without a finished run is a dash,
even if the paper has a number for it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import pandas as pd

from fedkace_flwr.experiments.report.markup import latex_table, markdown_table
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
from fedkace_flwr.experiments.report.paper import CONDITION, load_paper, paper_row
from fedkace_flwr.experiments.results.loading import Results, StudyInfo, rows_of
from fedkace_flwr.experiments.studies.names import TABLES

CHANCE = "chance"
_DASH = "-"
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
_CONDITIONS = ("condition", "class_condition")
_TRANSFER = ("forgetting", "backward_transfer", "forward_transfer")
_ALWAYS = {"AA, local": "AS3", "AA, global": "AS2"}  # FedKACE that always predicts so; their rows in table2
_RECORDED_BY_SOME = (*_CONDITIONS, *_TRANSFER, *(key for key in _METRICS if key.startswith("aa_")))
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
    notes: Sequence[str] = field(default=())

    @property
    def with_paper(self) -> bool:
        """Whether any cell has a number from the paper."""
        return any(cell.paper is not None for cell in self.cells.values())


def study_tables(results: Results, study: StudyInfo) -> list[ResultTable]:
    """Return a study's tables: AA, AR, accuracy early, late and at the end.

    The accuracies of both models, forgetting, transfer and condition numbers follow if they were recorded. There is no
    AR table if no run has a Centralized run to compare with.
    """
    runs = rows_of(results.counted(study))
    for run in runs:
        run["_row"], run["_column"] = place(study, run)
    rows = [row for row, _ in _ordered((run["_row"], _rank(study, run)) for run in runs)]
    columns = [column for column, _ in _ordered((run["_column"], _column_rank(study, run)) for run in runs)]
    tables = []
    for key, (metric, title) in _METRICS.items():
        scale = 1.0 if key in _CONDITIONS else 100.0
        cells = _cells(study, runs, key, metric, scale)
        if not cells and key != "aa":
            continue
        every = [row for row in rows if key not in _RECORDED_BY_SOME or any(row == own for own, _ in cells)]
        if key == "aa":
            cells |= _chances(runs, columns)
            every.append(CHANCE)
        table = ResultTable(study.name, key, title, _head(study), every, columns, cells)
        tables.append(_noted(table, study, runs, _interpolated(results, runs)))
    return tables


def study_notes(study: StudyInfo, tables: Sequence[ResultTable]) -> list[str]:
    """Return what the reader must know of all tables of a study: its note, how its runs were put together, symbols."""
    texts = [text for table in tables for text in (*table.rows, *table.columns)]
    alone = (
        "" if "method" in _down(study) else "".join(f"All runs are of {method_name(name)}." for name in study.methods)
    )
    return [note for note in (study.note, alone, *study.remarks, symbols_note(texts)) if note]


def place(study: StudyInfo, run: Mapping[str, Any]) -> tuple[str, str]:
    """Return the row and column of a run.

    Rows are methods and their variants or, if all runs are of one method, axes other than data and overlap.
    """
    cell = {axis: axis_value(study, run, axis) for axis in ("data", "overlap")}
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


def axis_value(study: StudyInfo, run: Mapping[str, Any], axis: str) -> Any:
    """Return a run's value on ``data`` or ``overlap``: the study's name for it, or the configuration's value."""
    return run[f"axis.{axis}"] if axis in study.axes else data_of(run) if axis == "data" else run[axis]


def markdown(table: ResultTable) -> str:
    """Return the table in GitHub's Markdown, with its notes below."""
    return markdown_table(table.title, *_grid(table), table.notes)


def latex(table: ResultTable) -> str:
    """Return the table in LaTeX; needs no package."""
    return latex_table(table.title, *_grid(table), table.notes)


def long_frame(tables: Sequence[ResultTable]) -> pd.DataFrame:
    """Return one row per cell of every table; cells without a run have ``n`` 0."""
    lines = []
    for table in tables:
        for row in table.rows:
            for column in table.columns:
                cell = table.cells.get((row, column))
                lines.append(
                    {
                        "study": table.study,
                        "metric": table.key,
                        "row": row,
                        "column": column,
                        "mean": cell.mean if cell else None,
                        "sd": cell.sd if cell else None,
                        "n": cell.n if cell else 0,
                        "paper": cell.paper if cell else None,
                        "difference": cell.difference if cell else None,
                    }
                )
    return pd.DataFrame(lines)


def shown(cell: Cell | None) -> str:
    """Return a cell's text, for example ``26.10 ± 0.40 (n=3)``, or a dash for None."""
    return _DASH if cell is None else f"{spread(cell)} (n={cell.n})"


def spread(cell: Cell | None) -> str:
    """Return a cell's text without the number of seeds: ``26.10 ± 0.40``, or a dash for None."""
    if cell is None:
        return _DASH
    return number(cell.mean) + (f" ± {number(cell.sd)}" if cell.sd is not None else "")


def _grid(table: ResultTable) -> tuple[list[str], list[list[str]]]:
    head = [table.head]
    for column in table.columns:
        head += [column, "paper", "difference"] if table.with_paper else [column]
    body = []
    for row in table.rows:
        line = [row]
        for column in table.columns:
            cell = table.cells.get((row, column))
            line.append(shown(cell))
            if table.with_paper:
                line.append(number(cell.paper) if cell and cell.paper is not None else _DASH)
                line.append(f"{cell.difference:+.2f}" if cell and cell.difference is not None else _DASH)
        body.append(line)
    return head, body


def number(value: float | None) -> str:
    """Return a number's text: two decimals, or fewer if it is large; a dash for None."""
    if value is None:
        return _DASH
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.1f}" if abs(value) < 1e5 else f"{value:.3g}"


def _down(study: StudyInfo) -> list[str]:
    """Return the axes that name rows; the method is not among them if there is only one, and other axes."""
    down = [axis for axis in study.axes if axis not in ("data", "overlap", "seed")]
    if len(study.methods) == 1 and len(down) > 1 and not study.variants:
        return [axis for axis in down if axis != "method"]
    return down


def _head(study: StudyInfo) -> str:
    down = _down(study)
    return "method" if study.paper != "table4" and ("method" in down or not down) else "setting"


def _cells(
    study: StudyInfo, runs: Sequence[Mapping[str, Any]], key: str, metric: str, scale: float
) -> dict[tuple[str, str], Cell]:
    values: dict[tuple[str, str], list[float]] = {}
    papers: dict[tuple[str, str], float | None] = {}
    for run in runs:
        if run["finished"] and not pd.isna(run[key]):
            where = (run["_row"], run["_column"])
            values.setdefault(where, []).append(scale * run[key])
            papers[where] = _paper(study, run, metric)
    return {where: _cell(numbers, papers[where]) for where, numbers in values.items()}


def _cell(numbers: Sequence[float], paper: float | None = None) -> Cell:
    sd = statistics.stdev(numbers) if len(numbers) > 1 and all(map(math.isfinite, numbers)) else None
    return Cell(statistics.fmean(numbers), sd, len(numbers), paper)


def _paper(study: StudyInfo, run: Mapping[str, Any], metric: str) -> float | None:
    """Return the paper's number for a run's cell, if the study names a table that has one."""
    if study.paper not in TABLES:
        return None
    table = {"condition": "table3"}.get(metric, "table2" if study.paper == "table3" else study.paper)
    if metric == CONDITION and study.paper not in ("table2", "table3"):
        return None
    where = f"{axis_value(study, run, 'data')}_O{axis_value(study, run, 'overlap')}"
    if metric in _ALWAYS:
        comparable = study.paper in ("table1", "table2") and run["method"] == "fedkace"
        return load_paper().value("table2", _ALWAYS[metric], where, "AA") if comparable else None
    rows = load_paper().tables[table]
    named = [str(run[f"axis.{axis}"]) for axis in study.axes if str(run[f"axis.{axis}"]) in rows]
    row = named[0] if named else paper_row(table, run["method"], run["clients"], run["capacity"])
    return load_paper().value(table, row, where, metric)


def _chances(runs: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[tuple[str, str], Cell]:
    """Return the accuracy of guessing among the classes met, by column; runs with the same seed agree on it."""
    chances = {}
    for column in columns:
        seeds = {
            run["seed"]: 100 * run["chance"]
            for run in runs
            if run["_column"] == column and run["finished"] and not pd.isna(run["chance"])
        }
        if seeds:
            chances[(CHANCE, column)] = _cell(list(seeds.values()))
    return chances


def _interpolated(results: Results, runs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a reference among these runs was trained in some rounds only."""
    own = {(run["study"], run["run"]) for run in runs if role(run["method"]) == "reference"}
    marked = results.rounds[results.rounds["interpolated"]] if len(results.rounds) else results.rounds
    return any((row["study"], row["run"]) in own for row in rows_of(marked))


def _noted(table: ResultTable, study: StudyInfo, runs: Sequence[Mapping[str, Any]], interpolated: bool) -> ResultTable:
    notes = []
    listed = len(study.labels) - len(study.repeats)
    finished = sum(bool(run["finished"]) for run in runs)
    if finished < listed:
        notes.append(f"{finished} of {listed} runs are finished; means leave out the others.")
    if interpolated and table.key in ("aa", "ar"):
        notes.append("Centralized was trained only in some rounds; its accuracy in the others is interpolated.")
    if table.key in _MEANINGS:
        notes.append(_MEANINGS[table.key])
    if table.key in _CONDITIONS:
        notes += _singular(table, runs)
    if table.with_paper:
        if table.key in _CONDITIONS:
            notes.append(
                "The paper labels the rows of its Table 3 AS5, AS6 and FedKACE, but its text describes AS6, AS7 and "
                "FedKACE, and its numbers fit these. They stand here by their printed labels."
            )
        differs = setting_differences(study, runs)
        if differs:
            notes.append(
                f"These settings differ from the paper's: {differs}. The differences are due to them as well as to the program."
            )
        notes += _slips(study, table)
    return ResultTable(
        table.study, table.key, table.title, table.head, table.rows, table.columns, table.cells, tuple(notes)
    )


def _singular(table: ResultTable, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    shares: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        share = run[f"{table.key}_singular"]
        if run["finished"] and not pd.isna(share):
            shares.setdefault((run["_row"], run["_column"]), []).append(100 * share)
    found = [f"{row}, {column}: {statistics.fmean(each):.1f} %" for (row, column), each in shares.items() if any(each)]
    return [f"Singular matrices, which count as infinite: {'; '.join(found)}."] if found else []


def setting_differences(study: StudyInfo, runs: Sequence[Mapping[str, Any]]) -> str:
    """List the runs' settings that differ from the paper's, for example ``clients 4 (paper 10)``."""
    words = []
    for key, paper in load_paper().setting.items():
        if key in study.axes:
            continue
        own = {100 if key == "num-classes" and run[key] == 0 else run[key] for run in runs}
        if own != {paper}:
            words.append(f"{key} {', '.join(str(value) for value in sorted(own))} (paper {paper})")
    return ", ".join(words)


def _slips(study: StudyInfo, table: ResultTable) -> list[str]:
    notes = []
    for slip in load_paper().slips:
        data, _, overlap = slip["column"].partition("_O")
        column = f"{data_name(data)}, {axis_label('overlap', overlap)}"
        held = any(cell.paper == slip["printed"] for cell in table.cells.values())
        if slip["table"] == study.paper and slip["metric"] == _METRICS[table.key][0] and held:
            notes.append(
                f"The paper prints {slip['printed']:.2f} for {slip['row']}, {column}, but its own AA values give "
                f"{slip['derived']:.2f}."
            )
    return notes


def _rank(study: StudyInfo, run: Mapping[str, Any]) -> tuple[Any, ...]:
    return method_rank(run["method"])[:2], run["clients"], run["capacity"], _sizes(study, run), run["_row"]


def _column_rank(study: StudyInfo, run: Mapping[str, Any]) -> tuple[Any, ...]:
    return str(axis_value(study, run, "data")), -int(run["overlap"]), _sizes(study, run)


def _sizes(study: StudyInfo, run: Mapping[str, Any]) -> list[tuple[bool, float, str]]:
    """Return a run's values on the other axes for sorting: numbers by size, before words by letter."""
    values = [run[f"axis.{axis}"] for axis in study.axes if axis not in ("seed", "method")]
    return [(False, float(value), "") if isinstance(value, Real) else (True, 0.0, str(value)) for value in values]


def _ordered(pairs: Any) -> list[tuple[str, Any]]:
    """Return each name once, sorted by its lowest rank."""
    lowest: dict[str, Any] = {}
    for name, rank in pairs:
        lowest[name] = min(rank, lowest[name]) if name in lowest else rank
    return sorted(lowest.items(), key=lambda item: item[1])
