"""The parts of the benchmark, and the function that runs them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.experiments.bench.gpu import gpu
from fedkace_flwr.experiments.bench.gradient_cost import gradient_cost
from fedkace_flwr.experiments.bench.idle import idle
from fedkace_flwr.experiments.bench.measure import Figures, report
from fedkace_flwr.experiments.bench.parts import parts as costs_of_parts
from fedkace_flwr.experiments.bench.plain import plain, start
from fedkace_flwr.experiments.bench.rounds import rounds
from fedkace_flwr.experiments.bench.selection import selection
from fedkace_flwr.experiments.bench.trainable import trainable
from fedkace_flwr.experiments.bench.training import training
from fedkace_flwr.experiments.bench.watching import watching
from fedkace_flwr.experiments.outputs import check_output

PARTS: dict[str, Callable[[int], Figures]] = {
    "training": training,
    "parts": costs_of_parts,
    "trainable": trainable,
    "selection": selection,
    "gradient-cost": gradient_cost,
    "rounds": rounds,
    "plain": plain,
    "start": start,
    "gpu": gpu,
    "idle": idle,
    "watching": watching,
}
_SLOW = ("idle", "watching")  # which take minutes


def bench(console: Console, *, parts: Sequence[str], repeats: int, processes: int, output: Path | None) -> None:
    """Measure, print a table, and write the figures to ``output`` if given.

    Parameters
    ----------
    console : Console
        Where to print the table.
    parts : sequence of str
        Names in :data:`PARTS`; empty for all but ``idle`` and ``watching``, which take minutes.
    repeats : int
        Number of measurements per figure.
    processes : int
        Number of processes that train side by side in the part ``gpu``.
    output : Path, optional
        JSON file.

    Raises
    ------
    ConfigError
        An argument is out of range, or the file cannot be written.
    """
    for name, value in (("repeats", repeats), ("processes", processes)):
        if value < 1:
            raise ConfigError(f"--{name} {value}: must be >= 1")
    for part in set(parts) - set(PARTS):
        raise ConfigError(f"bench {part}: must be one of {', '.join(PARTS)}{closest(part, PARTS)}")
    check_output(output)
    torch.set_num_threads(1)
    chosen: dict[str, Callable[[int], Figures]] = {**PARTS, "gpu": partial(gpu, processes=processes)}
    figures: Figures = {}
    for part in parts or [part for part in PARTS if part not in _SLOW]:
        with console.status(f"measuring {part}"):
            figures |= chosen[part](repeats)
    report(console, figures, repeats=repeats, output=output)
