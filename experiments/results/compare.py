"""Comparison of a study's runs: plots of accuracy over rounds by method."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.studies.study import Study
from fedkace_flwr.registry import METHODS
from fedkace_flwr.results.plot import in_plot
from fedkace_flwr.storage.files import LARGEST_LOG, read_text, write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OWN = ("#d1495b", "#00798c")  # lines of FedKACE and of the project's own method


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


def span(seconds: float) -> str:
    """Return a duration in a suitable unit, for example ``2.5 hours``."""
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds" if seconds >= 1 else "less than a second"


def _cell(study: Study, name: str) -> str:
    """Return the part of a run's name after its method."""
    return name.removeprefix(study.runs[name].method)


def _rounds(study: Study, name: str) -> list[dict[str, Any]]:
    path = study.folder / name / "rounds.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in read_text(path, LARGEST_LOG).splitlines()]


def _draw(curves: Mapping[str, list[dict[str, Any]]], path: Path, *, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    draw_curves(figure, curves, title=title)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_bytes(path, picture.getbuffer())


def draw_curves(figure: "Figure", curves: Mapping[str, list[dict[str, Any]]], *, title: str) -> None:
    """Draw accuracy over rounds, one line for each name with its records, of which methods of this project stand out."""
    import matplotlib
    from matplotlib.ticker import MaxNLocator, PercentFormatter

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
