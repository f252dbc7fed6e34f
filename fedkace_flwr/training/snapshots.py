"""Whole networks among the tensors of a client's state.

A network is stored as one tensor for each of its weights and statistics, ``KIND.NAME``.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from fedkace_flwr.compute.memory import at_home
from fedkace_flwr.networks.network import Network, load_weights


def snapshot(kind: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy a network's weights and statistics, named as in its ``state_dict``, to the CPU as ``KIND.NAME``."""
    return {f"{kind}.{name}": tensor.clone() for name, tensor in at_home(weights).items()}


def restored(kind: str, tensors: Mapping[str, Tensor], like: Network) -> Network | None:
    """A new network with the weights of a :func:`snapshot`; None if the tensors hold none of that kind.

    Parameters
    ----------
    kind : str
        The snapshot's kind.
    tensors : mapping of str to Tensor
        The stored tensors; other names are ignored.
    like : Network
        Gives architecture, device and precision; left as it is.
    """
    weights = weights_in(kind, tensors)
    return copied(like, weights) if weights else None


def weights_in(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights and statistics of a :func:`snapshot`, named as in the network's ``state_dict``; empty if there are none."""
    return {name.removeprefix(f"{kind}."): t for name, t in tensors.items() if name.startswith(f"{kind}.")}


def copied(net: Network, weights: Mapping[str, Tensor]) -> Network:
    """A copy of ``net`` that holds these weights and statistics, named as in its ``state_dict``."""
    copy_of = copy.deepcopy(net)
    load_weights(copy_of, weights)
    return copy_of


@torch.no_grad()
def move_halfway(net: Network, other: Network) -> None:
    """Replace each weight and batch-norm statistic of ``net`` by the mean of both networks; keep its counters."""
    for mine, its in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        if mine.is_floating_point():
            mine.lerp_(its, 0.5)
