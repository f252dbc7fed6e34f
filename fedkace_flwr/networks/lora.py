"""Low-rank adapters (Hu et al., ICLR 2022, "LoRA"): a frozen weight W counts as W + BA, of which B and A train.

The sum is taken at each use of a layer's weight, so that every kind of layer, of attention and of convolution works with
it as with a weight of its own, and a merged model computes the same. B starts from 0, A as in the publication's code. The
publication's factor alpha / r is 1.

Shapes: O outputs, I inputs of an output, r the rank, at most the smaller of both.
"""

import math
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.networks.network import Network

DOWN, UP = "_lora_down", "_lora_up"
"""What the names of A, float32 (r, I), and of B, float32 (O, r), add to the weight's."""


def adapt(net: Network, rank: int, generator: torch.Generator) -> None:
    """Give the frozen weights of linear layers, convolutions and attention adapters, in place.

    Parameters
    ----------
    net : Network
        On the CPU. Its frozen weights are buffers; a fixed output layer gets no adapter.
    rank : int
        r.
    generator : torch.Generator
        On the CPU; draws A.

    Raises
    ------
    ConfigError
        Nothing can have an adapter.
    """
    for module in net.modules():
        name = _adaptable(module)
        if name not in module._buffers or module is net.output:
            continue
        weight = module.get_buffer(name)
        outputs, inputs = len(weight), weight[0].numel()
        r = min(rank, outputs, inputs)
        down = torch.empty(r, inputs)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
        module.__class__ = _adapted(type(module), name)
        module.register_parameter(name + DOWN, nn.Parameter(down))
        module.register_parameter(name + UP, nn.Parameter(torch.zeros(outputs, r)))
        net.adapted = True
    if not net.adapted:
        raise ConfigError(
            "trainable = 'lora': the network has no linear layers, convolutions or attention before its output layer; "
            "must be 'all', 'output' or 'norm'"
        )


def adapted(names: Collection[str]) -> frozenset[str]:
    """Those of a state's names that are of a weight with an adapter."""
    return frozenset(name for name in names if name + DOWN in names)


def merged(weights: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of a network without adapters that computes the same; those without adapters as they are."""
    found = {name: array for name, array in weights.items() if not name.endswith((DOWN, UP))}
    for name in adapted(weights.keys()):
        weight, down, up = (torch.from_numpy(weights[each]) for each in (name, name + DOWN, name + UP))
        found[name] = _sum(weight, down, up).numpy()
    return found


def _adaptable(module: nn.Module) -> str:
    """The name of the weight that can have an adapter; empty if there is none."""
    if isinstance(module, nn.MultiheadAttention):
        return "in_proj_weight"
    kinds = isinstance(module, nn.Linear | _ConvNd) and not isinstance(module, _ConvTransposeNd)
    return "weight" if kinds else ""


def _adapted(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """A kind of layer whose weight is the sum, wherever it is read; in its state it stays what it was."""

    def weight(self: nn.Module) -> Tensor:
        own = self._parameters
        down, up = own[name + DOWN], own[name + UP]
        assert down is not None and up is not None
        return _sum(self._buffers[name], down, up)

    return type(kind.__name__, (kind,), {name: property(weight)})


def _sum(weight: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
    assert weight is not None
    return weight + (up @ down).view(weight.shape)
