"""The parts of the benchmark, and the function that runs them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from experiments.bench.gpu import gpu, gpu_run, gpu_tests
from experiments.bench.measure import Figures, report
from experiments.bench.parts import parts as costs_of_parts
from experiments.bench.plain import plain, start
from experiments.bench.rounds import rounds
from experiments.bench.selection import selection
from experiments.bench.training import training
from experiments.outputs import check_output
from fedkace_flwr.errors import ConfigError

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
