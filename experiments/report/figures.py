"""Draw Figures 2 and 3 of the paper, or a plain comparison, from finished runs as PNG and SVG."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedkace_flwr.experiments.report.names import COLOURS, MUTED, colours, ranked, role
from fedkace_flwr.experiments.report.tables import place
from fedkace_flwr.experiments.results.loading import Results, StudyInfo, rows_of
from fedkace_flwr.results.plot import in_plot
from fedkace_flwr.storage.files import write_bytes

_DASHES = ("-", "--", "-.", ":")
_BUFFER = (
    ("buffer_accuracy", "accuracy on the buffer", "#0b63a5"),
    ("buffer_probability", "probability of the true class", "#00755a"),
    ("gap", "GAP", "#c2410c"),
)
_MODELS = (("local_accuracy", "local models", "#0b63a5"), ("global_accuracy", "global model", "#00755a"))
_PIXELS_PER_INCH = 130

Curves = dict[str, dict[str, pd.DataFrame]]
"""The rounds of finished runs by the study's column, then by line."""


def draw_figures(results: Results, study: StudyInfo, folder: Path) -> list[Path]:
    """Draw the figures that the study's finished runs allow, and return the files written.

    A figure leaves out the columns in which it has no line to show.

    ``figure2`` shows the accuracy of FedKACE and its rivals over the rounds, and below it the measurements on
    FedKACE's buffers. ``figure3`` shows the accuracy of FedKACE and its ablations. ``curves`` shows every line of a
    study that supports neither. ``unfinished`` shows the columns that have an unfinished run, as far as it has come.
    Except in ``figure2``, a panel with a single line also shows how accurate the local models and the global model were
    throughout, if the run tested both.
    """
    curves, methods = curves_of(results, study)
    roles = {line: role(method) for line, method in methods.items()}
    have = set(roles.values())
    own = next((line for line, method in methods.items() if method == "fedkace"), None)
    written = []
    if own is not None and "rival" in have:
        chosen = [line for line in methods if roles[line] != "ablation"]
        written += _save(_figure(curves, methods, chosen, own), folder / "figure2")
    if own is not None and "ablation" in have:
        chosen = [line for line in methods if roles[line] != "rival"]
        written += _save(_figure(curves, methods, chosen), folder / "figure3")
    if have and not written:
        written += _save(_figure(curves, methods, list(methods)), folder / "curves")
    curves, methods = curves_of(results, study, unfinished=True)
    if curves:
        written += _save(_figure(curves, methods, list(methods)), folder / "unfinished")
    return written


def curves_of(results: Results, study: StudyInfo, *, unfinished: bool = False) -> tuple[Curves, dict[str, str]]:
    """Return the rounds of the finished runs by column and line, and the method of each line, in order.

    With ``unfinished``, only the columns that have an unfinished run, up to the last round of any of them, with
    unfinished runs as lines of their own.
    """
    frame = results.counted(study)
    rounds = results.rounds[results.rounds["study"] == study.name] if len(results.rounds) else results.rounds
    curves: Curves = {}
    methods: dict[str, str] = {}
    begun: dict[str, int] = {}
    for run in rows_of(frame[~frame["finished"]]) if unfinished else []:
        column = place(study, run)[1]
        begun[column] = max(begun.get(column, 0), run["rounds_done"])
    shown = frame if unfinished else frame[frame["finished"]]
    runs = sorted(rows_of(shown), key=lambda run: (str(run["dataset"]), -run["overlap"], run["run"]))
    for run in runs:
        line, column = place(study, run)
        own = rounds[rounds["run"] == run["run"]]
        if unfinished:
            own = own[own["round"] <= begun.get(column, 0)]
            line = line if run["finished"] else f"{line} (unfinished)"
        if own.empty:
            continue
        known = curves.setdefault(column, {}).get(line)
        curves[column][line] = own if known is None else pd.concat([known, own])
        methods[line] = run["method"]
    return curves, {line: methods[line] for line in ranked(methods)}


def _figure(curves: Curves, methods: Mapping[str, str], chosen: Sequence[str], own: str = "") -> Figure:
    """Draw the accuracy of the chosen lines and, if ``own`` is given, below it the measurements on that line's buffers."""
    kept = {column: {line: lines[line] for line in chosen if line in lines} for column, lines in curves.items()}
    curves = {column: lines for column, lines in kept.items() if lines}
    down = 2 if own else 1
    figure, grid = _panels(len(curves), down)
    for index, (column, lines) in enumerate(curves.items()):
        upper, lowest = grid(index, 0), grid(index, down - 1)
        if len(lines) == 1 and not own:
            _both_models(upper, next(iter(lines.values())))
        _accuracy(upper, lines, chosen, methods)
        upper.set_title(in_plot(column), fontsize=10, fontweight="bold")
        for key, label, colour in _BUFFER if own in lines else ():
            _line(lowest, lines[own], key, label=label, color=colour, linewidth=1.8)
        for row in range(down):
            _finish(grid(index, row), lines)
        lowest.set_xlabel("round")
        if index == 0:
            lowest.set_ylabel("FedKACE's buffers")
            upper.set_ylabel("accuracy")
    explained = (grid(index, 1) for index in range(len(curves)) if own and grid(index, 1).get_lines())
    if (first := next(explained, None)) is not None:
        first.legend(fontsize=7, frameon=False)
    _legend(figure, [grid(index, 0) for index in range(len(curves))], chosen)
    return figure


def _panels(count: int, rows: int) -> tuple[Figure, Callable[[int, int], Axes]]:
    """Make a figure of ``count`` panels with ``rows`` axes each, at most four panels side by side."""
    across = min(count, 4)
    down = -(-count // across)
    figure = Figure(figsize=(max(6.0, 3.4 * across), 2.7 * rows * down + 0.8), layout="constrained")
    every = figure.subplots(rows * down, across, squeeze=False)
    for index in range(count, across * down):
        for row in range(rows):
            every[rows * (index // across) + row][index % across].set_visible(False)
    return figure, lambda index, row: every[rows * (index // across) + row][index % across]


def _accuracy(axes: Axes, lines: Mapping[str, pd.DataFrame], chosen: Sequence[str], methods: Mapping[str, str]) -> None:
    shades = colours(methods)
    for line in reversed(chosen):
        if line not in lines:
            continue
        if role(methods[line]) == "method" and sum(role(methods[each]) == "method" for each in chosen) == 1:
            style: dict[str, Any] = {"linewidth": 2.6, "zorder": 4}
        elif role(methods[line]) == "reference":
            style = {"linewidth": 1.4, "linestyle": "--"}
        else:
            dash = _DASHES[ranked(methods).index(line) // len(COLOURS) % len(_DASHES)]
            style = {"linewidth": 1.5, "linestyle": dash}
        _line(axes, lines[line], "accuracy", label=in_plot(line), color=shades[line], **style)
    chance: dict[str, Any] = {"label": "chance", "color": MUTED, "linewidth": 1.2, "linestyle": ":"}
    _line(axes, pd.concat(list(lines.values())), "chance", band=False, **chance)


def _both_models(axes: Axes, rounds: pd.DataFrame) -> None:
    """Draw the accuracies of local models and global model, if each round has both."""
    if not rounds[[key for key, *_ in _MODELS]].isna().any(axis=None):
        for key, label, colour in _MODELS:
            _line(axes, rounds, key, label=label, color=colour, linewidth=1.2, linestyle="--", band=False)


def _line(axes: Axes, rounds: pd.DataFrame, key: str, *, band: bool = True, **style: Any) -> None:
    """Draw the mean over runs by round, and a band from the lowest to the highest value; nothing without a value."""
    known = rounds.dropna(subset=[key]) if key in rounds else rounds.iloc[:0]
    if known.empty:
        return
    groups = known.groupby("round")[key]
    mean = groups.mean()
    axes.plot(mean.index, mean.to_numpy(), **style)
    if band and groups.size().max() > 1:
        axes.fill_between(mean.index, groups.min(), groups.max(), color=style["color"], alpha=0.15, linewidth=0)


def _finish(axes: Axes, lines: Mapping[str, pd.DataFrame]) -> None:
    """Set scales and frame after all lines are drawn; panels of one column share their range of rounds."""
    last = max(int(rounds["round"].max()) for rounds in lines.values())
    axes.set_xlim(1 - 0.02 * last, last * 1.02)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, panels: Sequence[Axes], order: Sequence[str]) -> None:
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    first = [label for label in map(in_plot, order) if label in entries]
    entries = {label: entries[label] for label in [*first, *(each for each in entries if each not in first)]}
    columns = min(len(entries), int(figure.get_figwidth() / 1.9))
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
    figure.legend(list(entries.values()), list(entries), fontsize=8, frameon=False, **where)


def _save(figure: Figure, stem: Path) -> list[Path]:
    """Save as PNG and SVG; the same runs give identical files."""
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_PIXELS_PER_INCH)
    write_bytes(png, drawn.getvalue())
    drawn = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": stem.name, "svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    write_bytes(svg, drawn.getvalue())
    return [png, svg]
