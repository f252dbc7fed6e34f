"""Local training on one thread, compared with a bare loop, a typical tutorial loop and a matrix product.

The setting is the paper's for CIFAR-100 (section A.3): width 16, batches of 32, 500 new samples, a buffer of 1000
and 100 classes. The images are random, which does not affect the cost.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from fedkace_flwr.algorithms.fedkace_loss import BalancedReplayLoss, FullGradientReplayLoss
from fedkace_flwr.algorithms.fedkace_replay import GradientBalance
from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.experiments.bench.measure import Figures, interleaved, ratio, spread
from fedkace_flwr.networks.resnet import ResNet18, resnet18
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.training.loop import Preprocess, train
from fedkace_flwr.training.losses import Batch, Objective, TaskLoss

CLASSES, CHUNK, BUFFER, BATCH, EPOCHS, WIDTH, SIZE = 100, 500, 1000, 32, 20, 16, 32
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
_MATRIX = 2048


@dataclass(frozen=True)
class Setting:
    """One client's round at the paper's scale, on random images.

    Attributes
    ----------
    images, labels : Tensor
        uint8 (1500, 3, 32, 32) and int64 (1500,): the chunk's 500, then the buffer's 1000.
    chunk : int
        Number of samples in the chunk.
    net : ResNet18
        Channels-last.
    preprocess : Preprocess
        Normalisation.
    old, current : Tensor
        bool (100,): the classes seen so far, half of all, and the five classes of the chunk.
    """

    images: Tensor
    labels: Tensor
    chunk: int
    net: ResNet18
    preprocess: Preprocess
    old: Tensor
    current: Tensor

    @classmethod
    def draw(cls, chunk: int = CHUNK, buffer: int = BUFFER, device: str = "cpu") -> "Setting":
        """Draw images, labels and weights from a fixed seed, and put the network on ``device``."""
        generator = generator_for(0, "bench")
        images = torch.randint(0, 256, (chunk + buffer, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
        new = torch.randint(45, 50, (chunk,), generator=generator)
        held = torch.randint(0, 50, (buffer,), generator=generator)
        label = torch.arange(CLASSES)
        net = resnet18(CLASSES, WIDTH, "cifar").to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        centre = Preprocess.by_statistics(MEAN, STD, torch.device(device))
        old, current = ((label >= low) & (label < 50) for low in (0, 45))
        return cls(images, torch.cat([new, held]), chunk, net, centre, old.to(device), current.to(device))

    def train(self, objective: Objective, precision: torch.dtype = torch.float32) -> None:
        """Train one epoch over chunk and buffer."""
        self.net.precision = precision
        settings = TrainingConfig(epochs=1, batch_size=BATCH)
        train(self.net, *self.samples, objective, settings, self.preprocess, generator_for(0, "epoch"))

    @property
    def samples(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Images and labels of the chunk, and those of the buffer."""
        new, held = slice(0, self.chunk), slice(self.chunk, None)
        return (self.images[new], self.labels[new]), (self.images[held], self.labels[held])

    def balanced(self) -> Objective:
        """Return FedKACE's loss."""
        return BalancedReplayLoss(self.current, self.old, GradientBalance())


def training(repeats: int) -> Figures:
    """Measure rates and ratios of one epoch."""
    setting = Setting.draw()
    pictures = Pictures(setting.images, setting.labels)
    contiguous = resnet18(CLASSES, WIDTH, "cifar")
    square = torch.randn(_MATRIX, _MATRIX, generator=generator_for(0, "matrix"))
    full = FullGradientReplayLoss
    tasks: dict[str, Callable[[], object]] = {
        "bare": lambda: _bare_epoch(setting),
        "fedkace": lambda: setting.train(setting.balanced()),
        "bf16": lambda: setting.train(setting.balanced(), torch.bfloat16),
        "customary": lambda: customary_epoch(contiguous, pictures),
        "as5": lambda: setting.train(
            full(setting.current, setting.old, GradientBalance(), list(setting.net.parameters()))
        ),
        "matrix": partial(square.mm, square),
    }
    seconds = dict(zip(tasks, interleaved(list(tasks.values()), repeats), strict=True))
    weighted, unweighted = _losses(setting, repeats)
    epoch = statistics.median(seconds["fedkace"])
    samples = CHUNK + BUFFER
    product = 2 * _MATRIX**3 / statistics.median(seconds["matrix"])
    work = step_operations(setting) * samples / BATCH
    return {
        "bare loop, samples per second": _rate(seconds["bare"], samples),
        "local training, samples per second": _rate(seconds["fedkace"], samples),
        "local training in bf16, samples per second": _rate(seconds["bf16"], samples),
        "customary loop, samples per second": _rate(seconds["customary"], samples),
        "local training against bare loop": ratio(seconds["bare"], seconds["fedkace"], ">= 0.97"),
        "local training against customary loop": ratio(seconds["customary"], seconds["fedkace"], ">= 1.3"),
        "the same in bf16": ratio(seconds["customary"], seconds["bf16"], ">= 1.9"),
        "matrix product, GFLOP/s": {"median": product / 1e9},
        "local training, share of the matrix product's rate": {
            "median": work / statistics.median(seconds["fedkace"]) / product,
            "aim": ">= 0.80",
        },
        "replay weight by output layer, share of an epoch": spread(
            [(more - less) / epoch for more, less in zip(weighted, unweighted, strict=True)], "<= 0.02"
        ),
        "replay weight by full model (as5), epochs of the default": ratio(seconds["as5"], seconds["fedkace"]),
    }


def _losses(setting: Setting, repeats: int) -> list[list[float]]:
    """Time an epoch's losses, with and without the replay weight's gradients, on given outputs without a network.

    The machine's noise would hide the difference between two whole epochs.
    """
    steps = -(-(CHUNK + BUFFER) // BATCH)
    generator = generator_for(0, "outputs")
    features = torch.randn(BATCH, setting.net.output.in_features, generator=generator)
    logits = torch.randn(BATCH, CLASSES, generator=generator, requires_grad=True)
    places = torch.randperm(CHUNK + BUFFER, generator=generator)[:BATCH]
    batch = Batch(torch.empty(0), setting.labels[places], places >= CHUNK, places)

    def epoch(objective: Objective) -> None:
        objective.begin_epoch(1.0, 1.0)
        for _ in range(steps):
            torch.autograd.backward(objective.loss(logits, features, batch))
        objective.end_epoch()

    plain = TaskLoss(setting.current, setting.old)
    return interleaved([lambda: epoch(setting.balanced()), lambda: epoch(plain)], 4 * repeats)


class Pictures(Dataset[tuple[Tensor, int]]):
    """PIL images with torchvision's transforms, as tutorials load them.

    Parameters
    ----------
    images, labels : Tensor
        uint8 (n, 3, H, W) and int64 (n,).
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        transforms = import_torchvision().transforms
        self._pictures = [Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()) for image in images]
        self._labels = labels.tolist()
        self._transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(self._pictures[index]), self._labels[index]


def customary_epoch(net: nn.Module, pictures: Pictures) -> None:
    """Train one epoch as a tutorial does: with a DataLoader, contiguous tensors and eager fp32."""
    optimiser = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.001)
    net.train()
    for images, labels in DataLoader(pictures, batch_size=BATCH, shuffle=True, generator=generator_for(0, "customary")):
        optimiser.zero_grad()
        loss = functional.cross_entropy(net(images), labels)
        torch.autograd.backward(loss)
        optimiser.step()


def step_operations(setting: Setting) -> int:
    """Count the floating-point operations of one training step with PyTorch: two for each multiply-add."""
    images = setting.preprocess(setting.images[:BATCH])
    setting.net.train()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(functional.cross_entropy(setting.net(images), setting.labels[:BATCH]))
    return int(counter.get_total_flops())


def _bare_epoch(setting: Setting) -> None:
    """Train one epoch at minimal cost: on the same images, normalised in advance."""
    net, inputs = setting.net, setting.preprocess(setting.images)
    net.precision = torch.float32
    net.train()
    optimiser = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.001, fused=True)
    for images, truth in zip(torch.split(inputs, BATCH), torch.split(setting.labels, BATCH), strict=True):
        loss = functional.cross_entropy(net(images), truth)
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimiser.step()


def _rate(seconds: list[float], samples: int) -> dict[str, Any]:
    return spread([samples / value for value in seconds])
