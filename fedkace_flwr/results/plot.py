"""The plot of a run: accuracy over rounds, switch rounds, and chance."""

import importlib
import io
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkace_flwr.storage.files import write_bytes
from fedkace_flwr.storage.names import printable

_LONGEST = 200
_INK, _ACCENT, _MUTED = "#1b3a57", "#d1495b", "#8a8f98"


def import_ahead() -> None:
    """Import Matplotlib in the background, so that the end of a run need not wait for it."""
    threading.Thread(target=importlib.import_module, args=("matplotlib.figure",), daemon=True).start()


def draw_accuracy(rounds: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw ``accuracy.png`` from the lines of ``rounds.jsonl``.

    Parameters
    ----------
    rounds : sequence of mapping
        The lines; at least one.
    path : Path
        The PNG file to write.
    title : str
        Title of the plot.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    numbers = [record["round"] for record in rounds]

    clients = max(len(record["client_accuracy"]) for record in rounds)  # some may have joined later
    for client in range(clients):
        found = [record["client_accuracy"] for record in rounds]
        values = [_or_nan(each[client] if client < len(each) else None) for each in found]
        axes.plot(numbers, values, color=_INK, alpha=0.15, linewidth=1, label="one client" if client == 0 else None)
    axes.plot(
        numbers,
        [_or_nan(record["accuracy"]) for record in rounds],
        color=_INK,
        linewidth=2.2,
        marker="o",
        markersize=3.5,
        label="mean of clients",
    )
    axes.plot(
        numbers,
        [_or_nan(record["chance"]) for record in rounds],
        color=_MUTED,
        linestyle="--",
        linewidth=1.4,
        label="chance",
    )
    _mark_switches(axes, rounds)

    axes.set(xlabel="round", ylabel="accuracy on all classes met", ylim=(0, 1.02), title=in_plot(title))
    axes.title.set_fontsize(10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", fontsize=8, framealpha=0.9)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_bytes(path, picture.getvalue())


def in_plot(text: str) -> str:
    """The text as Matplotlib draws it letter by letter, cut where no plot has room for more."""
    text = printable(text)
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    # A label that begins with an underscore is left out of legends, and what is between dollar signs is a formula.
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


def _mark_switches(axes: Any, rounds: Sequence[Mapping[str, Any]]) -> None:
    """Mark each round in which clients switched, with the number of these clients."""
    switches = Counter(number for number in rounds[-1]["switched_at"] if number is not None)
    for index, (number, clients) in enumerate(sorted(switches.items())):
        label = "clients that switch to the global model" if index == 0 else None
        axes.axvline(number, color=_ACCENT, alpha=0.35, linewidth=1, linestyle=":")
        axes.plot([number], [0.015], marker="^", color=_ACCENT, markersize=6, linestyle="none", label=label)
        axes.annotate(str(clients), (number, 0.05), color=_ACCENT, ha="center", fontsize=8, annotation_clip=False)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
