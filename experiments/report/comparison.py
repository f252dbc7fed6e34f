"""Comparison of a study's runs: plots of accuracy over rounds by method."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkace_flwr.errors import ResultsError
from fedkace_flwr.experiments.report.names import MUTED, colours, ranked, role, variant_name
from fedkace_flwr.experiments.results.axes import variant_axes
from fedkace_flwr.experiments.results.reading import read_rounds
from fedkace_flwr.experiments.studies.study import Study
from fedkace_flwr.results.plot import in_plot
from fedkace_flwr.storage.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_comparisons(study: Study) -> list[Path]:
    """Plot accuracy over rounds by method for each cell of the study with several lines; return the paths.

    A line is a method or, if an axis names variants of methods, a variant.
    """
    from matplotlib.figure import Figure

    variants = variant_axes(study.cells.values())
    cells: dict[str, dict[str, str]] = {}
    for name, config in study.runs.items():
        line = variant_name(config.method, [study.cells[name][axis] for axis in variants])
        cells.setdefault(_cell(study, name, variants), {})[line] = name
    pictures = []
    for cell, lines in cells.items():
        curves = {line: rounds for line, name in lines.items() if (rounds := _rounds(study.folder / name))}
        if len(curves) > 1:
            figure, picture = Figure(figsize=(9, 5), layout="constrained"), io.BytesIO()
            methods = {line: study.runs[lines[line]].method for line in curves}
            draw_curves(figure, curves, methods, title=study.name + cell)
            figure.savefig(picture, format="png", dpi=130)
            pictures.append(study.folder / f"accuracy{cell}.png")
            write_bytes(pictures[-1], picture.getvalue())
    return pictures


def _cell(study: Study, name: str, variants: Sequence[str]) -> str:
    """Return the name of a run's cell: the run's own without method and variant."""
    values = study.cells[name]
    axes = [axis for axis in study.keys if axis not in ("method", "seed", *variants)]
    words = [f"{axis}-{values[axis]}" if study.keys[axis] == [axis] else str(values[axis]) for axis in axes]
    return "".join(f"_{word}" for word in [*words, f"seed-{values['seed']}"]).replace("/", "-")


def _rounds(run: Path) -> list[dict[str, Any]]:
    try:
        return read_rounds(run)
    except ResultsError:  # a damaged record, which the run has named; the others are drawn
        return []


def draw_curves(
    figure: "Figure", curves: Mapping[str, list[dict[str, Any]]], methods: Mapping[str, str], *, title: str
) -> None:
    """Draw accuracy over rounds, and that of guessing; lines of the project's methods stand out.

    Parameters
    ----------
    figure : Figure
        Where to draw.
    curves : mapping
        The records of each line by its name.
    methods : mapping of str to str
        Each line's method by the line's name; it decides the line's colour.
    title : str
        Title of the plot.
    """
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes = figure.add_subplot()
    shades = colours(methods)
    for index, name in enumerate(ranked(methods)):
        numbers = [record["round"] for record in curves[name]]
        values = [float("nan") if record["accuracy"] is None else record["accuracy"] for record in curves[name]]
        wide = 2.6 if role(methods[name]) == "method" else 1.5
        dash = "--" if role(methods[name]) == "reference" else "-"
        style: dict[str, Any] = {"color": shades[name], "linewidth": wide, "linestyle": dash, "zorder": 3 - index / 99}
        axes.plot(numbers, values, label=in_plot(name), **style)
    chances = max(curves.values(), key=len)
    axes.plot(
        [record["round"] for record in chances],
        [float("nan") if record["chance"] is None else record["chance"] for record in chances],
        color=MUTED,
        linestyle=":",
        label="chance",
    )
    axes.set(xlabel="round", ylabel="accuracy on all classes met", ylim=(0, 1.02), title=in_plot(title))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False)
