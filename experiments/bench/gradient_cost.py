"""The cost of the replay weight: counted for the paper's two networks (section 5.3), and timed for the first one.

Counts are multiply-adds per sample. PyTorch's ``FlopCounterMode`` sees only convolutions and matrix products, and
counts two operations for each multiply-add. Counting computes nothing, because the tensors hold no data.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fedkace_flwr.algorithms.fedkace_loss import BalancedReplayLoss, FullGradientReplayLoss
from fedkace_flwr.algorithms.fedkace_replay import GradientBalance, output_layer_gradient
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.bench.measure import interleaved, report, spread
from fedkace_flwr.experiments.bench.training import Setting
from fedkace_flwr.experiments.outputs import check_output
from fedkace_flwr.networks.resnet import ResNet18, resnet18
from fedkace_flwr.training.losses import Batch, TaskLoss

_CLASSES, _BATCH = 100, 32
_RULE = "forward, with batch norm and pooling"


@dataclass(frozen=True)
class Network:
    """One of the paper's networks, and the cost of its gradients according to the paper.

    Attributes
    ----------
    name : str
        Name of the data set.
    width : int
        Channels of the first stage.
    size : int
        Width and height of the images in pixels.
    stem : str
        Kind of the first layers.
    output, full : float
        The paper's "gradient FLOPs per sample" of the output layer and of the full model.
    """

    name: str
    width: int
    size: int
    stem: str
    output: float
    full: float


NETWORKS = (
    Network("CIFAR-100", 16, 32, "cifar", 12.8e3, 35.68e6),
    Network("ImageNet100", 64, 224, "imagenet", 51.2e3, 1823.57e6),
)


def gradient_cost(console: Console, *, repeats: int, output: Path | None, chunk: int = 500, buffer: int = 1000) -> None:
    """Count and time, print the tables, and write the figures to ``output`` if given.

    Parameters
    ----------
    console : Console
        Where to print the tables.
    repeats : int
        Number of measurements per figure.
    output : Path, optional
        JSON file.
    chunk, buffer : int
        Numbers of new and buffered samples in the timed epoch.

    Raises
    ------
    ConfigError
        A number is out of range, or the file cannot be written.
    """
    for name, value, low in (("repeats", repeats, 1), ("chunk", chunk, 2), ("buffer", buffer, 2)):
        if value < low:
            raise ConfigError(f"--{name} {value}: must be >= {low}")
    check_output(output)
    counted = {network.name: counts(network) for network in NETWORKS}
    compared = {network.name: readings(network) for network in NETWORKS}
    console.print(_counts_table(counted), end="\n\n")
    console.print(_readings_table(compared), end="\n\n")
    figures = _timings(Setting.draw(chunk, buffer), repeats)
    cost = counted["CIFAR-100"]  # the network that is timed
    training = cost["forward"] + cost["backward"]
    figures["as5 against default, by multiply-adds"] = {
        "median": (training + cost["weight, as5"]) / (training + cost["weight, default"])
    }
    report(
        console,
        figures,
        repeats=repeats,
        output=output,
        samples={"chunk": chunk, "buffer": buffer},
        multiply_adds_per_sample=counted,
        readings_of_the_paper=compared,
    )


def counts(network: Network) -> dict[str, int]:
    """Count the multiply-adds per sample of convolutions and matrix products.

    Returns
    -------
    dict
        ``output gradient``: the gradient of one loss with respect to the output layer's weights. ``forward``: the
        forward pass. ``backward``: the gradient of one loss with respect to all parameters. ``weight, default`` and
        ``weight, as5``: everything that computing the next replay weight adds to a training epoch, for the losses of
        both new and buffered samples.
    """
    with FakeTensorMode():
        net = _network(network)
        mask = torch.ones(_CLASSES, dtype=torch.bool)
        labels = torch.zeros(_BATCH, dtype=torch.int64)
        batch = Batch(_images(network), labels, torch.arange(_BATCH) % 2 == 0, labels)
        features = net.features(batch.images)
        logits = net.output(features)
        default = BalancedReplayLoss(mask, mask, GradientBalance())
        full = FullGradientReplayLoss(mask, mask, GradientBalance(), list(net.parameters()))
        for objective in (default, full):
            objective.begin_epoch(1.0, 1.0)
        found = {
            "output gradient": _multiply_adds(lambda: output_layer_gradient(logits, features, labels, mask)),
            "forward": _multiply_adds(lambda: net(batch.images)),
            "weight, default": _multiply_adds(lambda: default.loss(logits, features, batch)),
            "weight, as5": _multiply_adds(lambda: full.loss(logits, features, batch)),
            "backward": _multiply_adds(lambda: torch.autograd.backward(logits.sum())),
        }
    return {name: count // _BATCH for name, count in found.items()}


def readings(network: Network) -> dict[str, dict[str, float]]:
    """Count what the paper's figure for the full model may include, under several readings.

    Returns
    -------
    dict
        For each reading ``count``, and ``against_paper``, the relative deviation from the paper's figure.
    """
    cost = counts(network)
    products, normalised, pooled = _forward_parts(network)
    found = {
        "forward, convolutions and output layer": products,
        "forward, with 2 per normalised value": products + 2 * normalised,
        # The rule of thop (pytorch-OpCounter): 4 operations per batch-normalised value; the additions and one division
        # for each average; an exponential and a division per class, and the additions, for softmax.
        _RULE: products + 4 * normalised + pooled,
        f"{_RULE} and a softmax": products + 4 * normalised + pooled + 3 * _CLASSES - 1,
        "backward": cost["backward"],
        "forward and backward": cost["forward"] + cost["backward"],
    }
    other = replace(network, stem="cifar" if network.stem == "imagenet" else "imagenet")
    sizes = {32: (28, 64), 224: (192, 256)}[network.size]
    for variant in (other, *(replace(network, size=size) for size in sizes)):
        products, normalised, pooled = _forward_parts(variant)
        found[f"{_RULE}: {variant.stem} stem, {variant.size} pixels"] = products + 4 * normalised + pooled
    return {name: {"count": count, "against_paper": count / network.full - 1} for name, count in found.items()}


def _forward_parts(network: Network) -> tuple[int, int, int]:
    """Return, per sample, the products' multiply-adds, the number of batch norm outputs, and the pooling's operations."""
    normalised: list[int] = []
    pooled: list[int] = []
    with FakeTensorMode():
        net = _network(network)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_hook(lambda _module, _inputs, output: normalised.append(output.numel()))
        net.blocks.register_forward_hook(
            lambda _module, _inputs, output: pooled.append(output[:, :, 0, 0].numel() * (output[0, 0].numel() + 1))
        )
        images = _images(network)
        products = _multiply_adds(lambda: net(images))
    return products // _BATCH, sum(normalised) // _BATCH, sum(pooled) // _BATCH


def _network(network: Network) -> ResNet18:
    return resnet18(_CLASSES, network.width, network.stem).train()


def _images(network: Network) -> Tensor:
    return torch.empty(_BATCH, 3, network.size, network.size)


def _multiply_adds(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops()) // 2


def _timings(setting: Setting, repeats: int) -> dict[str, Any]:
    """Time one epoch over chunk and buffer per loss, and the ratios of epochs measured in the same turn.

    Times are CPU seconds, which on one thread equal wall-clock seconds unless other processes use the machine.
    """
    current, old, parameters = setting.current, setting.old, list(setting.net.parameters())
    torch.set_num_threads(1)
    plain, default, full = interleaved(
        [
            lambda: setting.train(TaskLoss(current, old)),
            lambda: setting.train(BalancedReplayLoss(current, old, GradientBalance())),
            lambda: setting.train(FullGradientReplayLoss(current, old, GradientBalance(), parameters)),
        ],
        repeats,
        clock=time.process_time,
    )

    def ratio(above: list[float], below: list[float]) -> dict[str, float]:
        return spread([a / b for a, b in zip(above, below, strict=True)])

    return {
        "epoch without weights, processor seconds": spread(plain),
        "epoch by default, processor seconds": spread(default),
        "epoch of as5, processor seconds": spread(full),
        "default against without weights": ratio(default, plain),
        "as5 against without weights": ratio(full, plain),
        "as5 against default": ratio(full, default),
    }


def _counts_table(counted: dict[str, dict[str, int]]) -> Table:
    table = _table("multiply-adds per sample", *(network.name for network in NETWORKS))
    rows = {
        "output-layer gradient, one loss": "output gradient",
        "forward": "forward",
        "backward, one loss": "backward",
        "next weight by default, both sides": "weight, default",
        "next weight of as5, both sides": "weight, as5",
    }
    for title, name in rows.items():
        table.add_row(title, *(_short(counted[network.name][name]) for network in NETWORKS))
    ratios = (counted[network.name]["weight, as5"] / counted[network.name]["weight, default"] for network in NETWORKS)
    table.add_row("as5 against default", *(f"{ratio:.0f} x" for ratio in ratios))
    table.add_row("paper: output layer", *(_short(network.output) for network in NETWORKS))
    table.add_row("paper: full model", *(_short(network.full) for network in NETWORKS))
    return table


def _readings_table(compared: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = _table("what the paper's full model may count", "per sample", "against the paper")
    for name, found in compared.items():
        for reading, figure in found.items():
            table.add_row(f"{name}: {reading}", _short(figure["count"]), f"{100 * figure['against_paper']:+.2f} %")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _short(count: float) -> str:
    return f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count / 1e3:.1f} K"
