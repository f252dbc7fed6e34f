"""The losses of local training: the protocol that :mod:`fedkace_flwr.training.loop` drives, and the plain loss."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def masked_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy over the classes of a mask, and its derivative with respect to the logits.

    Parameters
    ----------
    logits : Tensor
        Float (B, C), or (..., B, C) for several networks at once; likewise below.
    labels : Tensor
        int64 (B,); each label must be allowed by the mask.
    mask : Tensor
        bool (C,) or (B, C): the classes that softmax and gradient include.

    Returns
    -------
    losses : Tensor
        (B,), with autograd history.
    residual : Tensor
        (B, C), softmax minus one-hot, zero outside the mask; detached.
    """
    log_probability = logits.masked_fill(~mask, -math.inf).log_softmax(dim=-1)
    own = labels.unsqueeze(-1)
    losses = -log_probability.gather(-1, own).squeeze(-1)
    residual = log_probability.detach().exp()
    residual.scatter_add_(-1, own, residual.new_full(own.shape, -1.0))
    return losses, residual


@dataclass(frozen=True)
class Batch:
    """One step's samples.

    Attributes
    ----------
    images : Tensor
        Float (B, ...), normalised: (B, 3, H, W) of pictures.
    labels : Tensor
        int64 (B,).
    replayed : Tensor
        bool (B,): whether the sample is from the buffer rather than the chunk.
    positions : Tensor
        int64 (B,): position among the chunk's samples followed by the buffer's.
    adjustment : Tensor, optional
        Float (C,), added to the logits in label losses (``logit-adjustment``).
    """

    images: Tensor
    labels: Tensor
    replayed: Tensor
    positions: Tensor
    adjustment: Tensor | None = None

    def adjusted(self, logits: Tensor) -> Tensor:
        """Logits (B, C) as a label loss sees them: with the adjustment, if there is one."""
        return logits if self.adjustment is None else logits + self.adjustment


class Objective(Protocol):
    """A training loss that may adapt from one epoch to the next.

    A step may be recorded and replayed (:mod:`fedkace_flwr.training.cuda_graphs`): what changes is in tensors, which are
    changed in place.
    """

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        """Prepare an epoch that draws each sample of chunk and buffer so often on average; 0 for an empty buffer."""

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Return the scalar loss of a batch; logits (B, C), features (B, F)."""

    def end_epoch(self) -> None:
        """Conclude the epoch."""


class TaskLoss:
    """Mean cross-entropy with one mask of classes for new samples and one for replayed samples.

    Parameters
    ----------
    current, old : Tensor
        bool (C,): classes of the chunk, and of earlier chunks.

    Attributes
    ----------
    masks : Tensor
        bool (2, C): both masks.
    """

    def __init__(self, current: Tensor, old: Tensor) -> None:
        self.masks = torch.stack([current, old])

    def masks_of(self, batch: Batch) -> Tensor:
        """The mask of each sample, bool (B, C)."""
        return self.masks[batch.replayed.long()]

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        """Nothing to prepare."""

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Mean over the batch."""
        return masked_cross_entropy(batch.adjusted(logits), batch.labels, self.masks_of(batch))[0].mean()

    def end_epoch(self) -> None:
        """Nothing to conclude."""


class WeightedMeansLoss(TaskLoss):
    """Weighted sum of two mean cross-entropies over the classes met: of replayed and of new samples.

    Parameters
    ----------
    seen : Tensor
        bool (C,): classes that the softmax includes.
    weight_old, weight_new : float
        Weights of the replayed and of the new samples' mean.
    """

    def __init__(self, seen: Tensor, *, weight_old: float, weight_new: float) -> None:
        super().__init__(seen, seen)
        self._weight_old, self._weight_new = weight_old, weight_new

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """The weighted sum; a side without samples in the batch contributes 0."""
        losses, _ = masked_cross_entropy(self.scaled(batch.adjusted(logits)), batch.labels, self.masks_of(batch))
        old = batch.replayed.to(losses.dtype)
        return self._weight_old * _mean(losses, old) + self._weight_new * _mean(losses, 1 - old)

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits, float (B, C), as the softmax takes them."""
        return logits


def _mean(losses: Tensor, members: Tensor) -> Tensor:
    return (losses * members).sum() / members.sum().clamp_min(1)
