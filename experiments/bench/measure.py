"""Taking times side by side, memory apart, and printing figures with the machine they belong to."""

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

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.results.record import environment

_HEADINGS = ("figure", "median", "low", "high", "aim")

Figures = dict[str, dict[str, Any]]
"""By name: ``median``, None where it was not measured; where there is one ``low``, ``high`` and ``aim``."""


def interleaved(
    tasks: list[Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds of each task, one after the other in turn, so that a slow spell of the machine meets all of them."""
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
    """Median, lowest and highest."""
    found: dict[str, Any] = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return found | ({"aim": aim} if aim else {})


def ratio(above: list[float], below: list[float], aim: str = "") -> dict[str, Any]:
    """Ratio of two medians taken side by side, and of the pairs in turn the lowest and the highest."""
    pairs = [one / other for one, other in zip(above, below, strict=True)]
    median = statistics.median(above) / statistics.median(below)
    return {"median": median, "low": min(pairs), "high": max(pairs)} | ({"aim": aim} if aim else {})


def unmeasured(aim: str = "") -> dict[str, Any]:
    """A figure that this machine cannot give."""
    return {"median": None} | ({"aim": aim} if aim else {})


def peak_memory(task: Callable[..., object], *arguments: Any) -> float:
    """MiB that a task takes at its highest beyond what its process held before, in a process of its own."""
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
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is from now on; a child begins with its parent's
    before = _kib("VmRSS")
    task(*arguments)
    sender.send((_kib("VmHWM") - before) / 1024)


def _kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


def report(console: Console, figures: Figures, *, repeats: int, output: Path | None, **more: Any) -> None:
    """Print figures and the machine they were measured on, and write them to ``output`` if given.

    Parameters
    ----------
    console : Console
        Where the table goes.
    figures : dict
        See :data:`Figures`.
    repeats : int
        Measurements of each figure.
    output : Path, optional
        JSON file.
    **more
        What else the file shall hold.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    header = {**environment(device), "threads": 1, "repeats": repeats}
    console.print(_table(figures))
    console.print(_machine(header, figures), highlight=False)
    if output is not None:
        content = {"environment": header, **more, "figures": figures}
        output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def kept(path: Path) -> str:
    """The figures that were written to a file, as a table for GitHub with the machine below it.

    Parameters
    ----------
    path : Path
        What :func:`report` has written.

    Raises
    ------
    ConfigError
        The file is missing or is no such file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows: list[tuple[str, ...]] = [_HEADINGS, ("---", "---:", "---:", "---:", "---:")]
        rows += [_cells(name, figure) for name, figure in content["figures"].items()]
        machine = _machine(content["environment"], content["figures"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: must be what bench --output has written ({error})") from error
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in rows), "", machine])


def _machine(header: dict[str, Any], figures: Figures) -> str:
    """What was measured on, and how often where figures have a spread."""
    parts = [
        header["processor"],
        f"{header['cores']} cores",
        f"torch {header['torch']} on 1 thread",
        f"flwr {header['flwr']}",
        *([f"n = {header['repeats']}"] if any("low" in figure for figure in figures.values()) else []),
        *([header["gpu"]] if header["gpu"] else []),
    ]
    return ", ".join(parts)


def _table(figures: Figures) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == _HEADINGS[0] else "right")
    for name, figure in figures.items():
        table.add_row(*_cells(name, figure))
    return table


def _cells(name: str, figure: dict[str, Any]) -> tuple[str, ...]:
    low, high = (f"{figure[key]:.4g}" if key in figure else "" for key in ("low", "high"))
    median = "not measured" if figure["median"] is None else f"{figure['median']:.4g}"
    return name, median, low, high, figure.get("aim", "")
