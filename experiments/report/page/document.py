"""Write one HTML page that contains its data and the script that draws the charts, and loads nothing from the network."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from fedkace_flwr.config import Config, folder_keys
from fedkace_flwr.experiments.report.names import data_name, data_of
from fedkace_flwr.experiments.report.page.payload import config_of, payload
from fedkace_flwr.experiments.report.paired import difference_table, paired_differences
from fedkace_flwr.experiments.report.palette import DARK, LIGHT, ranked
from fedkace_flwr.experiments.report.single_runs import only_run_table, unfinished_table
from fedkace_flwr.experiments.report.tables import ResultTable, shown, study_notes
from fedkace_flwr.experiments.results.loading import Results, StudyInfo, rows_of
from fedkace_flwr.storage.files import write_text

_HERE = Path(__file__).parent
_SCRIPTS = ("base", "charts")
_RUNS_LISTED = 200
_MOST_ENVIRONMENTS = 10
_DASH = "-"
_SUMMARY = (
    ("AA %", "aa", 100.0, "{:.2f}"),
    ("AR % points", "ar", 100.0, "{:.2f}"),
    ("final %", "final", 100.0, "{:.2f}"),
    ("forgetting % points", "forgetting", 100.0, "{:.2f}"),
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
        Each study's tables by its name.
    path : Path
        The HTML file.
    data_dir : Path, optional
        Folder of the data sets' files; by default the one in each run's configuration.
    """
    content = payload(results, data_dir)
    content["lines"] = ranked({run["line"]: run["method"] for run in content["runs"]})
    content["colours"] = {"light": LIGHT, "dark": DARK}
    content["studies"] = [study.name for study in results.studies]
    omitted = content.pop("notes")
    template = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    ).get_template("page.html")
    text = template.render(
        title=", ".join(study.title for study in results.studies),
        lead=_lead(results),
        notes=omitted,
        studies=[_tables(results, study, tables[study.name]) for study in results.studies],
        several_seeds=results.runs["seed"].nunique() > 1,
        runs=_runs(results),
        configurations=[_configuration(results, study) for study in results.studies],
        environments=_environments(results),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        scripts=[(_HERE / f"page.{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS],
        plotly=get_plotlyjs(),
        # escape "<" so that no text of a run can close the element that holds the data
        data=json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )
    write_text(path, text)


def _lead(results: Results) -> str:
    runs = results.runs
    done = int(runs["finished"].sum())
    data = " and ".join(data_name(name) for name in dict.fromkeys(map(data_of, rows_of(runs))))
    clients = " or ".join(str(number) for number in sorted(set(runs["clients"])))
    rounds = " or ".join(str(number) for number in sorted(set(runs["rounds"])))
    listed = sum(len(study.labels) for study in results.studies)
    return f"{done} of {listed} runs finished on {data}: {clients} clients, {rounds} rounds."


def _tables(results: Results, study: StudyInfo, tables: Sequence[ResultTable]) -> dict[str, Any]:
    told = list(dict.fromkeys(note for table in tables for note in table.notes))
    only = only_run_table(results, study, tables)
    shown_tables = [_table(table) for table in tables] if only is None else []
    differences = paired_differences(results, study)
    for more in (only, unfinished_table(results, study), difference_table(differences) if differences else None):
        if more is not None:
            shown_tables.append(_of_text(*more))
            told += [note for note in more[3] if note not in told]
    return {"title": study.title, "about": study_notes(study, tables), "tables": shown_tables, "notes": told}


def _of_text(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], _: Sequence[str], words: int
) -> dict[str, Any]:
    lines = []
    for name, *texts in rows:
        cells = [{"text": text, "paper": None, "best": False, "word": at < words} for at, text in enumerate(texts, 1)]
        lines.append({"name": name, "cells": cells})
    return {"title": title, "headings": head, "words": words, "rows": lines}


def _table(table: ResultTable) -> dict[str, Any]:
    best = {column: _best(table, column) for column in table.columns}
    rows = []
    for row in table.rows:
        cells = []
        for column in table.columns:
            cell = table.cells.get((row, column))
            paper = None
            if cell and cell.paper is not None:
                paper = f"paper {cell.paper:,.2f}, difference {cell.difference:+,.2f}"
            cells.append({"text": shown(cell), "paper": paper, "best": row == best[column], "word": False})
        rows.append({"name": row, "cells": cells})
    return {"title": table.title, "headings": [table.head, *table.columns], "words": 1, "rows": rows}


def _best(table: ResultTable, column: str) -> str | None:
    """Return the method with the best mean of a column, not counting Centralized and chance.

    None if there is only one, or if one has a single seed: then chance decides.
    """
    own = {
        row: cell
        for (row, where), cell in table.cells.items()
        if where == column and row not in ("Centralized", "chance")
    }
    if len(own) < 2 or table.key.endswith("condition") or min(cell.n for cell in own.values()) < 2:
        return None
    choose = min if table.key in ("ar", "forgetting") else max
    return choose(own, key=lambda row: own[row].mean)


def _runs(results: Results) -> dict[str, Any]:
    """List the runs with their figures, limited to a number that a browser can display."""
    frame = results.runs
    rows = []
    for row in rows_of(frame.head(_RUNS_LISTED)):
        state = "finished" if row["finished"] else f"{row['rounds_done']} of {row['rounds']} rounds"
        figures = [
            _DASH if pd.isna(row[key]) or not row["rounds_done"] else form.format(factor * row[key])
            for _, key, factor, form in _SUMMARY
        ]
        rows.append({"name": row["run"], "cells": [state, *figures]})
    headings = ["run", "state", *(name for name, *_ in _SUMMARY)]
    return {"headings": headings, "rows": rows, "more": len(frame) - _RUNS_LISTED}


def _configuration(results: Results, study: StudyInfo) -> dict[str, Any]:
    """Return the keys with the same value in all runs of a study, and the values of the other keys."""
    frame = results.runs[results.runs["study"] == study.name]
    hidden = folder_keys() | {"run-name"}
    if (frame["dataset"] == "inbox").all():
        hidden |= frozenset.intersection(*(config_of(row).ignored for row in rows_of(frame)))
    values = {key: list(dict.fromkeys(frame[key])) for key in Config().flat() if key not in hidden}
    return {
        "title": study.title,
        "varied": [_pair(key, each) for key, each in values.items() if len(each) > 1],
        "shared": [_pair(key, each) for key, each in values.items() if len(each) == 1],
    }


def _environments(results: Results) -> list[dict[str, Any]]:
    """Return each distinct environment and its number of runs."""
    columns = [name for name in results.runs.columns if name.startswith("env.") and name != "env.started"]
    if not columns:
        return []
    found = []
    for _, runs in results.runs.groupby(columns, dropna=False):
        values = rows_of(runs[columns].head(1))[0]
        known = [_pair(name.removeprefix("env."), [each]) for name, each in values.items() if not pd.isna(each)]
        found.append({"count": len(runs), "values": known})
    return found[:_MOST_ENVIRONMENTS]


def _pair(key: str, values: Sequence[Any]) -> tuple[str, str]:
    return key, ", ".join(_plain(value) for value in values)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
