"""ResNet-18 with a chosen width and stem (paper, section A.3).

Shapes: B batch, H and W image height and width, C classes, F = 8 x width features.
"""

import re
from typing import ClassVar, Self, cast

from torch import Tensor, nn
from torch.nn import functional

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.networks.network import Blueprint, Network

_LOWER_BLOCKS = 4
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


class ResNet18(Network):
    """ResNet-18: a feature extractor phi and a linear output layer h (paper, section 3)."""

    splits: ClassVar[bool] = True
    layered: ClassVar[bool] = True

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

    def embed(self, x: Tensor) -> Tensor:
        """Map float images (B, 3, H, W) to maps (B, F, h, w)."""
        return cast(Tensor, self.blocks(self.stem(x)))

    def lower_half(self) -> nn.Sequential:
        """Stem and first two residual stages, which share the network's weights: images to maps (B, 2 x width, h, w)."""
        return nn.Sequential(self.stem, *list(self.blocks)[:_LOWER_BLOCKS])

    def upper_half(self) -> Self:
        """Remove stem and first two stages, in place; the network then maps (B, 2 x width, h, w) to logits (B, C)."""
        self.stem, self.blocks = nn.Sequential(), nn.Sequential(*list(self.blocks)[_LOWER_BLOCKS:])
        return self

    def largest_map(self, *shape: int) -> tuple[int, int, int]:
        """Height, width and channels of the largest map that the network makes of an input (channels, H, W)."""
        _, height, width = shape
        if not len(self.stem):  # an upper half, which begins with maps of the second stage
            return height, width, self.output.in_features // 4
        first = cast(nn.Conv2d, self.stem[0])
        down, across = first.stride
        return -(-height // down), -(-width // across), first.out_channels

    def own_name(self, name: str) -> str | None:
        """The network's name for a tensor of torchvision's ResNet-18, or of its own; None for the output layer."""
        if name.startswith("fc."):
            return None
        for pattern, own in _PUBLISHED:
            name = pattern.sub(own, name)
        return _STAGE.sub(lambda found: f"blocks.{2 * (int(found[1]) - 1) + int(found[2])}.", name)


_PUBLISHED = tuple(
    (re.compile(pattern), own)
    for pattern, own in (
        (r"^conv1\.", "stem.0."),
        (r"^bn1\.", "stem.1."),
        (r"^(layer\d\.\d)\.bn", r"\1.norm"),
        (r"^(layer\d\.\d)\.downsample\.", r"\1.shortcut."),
    )
)
_STAGE = re.compile(r"^layer([1-4])\.([01])\.")


def built_for(blueprint: Blueprint) -> ResNet18:
    """Build a ResNet-18 by its blueprint; as :func:`resnet18`."""
    return resnet18(blueprint.num_classes, blueprint.width, blueprint.first_layers)


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
