"""One HTML page that holds its charts, its data and the program that draws them, and asks no network for anything."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from plotly.offline import get_plotlyjs

from experiments.report.names import data_name
from experiments.report.payload import line_names, payload
from experiments.report.tables import ResultTable, shown
from experiments.results.loading import Results, StudyInfo, rows_of
from fedkace_flwr.config import Config, folder_keys

_HERE = Path(__file__).parent
_RUNS_LISTED = 200
_SUMMARY = (
    ("AA %", "aa", 100.0, "{:.2f}"),
    ("AR % points", "ar", 100.0, "{:.2f}"),
    ("final %", "final", 100.0, "{:.2f}"),
    ("switched", "switched", 1, "{:.0f}"),
    ("failures", "failures", 1, "{:.0f}"),
    ("MB down", "bytes_down", 1e-6, "{:,.1f}"),
    ("MB up", "bytes_up", 1e-6, "{:,.1f}"),
    ("minutes", "seconds_round", 1 / 60, "{:,.1f}"),
)


def write_page(
    results: Results, tables: Mapping[str, Sequence[ResultTable]], path: Path, data_dir: Path | None
) -> None:
    """Write the page.

    Parameters
    ----------
    results : Results
        The runs.
    tables : mapping
        Each study's tables, by its name.
    path : Path
        The HTML file.
    data_dir : Path, optional
        Where the data sets' files are, if not where the runs say.
    """
    content = payload(results, data_dir)
    content["lines"] = line_names(content["runs"])
    content["studies"] = [study.name for study in results.studies]
    notes = content.pop("notes")
    parts = {
        "title": html.escape(", ".join(study.title for study in results.studies)),
        "lead": _lead(results),
        "notes": "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes),
        "tables": "".join(_tables(study, tables[study.name], len(results.studies) > 1) for study in results.studies),
        "runs": _runs(results),
        "configuration": "".join(_configuration(results, study) for study in results.studies),
        "environment": _environments(results),
        "style": (_HERE / "page.css").read_text(encoding="utf-8"),
        "script": (_HERE / "page.js").read_text(encoding="utf-8"),
        "plotly": get_plotlyjs(),
        # "<" is escaped so that no text of a run can end the element that holds the data
        "data": json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    pieces = (_HERE / "page.html").read_text(encoding="utf-8").split("@@")
    path.write_text("".join(parts.get(piece, piece) for piece in pieces), encoding="utf-8")


def _lead(results: Results) -> str:
    runs = results.runs
    done = int(runs["finished"].sum())
    data = " and ".join(data_name(str(name)) for name in dict.fromkeys(runs["dataset"]))
    clients = " or ".join(str(number) for number in sorted(set(runs["clients"])))
    rounds = " or ".join(str(number) for number in sorted(set(runs["rounds"])))
    listed = sum(len(study.labels) for study in results.studies)
    return (
        f"<p class='lead'>{done} of {listed} runs finished on {html.escape(data)}: "
        f"{clients} clients, {rounds} rounds.</p>"
    )


def _tables(study: StudyInfo, tables: Sequence[ResultTable], named: bool) -> str:
    heading = f"<h3>{html.escape(study.title)}</h3>" if named else ""
    notes = dict.fromkeys(note for table in tables for note in table.notes)
    below = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)
    return f"{heading}<div class=tables>{''.join(_table(table) for table in tables)}</div>{below}"


def _table(table: ResultTable) -> str:
    head = [table.head, *table.columns]
    best = {column: _best(table, column) for column in table.columns}
    lines = []
    for row in table.rows:
        cells = []
        for column in table.columns:
            cell = table.cells.get((row, column))
            text = html.escape(shown(cell))
            if cell and cell.paper is not None:
                text += f"<small>paper {cell.paper:,.2f}, difference {cell.difference:+,.2f}</small>"
            cells.append(f"<td{' class=best' if row == best[column] else ''}>{text}</td>")
        lines.append(f"<tr><th scope=row>{html.escape(row)}</th>{''.join(cells)}</tr>")
    columns = "".join(f"<th scope=col>{html.escape(each)}</th>" for each in head)
    return (
        f"<figure class=table><figcaption>{html.escape(table.title)}</figcaption><div class=scroll tabindex=0>"
        f"<table><thead><tr>{columns}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></figure>"
    )


def _best(table: ResultTable, column: str) -> str | None:
    """The method with the best mean of a column, Centralized and chance aside; None with nothing to compare."""
    own = {
        row: cell.mean
        for (row, where), cell in table.cells.items()
        if where == column and row not in ("Centralized", "chance")
    }
    if len(own) < 2 or table.key == "condition":
        return None
    choose = min if table.key == "ar" else max
    return choose(own, key=lambda row: own[row])


def _runs(results: Results) -> str:
    """Every run with its figures, up to a number that a browser bears."""
    frame = results.runs
    head = ["run", "state", *(name for name, *_ in _SUMMARY)]
    lines = []
    for row in rows_of(frame.head(_RUNS_LISTED)):
        state = "finished" if row["finished"] else f"{row['rounds_done']} of {row['rounds']} rounds"
        figures = [
            _DASH if pd.isna(row[key]) or not row["rounds_done"] else form.format(factor * row[key])
            for _, key, factor, form in _SUMMARY
        ]
        name = html.escape(str(row["run"]))
        cells = "".join(f"<td>{each}</td>" for each in [state, *figures])
        lines.append(f"<tr><th scope=row>{name}</th>{cells}</tr>")
    more = len(frame) - _RUNS_LISTED
    rest = f'<p class="note">{more} more runs stand in runs.csv.</p>' if more > 0 else ""
    columns = "".join(f"<th scope=col>{each}</th>" for each in head)
    return (
        f"<div class=scroll tabindex=0><table><thead><tr>{columns}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>{rest}"
    )


def _configuration(results: Results, study: StudyInfo) -> str:
    """What all runs of a study share, and which values the other keys take."""
    frame = results.runs[results.runs["study"] == study.name]
    keys = [key for key in Config().flat() if key not in folder_keys() | {"run-name"}]
    values = {key: list(dict.fromkeys(frame[key])) for key in keys}
    varied = _pairs((key, each) for key, each in values.items() if len(each) > 1)
    shared = _pairs((key, each) for key, each in values.items() if len(each) == 1)
    title = html.escape(study.title)
    return (
        f"<h3>{title}</h3>"
        + (f"<h4>Differs between runs</h4>{varied}" if varied else "")
        + f"<details><summary>The {sum(len(each) == 1 for each in values.values())} keys that all its runs share"
        f"</summary>{shared}</details>"
    )


def _environments(results: Results) -> str:
    """Each distinct environment, and how many runs had it."""
    columns = [name for name in results.runs.columns if name.startswith("env.") and name != "env.started"]
    if not columns:
        return '<p class="note">No run recorded its environment.</p>'
    blocks = []
    for _, runs in results.runs.groupby(columns, dropna=False):
        values = rows_of(runs[columns].head(1))[0]
        known = _pairs((name.removeprefix("env."), [each]) for name, each in values.items() if not pd.isna(each))
        blocks.append(
            f"<details open><summary>{len(runs)} {'runs' if len(runs) > 1 else 'run'}</summary>{known}</details>"
        )
    return "".join(blocks[:10])


def _pairs(items: Iterable[tuple[str, Sequence[Any]]]) -> str:
    lines = [
        f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(', '.join(_plain(value) for value in values))}</dd></div>"
        for key, values in items
    ]
    return f"<dl>{''.join(lines)}</dl>" if lines else ""


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


_DASH = "-"
