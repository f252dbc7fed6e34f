"""Weights owned by rounds: the tags of TFCL (TagFed; Wang, Liu and Li, CVPR 2024).

Pure tensor mathematics. Every convolution weight has a tag: 0 if it is free, s > 0 if round s owns it. The sub-model
of round t computes with its own weights and with those of earlier rounds that its pick mask selects; free and later
weights count as 0. Shapes: N weights of a layer, or of all layers concatenated.
"""

import copy
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedkace_flwr.networks.network import Network
from fedkace_flwr.training.optimisers import Adam, Optimiser

FREE = 0
PICK_START, PICK_THRESHOLD = 0.01, 0.005
_PRUNE_EVERY = 2


class _Binarise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pick: Tensor) -> Tensor:
        return (pick > PICK_THRESHOLD).to(pick.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def binarise(pick: Tensor) -> Tensor:
    """1 where the real-valued mask exceeds the threshold, else 0; the backward pass is the identity (straight-through)."""
    picked: Tensor = _Binarise.apply(pick)  # type: ignore[no-untyped-call]
    return picked


def effective_weights(weights: Tensor, tags: Tensor, task: int, picked: Tensor) -> Tensor:
    """The effective weights of a round's sub-model.

    Gradients reach ``weights`` where the tag is ``task``, and ``picked`` where it is between 0 and ``task``.

    Parameters
    ----------
    weights : Tensor
        Float, any shape.
    tags : Tensor
        int16, same shape.
    task : int
        The round.
    picked : Tensor
        Float 0 or 1, same shape; used for weights of earlier rounds only.
    """
    older = (tags > FREE) & (tags < task)
    reused = torch.where(older, weights.detach() * picked, 0.0)
    return torch.where(tags == task, weights, reused)


def quotas(sizes: Sequence[int], rounds: int) -> list[int]:
    """Number of weights of each layer per round: floor(N / rounds), at least 1."""
    return [max(1, size // rounds) for size in sizes]


def ramp(claimed: int, quota: int, share: float) -> int:
    """Number of weights owned after a share in [0, 1] of the pruning epoch: a cubic decay from all to the quota."""
    excess = max(0, claimed - quota)
    return claimed - excess + round(excess * (1 - share) ** 3)


def largest(weights: Tensor, owned: Tensor, count: int) -> Tensor:
    """Keep exactly the ``count`` owned weights of largest magnitude; of equal ones, the first.

    Parameters
    ----------
    weights : Tensor
        Float, any shape.
    owned : Tensor
        bool, same shape; if no more than ``count`` are owned, all are kept.
    count : int
        Number to keep.

    Returns
    -------
    Tensor
        bool, same shape.
    """
    magnitude = torch.where(owned, weights.detach().abs(), -1.0).flatten()
    order = magnitude.argsort(descending=True, stable=True)
    kept = torch.zeros_like(magnitude, dtype=torch.bool)
    kept[order[:count]] = True
    return kept.view(weights.shape) & owned


def pack_bits(bits: Tensor) -> Tensor:
    """Bool (N,) as uint8 (ceil(N / 8),)."""
    return torch.from_numpy(np.packbits(bits.numpy()))


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Undo :func:`pack_bits`; ``count`` is N."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).bool()


def convolutions(net: nn.Module) -> list[nn.Conv2d]:
    """The layers whose weights are tagged, in the order of concatenation."""
    return [module for module in net.modules() if isinstance(module, nn.Conv2d)]


def _others(net: nn.Module) -> list[Tensor]:
    tagged = {id(_stored(layer)) for layer in convolutions(net)}
    state = net.state_dict(keep_vars=True).values()
    return [tensor for tensor in state if tensor.is_floating_point() and id(tensor) not in tagged]


def _stored(layer: nn.Conv2d) -> Tensor:
    """The weights that an optimiser changes, of a layer that is claimed or not; a bias is untagged."""
    if parametrize.is_parametrized(layer, "weight"):
        return cast(Tensor, layer.parametrizations["weight"].original)  # type: ignore[index, union-attr]
    return layer.weight


def read_weights(net: nn.Module) -> tuple[Tensor, Tensor]:
    """Tagged weights (N,) and untagged values (R,), of normalisation and output layer; float32 copies on the CPU."""
    tagged = [layer.weight for layer in convolutions(net)]
    return _joined(tagged), _joined(_others(net))


def write_weights(net: nn.Module, weights: Tensor, others: Tensor) -> None:
    """Undo :func:`read_weights`, in place."""
    _scatter([layer.weight for layer in convolutions(net)], weights)
    _scatter(_others(net), others)


class _ClaimedWeight(nn.Module):
    """One layer's weights during training: maps the stored tensor to the weights of the convolution."""

    def __init__(self, weight: Tensor, tags: Tensor, task: int, pick: Tensor) -> None:
        super().__init__()
        self.task = task
        self.tags = tags.to(weight.device).view(weight.shape)
        self.pick = torch.empty_like(weight).copy_(pick.view(weight.shape)).requires_grad_()
        self._frozen = torch.where(self.tags == task, 0.0, weight.detach())

    def forward(self, weight: Tensor) -> Tensor:
        return effective_weights(weight, self.tags, self.task, binarise(self.pick))

    def restore(self, weight: Tensor) -> None:
        """Undo an optimiser's decay and momentum on weights that this round does not own."""
        weight.copy_(torch.where(self.tags == self.task, weight, self._frozen))

    def prune(self, weight: Tensor, count: int) -> None:
        owned = self.tags == self.task
        self.tags[owned & ~largest(weight, owned, count)] = FREE
        self.restore(weight)


class Claim:
    """A copy of a network in which a round trains its own weights and picks among earlier ones.

    Parameters
    ----------
    net : Network
        Architecture and device; copied.
    weights, others : Tensor
        As from :func:`read_weights`.
    tags : Tensor
        int16 (N,); weights claimed by the round are already tagged ``task``.
    task : int
        The round, from 1.
    pick : Tensor
        Float (N,), the real-valued mask.
    rounds : int
        Number of rounds that share each layer.
    pick_rate : float
        Adam's learning rate for the mask.

    Attributes
    ----------
    net : Network
        The copy. Its parameters do not include the mask.
    pick_optimiser : Adam
        Updates the mask.
    steps : int
        Steps taken so far.
    """

    def __init__(
        self,
        net: Network,
        weights: Tensor,
        others: Tensor,
        tags: Tensor,
        task: int,
        pick: Tensor,
        *,
        rounds: int,
        pick_rate: float,
    ) -> None:
        self.net = copy.deepcopy(net)
        write_weights(self.net, weights, others)
        self._layers = convolutions(self.net)
        sizes = [layer.weight.numel() for layer in self._layers]
        self._quotas = quotas(sizes, rounds)
        parts = zip(self._layers, torch.split(tags, sizes), torch.split(pick, sizes), strict=True)
        self._claims = [_ClaimedWeight(layer.weight, own_tags, task, own_pick) for layer, own_tags, own_pick in parts]
        for layer, claim in zip(self._layers, self._claims, strict=True):
            parametrize.register_parametrization(layer, "weight", claim)
        self._claimed = [int((claim.tags == task).sum()) for claim in self._claims]
        self.pick_optimiser = Adam([claim.pick for claim in self._claims], pick_rate)
        self.steps = 0

    @torch.no_grad()
    def after_step(self, share: float | None) -> None:
        """Finish an optimiser's step on ``net``: update the mask or prune, and restore weights that the round does not own.

        Parameters
        ----------
        share : float, optional
            Share of the pruning epoch that is done; None before it. The mask is fixed while weights are pruned.
        """
        if share is None:
            self.pick_optimiser.step()
        self.pick_optimiser.zero_grad()
        self.steps += 1
        if share is not None and (self.steps % _PRUNE_EVERY == 0 or share == 1):
            self.prune(share)
            return
        for claim, weight in self._with_weights():
            claim.restore(weight)

    @torch.no_grad()
    def prune(self, share: float = 1.0) -> None:
        """Free the smallest weights of each layer, down to the ramp's number."""
        counts = [ramp(claimed, quota, share) for claimed, quota in zip(self._claimed, self._quotas, strict=True)]
        for (claim, weight), count in zip(self._with_weights(), counts, strict=True):
            claim.prune(weight, count)

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weights (N,), untagged values (R,), tags int16 (N,) and mask (N,), on the CPU."""
        tags = torch.cat([claim.tags.flatten() for claim in self._claims]).cpu()
        weights = _joined([weight for _, weight in self._with_weights()])
        return weights, _joined(_others(self.net)), tags, _joined([claim.pick for claim in self._claims])

    def _with_weights(self) -> list[tuple[_ClaimedWeight, Tensor]]:
        return [(claim, _stored(layer)) for claim, layer in zip(self._claims, self._layers, strict=True)]


def read_means(optimiser: Optimiser) -> Tensor:
    """An optimiser's means, float32 (means, P), parameter after parameter, to keep between two halves of a training."""
    kept = [optimiser.memory[parameter] for parameter in optimiser.parameters]
    rows = [_joined([each.means[row] for each in kept]) for row in range(optimiser.means)]
    return torch.stack(rows) if rows else torch.empty(0)


def write_means(optimiser: Optimiser, means: Tensor, steps: int) -> None:
    """Undo :func:`read_means`; ``steps`` have been taken so far."""
    kept = [optimiser.begin(parameter) for parameter in optimiser.parameters]
    for each in kept:
        each.steps.fill_(steps)
    for row, values in enumerate(means):
        _scatter([each.means[row] for each in kept], values)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu().float()


@torch.no_grad()
def _scatter(tensors: Sequence[Tensor], values: Tensor) -> None:
    parts = torch.split(values, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
