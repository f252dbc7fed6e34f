"""ResNet-18 with a chosen width and stem (paper, section A.3).

Shapes: B batch, H and W image height and width, C classes, F = 8 x width features.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedkace_flwr.errors import ConfigError

_IMAGENET_STEM_FROM = 112
_FEWEST_CHANNELS, _SAFE_CHANNELS, _SAFE_PIXELS = 8, 16, 32


class PointwiseConv2d(nn.Conv2d):
    """A 1x1 convolution with a stride and no bias.

    On a CPU, oneDNN's backward pass of a strided 1x1 convolution in channels-last order writes beyond its buffers if
    there are fewer channels than a vector register holds (PyTorch 2.13): fewer than 8 with AVX2 for any image size,
    and fewer than 16 with AVX-512 for images of 48 pixels or more. The process then crashes or continues with
    corrupted memory. In these cases, the forward pass drops the pixels that the stride skips and then convolves, which
    by definition gives the same result.

    Parameters
    ----------
    inputs, outputs : int
        Number of channels.
    stride : int
        Stride in both directions.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, 1, stride, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, ceil(H / stride), ceil(W / stride))."""
        large = max(input.shape[-2:]) > _SAFE_PIXELS
        if self.in_channels < (_SAFE_CHANNELS if large else _FEWEST_CHANNELS) and input.device.type == "cpu":
            down, across = self.stride
            return functional.conv2d(input[..., ::down, ::across], self.weight)
        return super().forward(input)


class _BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(PointwiseConv2d(inputs, outputs, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y)).add_(self.shortcut(x))
        return functional.relu(y, inplace=True)


class ResNet18(nn.Module):
    """ResNet-18: a feature extractor phi and a linear output layer h (paper, section 3).

    Attributes
    ----------
    output : nn.Linear
        The output layer h, F to C.
    precision : torch.dtype
        Precision of phi's matrix products: float32, or bfloat16 by autocast. Parameters, batch-norm statistics,
        features and the output layer are float32 in both cases.
    """

    precision: torch.dtype = torch.float32

    def __init__(self, num_classes: int, width: int, stem: str) -> None:
        super().__init__()
        if stem == "cifar":
            first: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False)]
            pool: list[nn.Module] = []
        else:
            first = [nn.Conv2d(3, width, 7, 2, 3, bias=False)]
            pool = [nn.MaxPool2d(3, 2, 1)]
        self.stem = nn.Sequential(*first, nn.BatchNorm2d(width), nn.ReLU(inplace=True), *pool)
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            blocks += [_BasicBlock(inputs, outputs, 1 if stage == 0 else 2), _BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.output = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        """Map float images (B, 3, H, W) to features (B, F) in the precision of the parameters, float32."""
        if self.precision is not torch.bfloat16:
            y: Tensor = self.blocks(self.stem(x))
        else:
            with torch.autocast(x.device.type, torch.bfloat16):
                y = self.blocks(self.stem(x))
        return y.to(self.output.weight.dtype).mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Map float images (B, 3, H, W) to logits (B, C)."""
        return cast(Tensor, self.output(self.features(x)))

    def fix_output(self, weight: Tensor) -> None:
        """Replace the output layer by a fixed one, float (C, F), without bias: buffers, which no gradient changes.

        The names in the network's state stay, so that models with a fixed and a learned layer can be exchanged.
        """
        for name, value in (("weight", weight), ("bias", torch.zeros(len(weight)))):
            old = getattr(self.output, name)
            delattr(self.output, name)
            self.output.register_buffer(name, value.to(old))

    @contextmanager
    def computing_in(self, precision: torch.dtype) -> Iterator[None]:
        """Compute in another precision within the context."""
        before, self.precision = self.precision, precision
        try:
            yield
        finally:
            self.precision = before


def largest_map(net: ResNet18, height: int, width: int) -> tuple[int, int, int]:
    """Height, width and channels of the largest map that a network makes of an image of H x W."""
    if not len(net.stem):  # an upper half, which begins with maps of the second stage
        return height, width, net.output.in_features // 4
    first = cast(nn.Conv2d, net.stem[0])
    down, across = first.stride
    return -(-height // down), -(-width // across), first.out_channels


def resnet18(num_classes: int, width: int, stem: str) -> ResNet18:
    """Build a randomly initialised ResNet-18 from PyTorch's global generator.

    Parameters
    ----------
    num_classes : int
        Number of outputs C: always all classes of the data set; each client masks the classes it has not seen.
    width : int
        Number of channels in the first stage; the last stage has 8 times as many.
    stem : {"cifar", "imagenet"}
        3x3 stride 1, or 7x7 stride 2 with max-pooling.

    Raises
    ------
    ConfigError
        The stem is unknown, or there is less than one class or channel.
    """
    if stem not in ("cifar", "imagenet"):
        raise ConfigError(f"stem = {stem!r}: must be cifar or imagenet")
    if num_classes < 1 or width < 1:
        raise ConfigError(f"num-classes = {num_classes}, width = {width}: both must be >= 1")
    return ResNet18(num_classes, width, stem)


def choose_stem(stem: str, image_size: int) -> str:
    """Resolve ``auto``: the ImageNet stem for images of 112 pixels or more."""
    if stem != "auto":
        return stem
    return "imagenet" if image_size >= _IMAGENET_STEM_FROM else "cifar"


def seeded_resnet18(num_classes: int, width: int, stem: str, seed: int) -> ResNet18:
    """Build a ResNet-18 whose initial weights depend only on ``seed``; the global generator's state is preserved."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return resnet18(num_classes, width, stem)


def simplex(classes: int, features: int, generator: torch.Generator) -> Tensor:
    """A simplex equiangular tight frame: unit vectors, every two of which have the cosine -1 / (C - 1).

    Parameters
    ----------
    classes, features : int
        C, at least 2, and F, at least C.
    generator : torch.Generator
        Draws the frame's orientation.

    Returns
    -------
    Tensor
        float32 (C, F): the columns of an orthonormal basis of C dimensions, less their mean, at length 1
        (Papyan et al., PNAS 2020, "Prevalence of neural collapse during the terminal phase of deep learning training").
    """
    basis, _ = torch.linalg.qr(torch.randn(features, classes, generator=generator, dtype=torch.float64))
    return functional.normalize((basis - basis.mean(dim=1, keepdim=True)).T, dim=1).float()


def load_weights(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy named weights into ``net``; every name in its state must be present."""
    net.load_state_dict(dict(weights), strict=True)
