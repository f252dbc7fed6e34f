"""Networks that torchvision builds, fitted to small images and without its output layers.

Shapes: B batch, H and W image height and width, C classes, F features.
"""

from functools import partial
from itertools import islice
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.networks.network import Blueprint, Chain, Network

_UNSTRIDED = 2  # layers that keep the resolution with the stem for small images, although published with a stride of 2
_DEPTH, _HEAD, _PATCHES, _SMALLEST_PATCH, _IMAGENET_PATCH = 6, 32, 8, 2, 16


class _Pooled(Chain):
    """Maps, their means, and what follows on the means."""

    hidden: nn.Module

    def embed(self, x: Tensor) -> Tensor:
        """Map float images (B, 3, H, W) to features (B, F)."""
        return cast(Tensor, self.hidden(self.body(x).mean(dim=(2, 3))))


class MobileNetV3Small(_Pooled):
    """MobileNetV3-Small (Howard et al., 2019) whose first layer has ``width`` channels; F = 64 x ``width``.

    Width 16 is the published network. The features are those of its hidden layer. Numbers of channels and features are
    rounded to multiples of 8.

    Parameters
    ----------
    blueprint : Blueprint
        With the stem ``imagenet`` maps shrink to a thirty-second of the image's side, with ``cifar`` to an eighth.

    Raises
    ------
    ConfigError
        The images are smaller than the factor by which maps shrink.
    """

    lower_layers: ClassVar[int] = 4

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        _check_size("mobilenet-v3-small", blueprint)
        # With the published momentum, 0.01, running statistics would need hundreds of steps to follow the weights.
        norm = partial(nn.BatchNorm2d, eps=0.001)
        build = import_torchvision().models.mobilenet_v3_small
        built = build(num_classes=1, width_mult=blueprint.width / 16, norm_layer=norm)
        self.body = _fitted(built.features, blueprint)
        self.hidden = nn.Sequential(*islice(built.classifier, 2))
        self.output = nn.Linear(built.classifier[0].out_features, blueprint.num_classes)

    def own_name(self, name: str) -> str | None:
        """The network's name for a tensor of torchvision's; None for its output layer."""
        return _renamed(name, {"features.": "body.", "classifier.0.": "hidden.0."}, "classifier.3.")


class EfficientNetB0(_Pooled):
    """EfficientNet-B0 (Tan and Le, 2019) whose first layer has ``width`` channels; F = 40 x ``width``.

    Width 32 is the published network, without its random depth and dropout. Numbers of channels and features are
    rounded to multiples of 8.

    Parameters
    ----------
    blueprint : Blueprint
        With the stem ``imagenet`` maps shrink to a thirty-second of the image's side, with ``cifar`` to an eighth.

    Raises
    ------
    ConfigError
        The images are smaller than the factor by which maps shrink.
    """

    lower_layers: ClassVar[int] = 4

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        _check_size("efficientnet-b0", blueprint)
        module = import_torchvision().models.efficientnet
        stage = partial(module.MBConvConfig, width_mult=blueprint.width / 32, depth_mult=1.0)
        stages = [  # the paper's table 1: expansion, kernel, stride, channels in and out, layers
            stage(1, 3, 1, 32, 16, 1),
            stage(6, 3, 2, 16, 24, 2),
            stage(6, 5, 2, 24, 40, 2),
            stage(6, 3, 2, 40, 80, 3),
            stage(6, 5, 1, 80, 112, 3),
            stage(6, 5, 2, 112, 192, 4),
            stage(6, 3, 1, 192, 320, 1),
        ]
        built = module.EfficientNet(stages, dropout=0.0, stochastic_depth_prob=0.0, num_classes=1)
        self.body = _fitted(built.features, blueprint)
        self.hidden = nn.Identity()
        self.output = nn.Linear(built.classifier[1].in_features, blueprint.num_classes)

    def own_name(self, name: str) -> str | None:
        """The network's name for a tensor of torchvision's; None for its output layer."""
        return _renamed(name, {"features.": "body."}, "classifier.")


class VisionTransformer(Network):
    """A small vision transformer (Dosovitskiy et al., 2021) of six layers, without batch normalisation; F = 8 x ``width``.

    The layers have 8 x ``width`` channels, 32 x ``width`` hidden units, and heads of 32 channels where ``width`` is a
    multiple of 4. The lower half makes the tokens and passes them through half of the layers; between the halves they
    are a map of one column, (B, F, tokens, 1).

    Parameters
    ----------
    blueprint : Blueprint
        With the stem ``imagenet`` patches have 16 pixels a side, with ``cifar`` an eighth of the image's side and at
        least 2.

    Raises
    ------
    ConfigError
        The image's side is not a multiple of the patches'.
    """

    splits: ClassVar[bool] = True

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        size, channels = blueprint.image_size, 8 * blueprint.width
        small = max(_SMALLEST_PATCH, size // _PATCHES)
        patch = _IMAGENET_PATCH if blueprint.first_layers == "imagenet" else small
        if size < patch or size % patch:
            raise ConfigError(
                f"image-size = {size}: with network = 'vit' and stem = {blueprint.first_layers!r}, must be a multiple of "
                f"the patches' size, {patch}"
            )
        heads = channels // _HEAD if channels % _HEAD == 0 else 1
        self.body = import_torchvision().models.VisionTransformer(
            size, patch, _DEPTH, heads, channels, 4 * channels, num_classes=1
        )
        self.body.heads = nn.Identity()
        self.output = nn.Linear(channels, blueprint.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Map float images (B, 3, H, W) to features (B, F), those of the class token."""
        return cast(Tensor, self.body(x))

    def lower_half(self) -> nn.Module:
        """Patches, positions and the first layers, which share the network's weights: images to (B, F, tokens, 1)."""
        return _LowerTransformer(self.body)

    def upper_half(self) -> Self:
        """Remove the first layers, in place; the network then maps (B, F, tokens, 1) to logits (B, C)."""
        self.body = _UpperTransformer(self.body)
        return self

    def own_name(self, name: str) -> str | None:
        """The network's name for a tensor of torchvision's; None for its output layer."""
        return _renamed(
            name, {prefix: f"body.{prefix}" for prefix in ("class_token", "conv_proj.", "encoder.")}, "heads."
        )


class _LowerTransformer(nn.Module):
    """The first half of a transformer of torchvision's."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        """Map float images (B, 3, H, W) to tokens (B, F, tokens, 1)."""
        whole = cast(Any, self.whole)
        patches = whole._process_input(x)
        tokens = torch.cat([whole.class_token.expand(len(x), -1, -1), patches], dim=1) + whole.encoder.pos_embedding
        return cast(Tensor, _half_of(whole.encoder.layers, lower=True)(tokens).transpose(1, 2).unsqueeze(3))


class _UpperTransformer(nn.Module):
    """The second half of a transformer of torchvision's."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        encoder = cast(Any, whole).encoder
        self.layers, self.norm = _half_of(encoder.layers, lower=False), encoder.ln

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, F, tokens, 1) to the features (B, F) of the class token."""
        return cast(Tensor, self.norm(self.layers(x.squeeze(3).transpose(1, 2)))[:, 0])


def _half_of(layers: nn.Sequential, *, lower: bool) -> nn.Sequential:
    middle = len(layers) // 2
    return nn.Sequential(*islice(layers, middle) if lower else islice(layers, middle, None))


def _renamed(name: str, own: dict[str, str], output: str) -> str | None:
    if name.startswith(output):
        return None
    found = next((prefix for prefix in own if name.startswith(prefix)), "")
    return own[found] + name.removeprefix(found) if found else name


def _fitted(layers: nn.Sequential, blueprint: Blueprint) -> nn.Sequential:
    """Let the first strided layers keep the resolution of small images."""
    if blueprint.first_layers == "cifar":
        strided = (each for each in layers.modules() if isinstance(each, nn.Conv2d) and each.stride != (1, 1))
        for layer in islice(list(strided), _UNSTRIDED):
            layer.stride = (1, 1)
    return layers


def _check_size(name: str, blueprint: Blueprint) -> None:
    shrinks = 8 if blueprint.first_layers == "cifar" else 32
    if blueprint.image_size < shrinks:
        raise ConfigError(
            f"image-size = {blueprint.image_size}: with network = {name!r} and stem = {blueprint.first_layers!r}, must be "
            f"at least {shrinks}"
        )
