"""Comparison of a study's runs: a table with regret, and plots of accuracy over rounds by method."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from experiments.results.regret import is_reference, regret, stream_of
from experiments.studies.study import Study
from fedkace_flwr.errors import RunError
from fedkace_flwr.registry import METHODS
from fedkace_flwr.results.plot import in_plot
from fedkace_flwr.storage.files import LARGEST_LOG, read_text, write_bytes
from fedkace_flwr.storage.names import printable

_OWN = ("#d1495b", "#00798c")  # lines of FedKACE and of the project's own method
_HEADINGS = ("run", "AA %", "AR %", "final %", "chance %", "switched", "failures", "MB down", "MB up", "seconds")


def summary_table(
    summaries: Mapping[str, Mapping[str, Any]], regrets: Mapping[str, float | None] | None = None
) -> Table:
    """Return a table with one row per run.

    Parameters
    ----------
    summaries : mapping
        The content of ``summary.json`` of each run, by the run's name.
    regrets : mapping, optional
        AR of each run; see :func:`average_regrets`.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for name, summary in summaries.items():
        switched = sum(number is not None for number in summary["switched_at"])
        table.add_row(
            escape(printable(name)),
            percent(summary["average_accuracy"]),
            percent((regrets or {}).get(name)),
            percent(summary["final_accuracy"]),
            percent(summary["average_chance"]),
            f"{switched} of {summary['clients']}",
            str(summary["failures"]),
            *(f"{summary['bytes'][way] / 1e6:.1f}" for way in ("down", "up")),
            f"{summary['seconds']['round']:.1f}",
        )
    return table


def average_regrets(study: Study) -> dict[str, float | None]:
    """Return the AR of each run, or None if the study has no complete Centralized run of the same stream."""
    curves = {name: [record["accuracy"] for record in _rounds(study, name)] for name in study.runs}
    flat = {name: config.flat() for name, config in study.runs.items()}
    references = {stream_of(flat[name]): name for name, config in study.runs.items() if is_reference(config.method)}
    upper = {name: curves.get(references.get(stream_of(flat[name]), ""), []) for name in study.runs}
    return {name: regret(upper[name], curves[name]) for name in study.runs}


def finished_runs(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the summaries of finished runs by method and seed; if two runs share these, the later one by its folder.

    Raises
    ------
    RunError
        A folder has no readable ``summary.json``.
    """
    summaries = {}
    for folder in folders:
        try:
            summary = json.loads(read_text(folder / "summary.json"))
        except (OSError, RecursionError, ValueError) as error:
            raise RunError(f"{folder}: has no readable summary.json; must be the folder of a finished run") from error
        name = f"{summary['method']}_seed-{summary['seed']}"
        summaries[name if name not in summaries else str(folder)] = summary
    return summaries


def draw_comparisons(study: Study) -> list[Path]:
    """Plot accuracy over rounds by method for each cell of the study with several methods; return the paths."""
    cells: dict[str, list[str]] = {}
    for name in study.runs:
        cells.setdefault(_cell(study, name), []).append(name)
    pictures = []
    for cell, names in cells.items():
        curves = {study.runs[name].method: rounds for name in names if (rounds := _rounds(study, name))}
        if len(curves) > 1:
            path = study.folder / f"accuracy{cell}.png"
            _draw(curves, path, title=study.name + cell)
            pictures.append(path)
    return pictures


def percent(value: float | None) -> str:
    """Return a share as a percentage with two decimals, or a dash for None."""
    return "-" if value is None else f"{100 * value:.2f}"


def span(seconds: float) -> str:
    """Return a duration in a suitable unit, for example ``2.5 hours``."""
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"


def _cell(study: Study, name: str) -> str:
    """Return the part of a run's name after its method."""
    return name.removeprefix(study.runs[name].method)


def _rounds(study: Study, name: str) -> list[dict[str, Any]]:
    path = study.folder / name / "rounds.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in read_text(path, LARGEST_LOG).splitlines()]


def _draw(curves: Mapping[str, list[dict[str, Any]]], path: Path, *, title: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    colours = matplotlib.colormaps["tab20"]
    own = [method for method in METHODS if METHODS[method].role == "method"]
    for index, (method, records) in enumerate(curves.items()):
        numbers = [record["round"] for record in records]
        values = [float("nan") if record["accuracy"] is None else record["accuracy"] for record in records]
        style: dict[str, Any] = {"color": colours(index % 20)}
        if method in own:
            style = {"color": _OWN[own.index(method) % len(_OWN)], "linewidth": 2.6, "zorder": 3}
        axes.plot(numbers, values, label=in_plot(method), marker="o", markersize=3, **style)
    chances = max(curves.values(), key=len)
    axes.plot(
        [record["round"] for record in chances],
        [float("nan") if record["chance"] is None else record["chance"] for record in chances],
        color="#8a8f98",
        linestyle="--",
        label="chance",
    )
    axes.set(xlabel="round", ylabel="accuracy on all classes met", ylim=(0, 1.02), title=in_plot(title))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_bytes(path, picture.getbuffer())
