"""The cost of the replay weight: counted for the paper's two networks (section 5.3), and timed for the first one.

Counts are multiply-adds per sample. PyTorch's ``FlopCounterMode`` sees only convolutions and matrix products, and
counts two operations for each multiply-add. Counting computes nothing, because the tensors hold no data.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fedkace_flwr.algorithms.fedkace_loss import BalancedReplayLoss, FullGradientReplayLoss
from fedkace_flwr.algorithms.fedkace_replay import GradientBalance, output_layer_gradient
from fedkace_flwr.experiments.bench.measure import Figures, interleaved, spread
from fedkace_flwr.experiments.bench.training import Setting
from fedkace_flwr.networks.resnet import resnet18
from fedkace_flwr.training.losses import Batch, TaskLoss

_CLASSES, _BATCH = 100, 32
THOP = "forward, with batch norm, pooling and a softmax"


class Network(NamedTuple):
    """One of the paper's networks: its data set, the channels of its first stage, image size in pixels, first layers."""

    name: str
    width: int
    size: int
    stem: str


NETWORKS = (Network("CIFAR-100", 16, 32, "cifar"), Network("ImageNet100", 64, 224, "imagenet"))


def gradient_cost(repeats: int, chunk: int = 500, buffer: int = 1000) -> Figures:
    """Count for both networks, and time epochs over a chunk and a buffer of these sizes."""
    figures: Figures = {
        f"{network.name}, multiply-adds per sample, {name}": {"median": count}
        for network in NETWORKS
        for name, count in counts(network).items()
    }
    return figures | _timings(Setting.draw(chunk, buffer), repeats)


def counts(network: Network) -> dict[str, int]:
    """Count the multiply-adds per sample of convolutions and matrix products.

    Returns
    -------
    dict
        ``output gradient``: the gradient of one loss with respect to the output layer's weights. ``forward``: the
        forward pass. ``backward``: the gradient of one loss with respect to all parameters. ``weight, default`` and
        ``weight, as5``: everything that computing the next replay weight adds to a training epoch, for the losses of
        both new and buffered samples. :data:`THOP`: the forward pass by the rule of ``thop`` (pytorch-OpCounter), which
        gives the paper's figure for the full model.
    """
    normalised: list[int] = []
    pooled: list[int] = []
    with FakeTensorMode():
        net = resnet18(_CLASSES, network.width, network.stem).train()
        images = torch.empty(_BATCH, 3, network.size, network.size)
        mask = torch.ones(_CLASSES, dtype=torch.bool)
        labels = torch.zeros(_BATCH, dtype=torch.int64)
        batch = Batch(images, labels, torch.arange(_BATCH) % 2 == 0, labels)
        features = net.features(images)
        logits = net.output(features)
        default = BalancedReplayLoss(mask, mask, GradientBalance())
        full = FullGradientReplayLoss(mask, mask, GradientBalance(), list(net.parameters()))
        for objective in (default, full):
            objective.begin_epoch(1.0, 1.0)
        found = {
            "output gradient": _multiply_adds(lambda: output_layer_gradient(logits, features, labels, mask)),
            "forward": _multiply_adds(lambda: net(images)),
            "weight, default": _multiply_adds(lambda: default.loss(logits, features, batch)),
            "weight, as5": _multiply_adds(lambda: full.loss(logits, features, batch)),
            "backward": _multiply_adds(lambda: torch.autograd.backward(logits.sum())),
        }
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_hook(lambda _module, _inputs, output: normalised.append(output.numel()))
        net.blocks.register_forward_hook(
            lambda _module, _inputs, output: pooled.append(output[:, :, 0, 0].numel() * (output[0, 0].numel() + 1))
        )
        net(images)
    # 4 operations per batch-normalised value; the additions and one division for each average; an exponential and a
    # division per class, and the additions, for softmax.
    thop = found["forward"] + 4 * sum(normalised) + sum(pooled) + _BATCH * (3 * _CLASSES - 1)
    return {name: count // _BATCH for name, count in {**found, THOP: thop}.items()}


def _multiply_adds(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops()) // 2


def _timings(setting: Setting, repeats: int) -> Figures:
    """Time one epoch over chunk and buffer per loss, and the ratios of epochs measured in the same turn.

    Times are CPU seconds, which on one thread equal wall-clock seconds unless other processes use the machine.
    """
    current, old, parameters = setting.current, setting.old, list(setting.net.parameters())
    plain, default, full = interleaved(
        [
            lambda: setting.train(TaskLoss(current, old)),
            lambda: setting.train(BalancedReplayLoss(current, old, GradientBalance())),
            lambda: setting.train(FullGradientReplayLoss(current, old, GradientBalance(), parameters)),
        ],
        repeats,
        clock=time.process_time,
    )

    def against(above: list[float], below: list[float]) -> dict[str, float]:
        return spread([a / b for a, b in zip(above, below, strict=True)])

    return {
        "epoch without weights, processor seconds": spread(plain),
        "epoch by default, processor seconds": spread(default),
        "epoch of as5, processor seconds": spread(full),
        "default against without weights": against(default, plain),
        "as5 against without weights": against(full, plain),
        "as5 against default": against(full, default),
    }
