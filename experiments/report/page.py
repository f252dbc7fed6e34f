"""The report's page: tables, Plotly's charts and the set-up of the runs, in one file that loads nothing from the network."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from fedkace_flwr.config import Config, folder_keys
from fedkace_flwr.experiments.report.figures import Curves, curves_of
from fedkace_flwr.experiments.report.markup import Table, html_notes, in_html
from fedkace_flwr.experiments.report.names import MUTED, colours, data_name, data_of, method_rank
from fedkace_flwr.experiments.report.tables import DASH, place
from fedkace_flwr.experiments.results.loading import Results, StudyInfo, rows_of
from fedkace_flwr.messaging.metrics import known_metrics

_LINES, _POINTS, _RUNS = 60, 120, 200
"""Most lines of a study's charts, points of a line, and runs on a page, which a browser must display."""
_INFINITE = 1e100
"""Condition numbers beyond are means that hold a singular matrix, for which 1e+300 is recorded; they are not drawn."""

_OWN = {
    "accuracy": "Test accuracy on all classes met so far. Lines are means over seeds, bands run from the lowest to the "
    "highest seed. A click on a name in the legend hides its line; a double click shows it alone.",
    "regret": "Accuracy of Centralized minus that of the line.",
    "client_drift": "Mean squared distance of the local models from the global one.",
    "switched": "Number of clients that predict with the global model.",
}
_BY_CLASS = (
    "Accuracy on the test images of each class, as mean over seeds and over the clients that have met it. A row that "
    "fades is a class that is being forgotten."
)
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
_STYLE = """
body { font: 1rem/1.5 system-ui, sans-serif; color: #16202b; max-width: 78rem; margin: auto; padding: 1rem; }
p { max-width: 46rem; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #d9dee4; white-space: nowrap; }
.word { text-align: left; white-space: normal; }
"""
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

Section: TypeAlias = "str | go.Figure"
"""HTML, or a chart."""


def page(results: Results, sections: Sequence[Section]) -> str:
    """Return the page in HTML."""
    runs = results.runs
    data = " and ".join(data_name(name) for name in dict.fromkeys(map(data_of, rows_of(runs))))
    clients, rounds = (" or ".join(map(str, sorted(set(runs[key])))) for key in ("clients", "rounds"))
    listed = sum(len(study.labels) for study in results.studies)
    title = in_html(", ".join(study.title for study in results.studies))
    lead = f"{runs['finished'].sum()} of {listed} runs finished on {data}: {clients} clients, {rounds} rounds."
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<link rel="icon" href="data:,">\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n'
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<h1>Results</h1>\n<p>{in_html(lead)}</p>\n"
    ]
    for index, section in enumerate(sections):
        parts.append(section if isinstance(section, str) else _drawn(section, f"chart-{index}"))
    footer = "Written by <code>fedkace report</code>, with plotly.js (MIT licence) in this file."
    return "".join([*parts, f"<p>{footer}</p>\n</body>\n</html>\n"])


def charts(results: Results, study: StudyInfo, classes: pd.DataFrame | None) -> Iterator[Section]:
    """Yield the charts of a study: accuracy and every other recorded measure over the rounds, and accuracy by class.

    Parameters
    ----------
    results, study : Results, StudyInfo
        The runs and their study.
    classes : DataFrame, optional
        The content of ``classes.parquet``.
    """
    curves, methods = curves_of(results, study)
    if len(methods) > _LINES:
        yield html_notes([f"The charts show {_LINES} of {len(methods)} lines, to limit the size of this page."])
        methods = dict(list(methods.items())[:_LINES])
    meanings = {metric.average: metric.meaning.replace("`", "") for metric in known_metrics().values()}
    for key, meaning in {**_OWN, **meanings}.items():
        if key in results.rounds and (figure := _over_rounds(curves, methods, key)) is not None:
            yield f"<h3>{in_html(key.replace('_', ' ').capitalize())}</h3>\n{html_notes([meaning])}"
            yield figure
    begun, unfinished = curves_of(results, study, unfinished=True)
    if (figure := _over_rounds(begun, unfinished, "accuracy")) is not None:
        yield "<h3>Accuracy of unfinished runs</h3>\n"
        yield figure
    if classes is not None and (figure := _by_class(results, study, classes)) is not None:
        yield f"<h3>Accuracy by class</h3>\n{html_notes([_BY_CLASS])}"
        yield figure


def set_up(results: Results) -> str:
    """Return the runs with their figures, and the configuration and environments of each study, in HTML."""
    rows = []
    for run in rows_of(results.runs.head(_RUNS)):
        state = "finished" if run["finished"] else f"{run['rounds_done']} of {run['rounds']} rounds"
        figures = [
            DASH if pd.isna(run[key]) or not run["rounds_done"] else form.format(factor * run[key])
            for _, key, factor, form in _SUMMARY
        ]
        rows.append([run["run"], state, *figures])
    more = len(results.runs) - _RUNS
    notes = [f"runs.csv lists {more} more runs."] if more > 0 else []
    text = "<h2>Set-up</h2>\n" + Table("Runs", ["run", "state", *(name for name, *_ in _SUMMARY)], rows, notes).html()
    for study in results.studies:
        summary = f"<summary>Configuration and environment: {in_html(study.title)}</summary>"
        text += f"<details>{summary}{_configuration(results, study).html()}</details>\n"
    return text


def _drawn(figure: go.Figure, name: str) -> str:
    html: str = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        default_height=f"{figure.layout.height}px",
        config={"displaylogo": False, "responsive": True},
    )
    return html


def _over_rounds(curves: Curves, methods: Mapping[str, str], key: str) -> go.Figure | None:
    """Draw a measure over the rounds in a panel for each column; None if no run has recorded it."""
    shades = colours(methods)
    panels: dict[str, list[dict[str, Any]]] = {}
    for column, lines in curves.items():
        shown = {line: lines[line] for line in methods if line in lines}
        traces = [trace for line, rounds in shown.items() for trace in _traces(rounds, key, line, shades[line])]
        if traces and key == "accuracy":
            chance = _traces(pd.concat(shown.values()), "chance", "chance", MUTED)[-1:]
            traces += [{**trace, "line": {"color": MUTED, "dash": "dot"}} for trace in chance]
        if traces:
            panels[column] = traces
    if not panels:
        return None
    across = min(len(panels), 2)
    down = math.ceil(len(panels) / across)
    figure = make_subplots(down, across, subplot_titles=[in_html(column) for column in panels])
    named: set[str] = set()
    for index, traces in enumerate(panels.values()):
        for trace in traces:
            first = trace.get("name") is not None and trace["name"] not in named
            named.add(trace.get("name", ""))
            figure.add_scatter(**trace, showlegend=first, row=index // across + 1, col=index % across + 1)
    values = np.concatenate([trace["y"] for traces in panels.values() for trace in traces])
    spans = values.min() > 0 and values.max() > 100 * values.min()
    figure.update_layout(
        template="none",
        height=330 * down + 80,
        margin={"t": 40, "r": 10},
        hovermode="x unified",
        hoverlabel_namelength=-1,
    )
    figure.update_layout(legend={"orientation": "h", "yanchor": "top", "y": -60 / (330 * down)})
    figure.update_xaxes(title_text="round")
    figure.update_yaxes(**{"type": "log"} if spans else {"rangemode": "tozero"})
    if key.endswith("accuracy") or key == "regret":
        figure.update_yaxes(tickformat=".0%", hoverformat=".2%")
    return figure


def _traces(rounds: pd.DataFrame, key: str, name: str, colour: str) -> list[dict[str, Any]]:
    """The mean over runs by round, after a band from the lowest to the highest value; nothing without a value."""
    known = rounds[rounds[key].notna() & (rounds[key] < _INFINITE)]
    if known.empty:
        return []
    values = known.groupby("round")[key].agg(["mean", "min", "max"])
    values = values.iloc[np.unique(np.linspace(0, len(values) - 1, _POINTS).round().astype(int))]
    line = {"x": values.index.to_numpy(), "mode": "lines", "legendgroup": in_html(name)}
    edge = {**line, "line": {"width": 0, "color": colour}, "hoverinfo": "skip"}
    band = [
        {**edge, "y": values["min"].to_numpy()},
        {**edge, "y": values["max"].to_numpy(), "fill": "tonexty", "fillcolor": _faint(colour)},
    ]
    mean = {**line, "y": values["mean"].to_numpy(), "name": in_html(name), "line": {"color": colour}}
    return [*(band if (values["min"] < values["max"]).any() else []), mean]


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def _by_class(results: Results, study: StudyInfo, classes: pd.DataFrame) -> go.Figure | None:
    """Draw accuracy by class and round for one line at a time, which a menu chooses; None if nothing was recorded."""
    runs = rows_of(results.counted(study))
    labels = {
        run["run"]: ", ".join(place(study, run)) for run in sorted(runs, key=lambda run: method_rank(run["method"]))
    }
    own = classes[classes["study"] == study.name]
    own = own.assign(label=own["run"].astype(str).map(labels)).dropna(subset=["label"])
    names = [name for name in dict.fromkeys(labels.values()) if (own["label"] == name).any()][:_LINES]
    figure = go.Figure()
    for index, name in enumerate(names):
        grid = own[own["label"] == name].groupby(["class", "round"])["accuracy"].mean().unstack("round")
        grid = grid.iloc[:, np.unique(np.linspace(0, grid.shape[1] - 1, _POINTS).round().astype(int))]
        z = grid.to_numpy().astype(np.float32)
        figure.add_heatmap(x=grid.columns.to_numpy(), y=grid.index.to_numpy(), z=z, zmin=0, zmax=1, visible=not index)
    buttons = [
        {"label": in_html(name), "method": "restyle", "args": ["visible", [each == name for each in names]]}
        for name in names
    ]
    figure.update_traces(
        colorscale="Blues", colorbar_tickformat=".0%", hovertemplate="class %{y}, round %{x}: %{z:.0%}"
    )
    figure.update_layout(
        template="none", height=480, updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.15}]
    )
    figure.update_xaxes(title_text="round")
    figure.update_yaxes(title_text="class", autorange="reversed")
    return figure if names else None


def _configuration(results: Results, study: StudyInfo) -> Table:
    """Return a study's configuration keys and environments with their values, those that differ between runs first."""
    frame = results.runs[results.runs["study"] == study.name]
    hidden = folder_keys() | {"run-name", "env.started"}
    if (frame["dataset"] == "inbox").all():
        configs = [Config.parse({key: run[key] for key in Config().flat()}) for run in rows_of(frame)]
        hidden |= frozenset.intersection(*(config.ignored for config in configs))
    keys = [*Config().flat(), *(name for name in frame if str(name).startswith("env."))]
    values = {key: frame[key].dropna().unique().tolist() for key in keys if key not in hidden}
    rows = [[str(key), ", ".join(map(_plain, each))] for key, each in values.items() if each]
    rows.sort(key=lambda row: len(values[row[0]]) == 1)
    return Table("", ["key", "values in these runs"], rows, words=2)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
