"""Networks for arrays of numbers: tables and series.

Their layers are convolutions of maps with one column, so that all that knows the layers of networks for pictures, as
gradients of samples and methods that divide convolutions, knows theirs. Shapes: B batch, C classes, F features.
"""

from typing import ClassVar, cast

from torch import Tensor, nn

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.networks.network import Blueprint, Chain


class Mlp(Chain):
    """Two hidden layers of 4 x ``width`` units, for samples of any shape, which are flattened.

    Width 50 is the network "2NN" of McMahan et al. (2017, section 3); F = 4 x ``width``.

    Parameters
    ----------
    blueprint : Blueprint
        Of any shape.

    Raises
    ------
    ConfigError
        The stem is ``imagenet``.
    """

    lower_layers: ClassVar[int] = 3
    layered: ClassVar[bool] = True

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        _check_stem("mlp", blueprint)
        units = 4 * blueprint.width
        self.body = nn.Sequential(
            _AsPixel(),
            nn.Conv2d(blueprint.values, units, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(units, units, 1),
            nn.ReLU(inplace=True),
        )
        self.output = nn.Linear(units, blueprint.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Map float samples (B, ...) to maps of one pixel (B, F, 1, 1)."""
        return cast(Tensor, self.body(x))


class Cnn1d(Chain):
    """Three convolutions along a series with batch normalisation (Wang, Yan and Oates, 2017, "FCN"); F = ``width``.

    They have ``width``, 2 x ``width`` and ``width`` channels, and kernels of 7, 5 and 3 steps, the published ones of 8,
    5 and 3 with a middle. Their maps keep the series' length, and their means are the features. The published network is
    that of width 128.

    Parameters
    ----------
    blueprint : Blueprint
        Of a series (channels, length).

    Raises
    ------
    ConfigError
        The samples are no series, or the stem is ``imagenet``.
    """

    lower_layers: ClassVar[int] = 4
    layered: ClassVar[bool] = True

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        (channels, _), width = blueprint.series, blueprint.width
        _check_stem("cnn1d", blueprint)
        layers: list[nn.Module] = [_AsColumn()]
        for taken, given, kernel in ((channels, width, 7), (width, 2 * width, 5), (2 * width, width, 3)):
            convolution = nn.Conv2d(taken, given, (kernel, 1), padding=(kernel // 2, 0), bias=False)
            layers += [convolution, nn.BatchNorm2d(given), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers)
        self.output = nn.Linear(width, blueprint.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Map float series (B, channels, length) to maps of one column (B, F, length, 1)."""
        return cast(Tensor, self.body(x))


class _AsPixel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :, None, None]


class _AsColumn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(3)


def _check_stem(name: str, blueprint: Blueprint) -> None:
    if blueprint.stem == "imagenet":
        raise ConfigError(f"stem = 'imagenet': with network = {name!r}, which has none, must be auto or cifar")
