"""The parts of the benchmark, and the function that runs them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.bench.gpu import gpu, gpu_run, gpu_tests
from fedkace_flwr.experiments.bench.measure import Figures, report
from fedkace_flwr.experiments.bench.parts import parts as costs_of_parts
from fedkace_flwr.experiments.bench.plain import plain, start
from fedkace_flwr.experiments.bench.rounds import rounds
from fedkace_flwr.experiments.bench.selection import selection
from fedkace_flwr.experiments.bench.training import training
from fedkace_flwr.experiments.outputs import check_output

PARTS: dict[str, Callable[[int], Figures]] = {
    "training": training,
    "parts": costs_of_parts,
    "selection": selection,
    "rounds": rounds,
    "plain": plain,
    "start": start,
    "gpu": gpu,
    "gpu-tests": gpu_tests,
    "gpu-run": gpu_run,
}


def bench(console: Console, *, parts: Sequence[str], repeats: int, output: Path | None) -> None:
    """Measure, print a table, and write the figures to ``output`` if given.

    Parameters
    ----------
    console : Console
        Where to print the table.
    parts : sequence of str
        Names in :data:`PARTS`; empty for all.
    repeats : int
        Number of measurements per figure.
    output : Path, optional
        JSON file.

    Raises
    ------
    ConfigError
        ``repeats`` is out of range, or the file cannot be written.
    """
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats}: must be >= 1")
    check_output(output)
    torch.set_num_threads(1)
    figures: Figures = {}
    for part in parts or PARTS:
        with console.status(f"measuring {part}"):
            figures |= PARTS[part](repeats)
    report(console, figures, repeats=repeats, output=output)
