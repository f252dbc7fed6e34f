"""A small convolutional network for devices, without batch normalisation.

Shapes: B batch, H and W image height and width, C classes, F = 16 x width features.
"""

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.networks.network import Blueprint, Chain

_SMALLEST = 4


class TwoLayerCnn(Chain):
    """Two convolutions with max-pooling, and a hidden layer (McMahan et al., 2017, section 3).

    The convolutions are 5x5 and have ``width`` and 2 x ``width`` channels; the hidden layer has 16 x ``width`` units.
    The published network is that of width 32.

    Parameters
    ----------
    blueprint : Blueprint
        The images have at least 4 pixels a side.

    Raises
    ------
    ConfigError
        The images are too small, or the stem is ``imagenet``.
    """

    lower_layers: ClassVar[int] = 3
    layered: ClassVar[bool] = True

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        size, width = blueprint.image_size, blueprint.width
        if size < _SMALLEST:
            raise ConfigError(f"image-size = {size}: with network = 'cnn', must be at least {_SMALLEST}")
        if blueprint.stem == "imagenet":
            raise ConfigError("stem = 'imagenet': with network = 'cnn', which has none, must be auto or cifar")
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        cells = (size // 2 // 2) ** 2
        self.hidden = nn.Sequential(nn.Linear(2 * width * cells, 16 * width), nn.ReLU(inplace=True))
        self.output = nn.Linear(16 * width, blueprint.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Map float images (B, 3, H, W) to features (B, F)."""
        return cast(Tensor, self.hidden(torch.flatten(self.body(x), 1)))
