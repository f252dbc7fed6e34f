"""Benchmarks: ratios of medians within one run, with spread, hardware and versions beside them.

The setting is the paper's on CIFAR-100 (section A.3): width 16, batches of 32, 500 new samples, a buffer of
1000, 20 epochs, 100 classes; the images are random, which costs the same.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from experiments.engines import FlowerEngine
from fedkace_flwr.config import Config, TrainingConfig
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.hbms import score_candidates, select
from fedkace_flwr.model import ResNet18, resnet18
from fedkace_flwr.objectives import BalancedReplayLoss, Objective
from fedkace_flwr.record import environment
from fedkace_flwr.replay import GradientBalance
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.training import Preprocess, predict, train

_CLASSES, _CHUNK, _BUFFER, _BATCH, _EPOCHS, _WIDTH, _SIZE = 100, 500, 1000, 32, 20, 16, 32
_ROUND_STUDY = {"epochs": 1, "rounds": 4, "threads": 1}


@dataclass(frozen=True)
class Setting:
    """One client's round at the paper's scale, on random images.

    Attributes
    ----------
    images, labels : Tensor
        uint8 (1500, 3, 32, 32) and int64 (1500,): the chunk's 500, then the buffer's 1000.
    chunk : int
        How many of them are the chunk's.
    net : ResNet18
        Channels-last.
    preprocess : Preprocess
        Normalisation.
    old, current : Tensor
        bool (100,): half of the classes are met, the chunk holds five.
    """

    images: Tensor
    labels: Tensor
    chunk: int
    net: ResNet18
    preprocess: Preprocess
    old: Tensor
    current: Tensor

    @classmethod
    def draw(cls, chunk: int = _CHUNK, buffer: int = _BUFFER) -> "Setting":
        """Random images, labels and weights from a fixed seed."""
        generator = generator_for(0, "bench")
        images = torch.randint(0, 256, (chunk + buffer, 3, _SIZE, _SIZE), dtype=torch.uint8, generator=generator)
        new = torch.randint(45, 50, (chunk,), generator=generator)
        held = torch.randint(0, 50, (buffer,), generator=generator)
        label = torch.arange(_CLASSES)
        net = resnet18(_CLASSES, _WIDTH, "cifar").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        centre = Preprocess.by_statistics((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), torch.device("cpu"))
        return cls(images, torch.cat([new, held]), chunk, net, centre, label < 50, (label >= 45) & (label < 50))

    def train(self, objective: Objective) -> None:
        """One epoch over chunk and buffer."""
        new, held = slice(0, self.chunk), slice(self.chunk, None)
        train(
            self.net,
            (self.images[new], self.labels[new]),
            (self.images[held], self.labels[held]),
            objective,
            TrainingConfig(epochs=1, batch_size=_BATCH),
            self.preprocess,
            generator_for(0, "epoch"),
        )


def bench(console: Console, *, repeats: int, output: Path | None) -> None:
    """Measure, print a table, and write the figures to ``output`` if given.

    Parameters
    ----------
    console : Console
        Where the table goes.
    repeats : int
        Measurements of each figure.
    output : Path, optional
        JSON file.
    """
    torch.set_num_threads(1)
    setting = Setting.draw()
    samples = _CHUNK + _BUFFER
    bare, ours = interleaved([lambda: _bare_epoch(setting), lambda: _fedkace_epoch(setting)], repeats)
    (selection,) = interleaved([lambda: _select(setting)], repeats)
    epoch = statistics.median(ours)
    figures: dict[str, Any] = {
        "bare loop, samples per second": _rate(bare, samples),
        "local training, samples per second": _rate(ours, samples),
        "local training against bare loop": {"median": statistics.median(bare) / epoch, "aim": ">= 0.95"},
        "selection, seconds": spread(selection),
        "selection, share of a round": {
            "median": statistics.median(selection) / (statistics.median(selection) + _EPOCHS * epoch),
            "aim": "< 0.02",
        },
        **_round_overhead(),
    }
    report(console, figures, repeats=repeats, output=output)


def report(console: Console, figures: dict[str, Any], *, repeats: int, output: Path | None, **more: Any) -> None:
    """Print figures and the machine they were measured on, and write them to ``output`` if given.

    Parameters
    ----------
    console : Console
        Where the table goes.
    figures : dict
        By name: ``median``, and where there is one ``low``, ``high`` and ``aim``.
    repeats : int
        Measurements of each figure.
    output : Path, optional
        JSON file.
    **more
        What else the file shall hold.
    """
    header = {**environment(torch.device("cpu")), "threads": 1, "repeats": repeats}
    console.print(_table(figures))
    console.print(
        f"{header['processor']}, {header['cores']} cores, torch {header['torch']} on 1 thread, flwr {header['flwr']}, "
        f"n = {repeats}",
        highlight=False,
    )
    if output is not None:
        content = {"environment": header, **more, "figures": figures}
        output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _fedkace_epoch(setting: Setting) -> None:
    setting.train(BalancedReplayLoss(setting.current, setting.old, GradientBalance()))


def _bare_epoch(setting: Setting) -> None:
    """Forward, backward, step on the same images, already normalised: the least that training can cost."""
    inputs = setting.preprocess(setting.images)
    optimiser = torch.optim.AdamW(setting.net.parameters(), lr=0.01, weight_decay=0.001, fused=True)
    setting.net.train()
    for images, labels in zip(torch.split(inputs, _BATCH), torch.split(setting.labels, _BATCH), strict=True):
        loss = functional.cross_entropy(setting.net(images), labels)
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimiser.step()


def _select(setting: Setting) -> None:
    buffer = len(setting.labels) - setting.chunk
    candidates = torch.arange(len(setting.labels)).roll(buffer)
    logits = predict(setting.net, lambda ids: setting.images[ids], candidates, setting.preprocess)
    labels = setting.labels[candidates]
    active = setting.old | setting.current
    scores = score_candidates(logits, labels, buffer, setting.old, active)
    select(scores, labels, buffer, setting.old, active, generator_for(0, "select"))


def _round_overhead() -> dict[str, Any]:
    """Seconds per round that are not training: the quickstart's ten clients on Flower's simulation."""
    with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder, FlowerEngine(2, 0.0) as engine:
        config = Config.parse({**_ROUND_STUDY, "results-dir": folder, "run-name": "round"})
        Experiment(config)
        run = Path(folder) / "round"
        run.mkdir()
        job = engine.start(config, run / "app.log")
        job.check()
        rounds = [json.loads(line)["seconds"] for line in (run / "rounds.jsonl").read_text().splitlines()]
    parts = ("selection", "evaluation", "transport")
    # The first round also pays for the workers' imports.
    return {f"round of ten clients, {part}, seconds": spread([entry[part] for entry in rounds[1:]]) for part in parts}


def interleaved(
    tasks: list[Callable[[], None]], repeats: int, clock: Callable[[], float] = time.perf_counter
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


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _rate(seconds: list[float], samples: int) -> dict[str, float]:
    return spread([samples / value for value in seconds])


def _table(figures: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("figure", "median", "low", "high", "aim"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for name, figure in figures.items():
        low, high = (f"{figure[key]:.4g}" if key in figure else "" for key in ("low", "high"))
        table.add_row(name, f"{figure['median']:.4g}", low, high, figure.get("aim", ""))
    return table
