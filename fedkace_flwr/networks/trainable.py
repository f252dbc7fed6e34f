"""The part of a network that trains (key ``trainable``): what is frozen becomes buffers, which no gradient changes."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.networks import lora
from fedkace_flwr.networks.network import Network

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class Head(Network):
    """The output layer of another network, which it shares, as a network of features (B, F)."""

    def __init__(self, net: Network) -> None:
        super().__init__()
        self.output = net.output

    def embed(self, x: Tensor) -> Tensor:
        """Features are their own."""
        return x


def head_of(net: Network) -> Head | None:
    """The output layer, if nothing else of a network trains; always the same for the same network."""
    if not net.frozen or any(not name.startswith("output.") for name, _ in net.named_parameters()):
        return None
    head = net.__dict__.get("_head")
    if not isinstance(head, Head) or head.output is not net.output:
        head = net.__dict__["_head"] = Head(net)  # beside the modules: its arrays are the network's already
    return head


def freeze(net: Network, trainable: str, rank: int = 0, generator: torch.Generator | None = None) -> None:
    """Leave a part of a network to training, in place; names and values of its state stay, and adapters join it.

    The output layer trains, unless it is fixed. A layer of which nothing trains computes as in evaluation: a frozen
    batch normalisation neither uses a batch's statistics nor changes its own.

    Parameters
    ----------
    net : Network
        On the CPU; all of it trains.
    trainable : {"all", "output", "norm", "lora"}
        The key.
    rank, generator
        Of adapters, as for :func:`fedkace_flwr.networks.lora.adapt`.

    Raises
    ------
    ConfigError
        The network has no normalisation layers to train, or none that can have adapters.
    """
    if trainable == "all":
        return
    trains = {id(module) for module in net.modules() if trainable == "norm" and isinstance(module, NORMS)}
    if trainable == "norm" and not trains:
        raise ConfigError(
            "trainable = 'norm': the network has no layers of normalisation; must be 'all', 'output' or 'lora'"
        )
    if next(net.output.parameters(), None) is not None:
        trains.add(id(net.output))
    frozen: set[str] = set()
    for path, module in net.named_modules():
        if id(module) in trains:
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
        frozen |= {f"{path}.{name}".lstrip(".") for name, _ in module.named_buffers(recurse=False)}
    net.frozen = frozenset(frozen & net.state_dict().keys())
    if trainable == "lora":
        assert generator is not None
        lora.adapt(net, rank, generator)
