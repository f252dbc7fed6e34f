"""The networks by name: those that come with the package, and those of other packages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from fedkace_flwr import plugins
from fedkace_flwr.errors import ConfigError, FedkaceError, closest
from fedkace_flwr.networks import from_timm, resnet
from fedkace_flwr.networks.arrays import Cnn1d, Mlp
from fedkace_flwr.networks.cnn import TwoLayerCnn
from fedkace_flwr.networks.from_torchvision import EfficientNetB0, MobileNetV3Small, VisionTransformer
from fedkace_flwr.networks.network import Blueprint, Network, ShapeError
from fedkace_flwr.sections.runs import TIMM, ModelConfig

Build = Callable[[Blueprint], Network]
"""Builds a network with random weights from PyTorch's global generator; raises ConfigError if the blueprint does not fit."""

NETWORKS: dict[str, Build] = {
    "resnet18": resnet.built_for,
    "mobilenet-v3-small": MobileNetV3Small,
    "efficientnet-b0": EfficientNetB0,
    "vit": VisionTransformer,
    "cnn": TwoLayerCnn,
    "mlp": Mlp,
    "cnn1d": Cnn1d,
}
"""The networks that come with the package."""

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's pictures in [0, 1], as torchvision's published weights expect them."""


def built(name: str, blueprint: Blueprint) -> Network:
    """Build a network whose weights are drawn from PyTorch's global generator.

    Raises
    ------
    ConfigError
        There is no such network, it does not take such samples, or it cannot be built so.
    """
    try:
        return _built(name, blueprint)
    except ShapeError as fault:
        raise ConfigError(f"network = {name!r}: {fault}") from fault


def _built(name: str, blueprint: Blueprint) -> Network:
    if name in NETWORKS:
        return NETWORKS[name](blueprint)
    if name.startswith(TIMM):
        return from_timm.TimmNetwork(name, blueprint)
    build = plugins.loaded("network", name)
    if build is None:
        known = [*NETWORKS, f"{TIMM}NAME", *plugins.found("network")]
        raise ConfigError(f"network = {name!r}: must be one of {', '.join(known)}{closest(name, known)}")
    if not callable(build):
        raise plugins.broken("network", name, "must be a subclass of Network, or a function that builds one")
    try:
        net = build(blueprint)
    except FedkaceError:
        raise
    except Exception as fault:  # another package's code may raise anything
        raise plugins.broken("network", name, f"cannot be built ({type(fault).__name__}: {fault})") from fault
    if not isinstance(net, Network):
        raise plugins.broken("network", name, f"builds a {type(net).__name__}; must be a Network")
    output = getattr(net, "output", None)
    if not isinstance(output, nn.Linear) or output.out_features != blueprint.num_classes or output.bias is None:
        wanted = f"nn.Linear with a bias and num_classes = {blueprint.num_classes} outputs"
        raise plugins.broken("network", name, f"has output = {output}; must be an {wanted}")
    return net


def _check_state(name: str, net: Network) -> None:
    """Check that the arrays of another package's network can travel, be merged and be loaded."""
    names: dict[int, str] = {}
    for key, tensor in net.state_dict(keep_vars=True).items():
        if not bool(tensor.isfinite().all()):
            raise plugins.broken(
                "network", name, f"has a state with {key!r}, which is not finite; register it with persistent=False"
            )
        if names.setdefault(id(tensor), key) != key:
            both = f"{names[id(tensor)]!r} and {key!r}"
            raise plugins.broken("network", name, f"has one array under two names, {both}; must have one")


def statistics_of(model: ModelConfig) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation that a network was published with, of pictures in [0, 1]; None for the data set's own.

    Raises
    ------
    ConfigError
        timm has no such model, or is not installed.
    """
    if model.of_timm:
        about = from_timm.published(model.network)
        return tuple(about.mean), tuple(about.std)
    return IMAGENET if model.pretrained else None


def seeded(name: str, blueprint: Blueprint, seed: int) -> Network:
    """Build a network whose initial weights depend only on ``seed``; the global generator's state is preserved."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return built(name, blueprint)


@dataclass(frozen=True)
class Facts:
    """What is known of a network without its weights.

    Attributes
    ----------
    features : int
        Number of features F.
    has_running_means : bool
        Whether batch normalisation keeps statistics in its state.
    half : tuple of int or None
        Channels, and the larger side, of the map that its lower half makes of a sample; None if it cannot be split.
    """

    features: int
    has_running_means: bool
    half: tuple[int, int] | None


@lru_cache(maxsize=8)
def facts_of(name: str, blueprint: Blueprint) -> Facts:
    """Build a network for questions about it, try it on a sample, and drop it.

    Raises
    ------
    ConfigError
        As :func:`built`.
    """
    net, half = seeded(name, blueprint, 0).eval(), None
    if name not in NETWORKS and not name.startswith(TIMM):
        _check_state(name, net)
    sample = torch.zeros(1, *blueprint.shape)
    try:
        with torch.inference_mode():
            found = net.features(sample).shape
            maps = net.lower_half()(sample) if net.splits else None
    except Exception as fault:  # another package's code may raise anything
        if name in NETWORKS:
            raise
        if name.startswith(TIMM):
            raise from_timm.unfit(name, blueprint.image_size, f"fails on a picture ({fault})") from fault
        raise plugins.broken("network", name, f"fails on a sample ({type(fault).__name__}: {fault})") from fault
    if found != (1, net.output.in_features):
        if name.startswith(TIMM):
            raise ConfigError(f"network = {name!r}: makes {tuple(found)[1:]} of a picture; must be one that classifies")
        wanted = f"{net.output.in_features}, the inputs of its output"
        raise plugins.broken("network", name, f"makes {tuple(found)[1:]} features of a sample; must be {wanted}")
    if maps is not None:
        half = int(maps.shape[1]), int(max(maps.shape[2:]))
    means = any(each.endswith(".running_mean") for each in net.state_dict())
    return Facts(net.output.in_features, means, half)
