"""Whole networks among the tensors of a client's state.

A network is stored as one tensor for each of its weights and statistics, ``KIND.NAME``.
"""

from collections.abc import Mapping

from torch import Tensor

from fedkace_flwr.compute.memory import at_home


def snapshot(kind: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy a network's weights and statistics, named as in its ``state_dict``, to the CPU as ``KIND.NAME``."""
    return {f"{kind}.{name}": tensor.clone() for name, tensor in at_home(weights).items()}


def weights_in(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights and statistics of a :func:`snapshot`, named as in the network's ``state_dict``; empty if there are none."""
    return {name.removeprefix(f"{kind}."): t for name, t in tensors.items() if name.startswith(f"{kind}.")}
