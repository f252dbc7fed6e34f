"""Measure times of alternating tasks and memory in a separate process, and print figures with their machine."""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fedkace_flwr.errors import ConfigError, ResultsError
from fedkace_flwr.results.record import environment
from fedkace_flwr.storage.files import read_text, write_text

_HEADINGS = ("figure", "median", "low", "high", "aim")

Figures = dict[str, dict[str, Any]]
"""By name: ``median``, or None if it was not measured; optionally ``low``, ``high`` and ``aim``."""


def interleaved(
    tasks: list[Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Time the tasks in turn, so that a slow phase of the machine affects all of them; return seconds by task."""
    for task in tasks:
        task()
    seconds: list[list[float]] = [[] for _ in tasks]
    for _ in range(repeats):
        for index, task in enumerate(tasks):
            begun = clock()
            task()
            seconds[index].append(clock() - begun)
    return seconds


def spread(values: list[float], aim: str = "") -> dict[str, Any]:
    """Return the median, the minimum and the maximum."""
    found: dict[str, Any] = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return found | ({"aim": aim} if aim else {})


def ratio(above: list[float], below: list[float], aim: str = "") -> dict[str, Any]:
    """Return the ratio of two medians, and the lowest and highest ratio of values measured in the same turn."""
    pairs = [one / other for one, other in zip(above, below, strict=True)]
    median = statistics.median(above) / statistics.median(below)
    return {"median": median, "low": min(pairs), "high": max(pairs)} | ({"aim": aim} if aim else {})


def unmeasured(aim: str = "") -> dict[str, Any]:
    """Return the entry of a figure that this machine cannot measure."""
    return {"median": None} | ({"aim": aim} if aim else {})


def peak_memory(task: Callable[..., object], *arguments: Any) -> float:
    """Run a task in a new process and return the growth of its memory to the peak, in MiB."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(sender, task, arguments))
    process.start()
    sender.close()
    found = float(receiver.recv())
    process.join()
    return found


def _measured(sender: Any, task: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.ones(8, 8).mm(torch.ones(8, 8))
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which a child inherits from its parent
    before = _kib("VmRSS")
    task(*arguments)
    sender.send((_kib("VmHWM") - before) / 1024)


def _kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


def verdict(figure: dict[str, Any]) -> str:
    """Return whether a figure meets its aim: ``met``, ``missed`` or ``not measured``; ``measured`` if it has none."""
    if figure["median"] is None:
        return "not measured"
    if not figure.get("aim"):
        return "measured"
    comparison, number = figure["aim"].split()
    value, bound = figure["median"], float(number)
    met = {"<=": value <= bound, ">=": value >= bound, "<": value < bound, ">": value > bound}[comparison]
    return "met" if met else "missed"


def report(console: Console, figures: Figures, *, repeats: int, output: Path | None) -> None:
    """Print the figures and the machine, and write them to the JSON file ``output`` if given.

    Raises
    ------
    ResultsError
        The file cannot be written.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    header = {**environment(device), "threads": 1, "repeats": repeats}
    console.print(_table(figures))
    console.print(_machine(header, figures), highlight=False)
    if output is not None:
        content = {"environment": header, "figures": figures}
        try:
            write_text(output, json.dumps(content, indent=2) + "\n")
        except OSError as fault:
            raise ResultsError(f"--output {output}: cannot be written ({fault.strerror})") from fault


def kept(path: Path) -> str:
    """Return the figures of a file as a Markdown table, followed by the machine.

    Parameters
    ----------
    path : Path
        A file written by :func:`report`.

    Raises
    ------
    ConfigError
        The file is missing or was not written by :func:`report`.
    """
    try:
        content = json.loads(read_text(path))
        rows: list[tuple[str, ...]] = [_HEADINGS, ("---", "---:", "---:", "---:", "---:")]
        rows += [_cells(name, figure) for name, figure in content["figures"].items()]
        machine = _machine(content["environment"], content["figures"])
    except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: must be a file written by bench --output ({error})") from error
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in rows), "", machine])


def _machine(header: dict[str, Any], figures: Figures) -> str:
    """Describe the machine, and give the number of repeats if any figure has a spread."""
    threads = header.get("threads", 1)
    parts = [
        header["processor"],
        f"{header['cores']} cores",
        f"torch {header['torch']} on {threads} thread{'s' if threads > 1 else ''}",
        f"flwr {header['flwr']}",
        *([f"n = {header['repeats']}"] if any("low" in figure for figure in figures.values()) else []),
        *([header["gpu"]] if header["gpu"] else []),
    ]
    return ", ".join(parts)


def _table(figures: Figures) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in (*_HEADINGS, "verdict"):
        table.add_column(heading, justify="left" if heading == _HEADINGS[0] else "right")
    for name, figure in figures.items():
        table.add_row(*_cells(name, figure), verdict(figure))
    return table


def _cells(name: str, figure: dict[str, Any]) -> tuple[str, ...]:
    low, high = (_digits(figure[key]) if key in figure else "" for key in ("low", "high"))
    median = "not measured" if figure["median"] is None else _digits(figure["median"])
    return name, median, low, high, figure.get("aim", "")


def _digits(value: float) -> str:
    """Four significant digits, without an exponent for large numbers."""
    return f"{value:.4g}" if abs(value) < 10_000 else f"{float(f'{value:.4g}'):,.0f}"
