"""What local training minimises: one class per loss, all driven by the one loop in ``training.py``."""

import math
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor


def masked_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy over the classes that the mask leaves, and its derivative by the logits.

    Parameters
    ----------
    logits : Tensor
        Float (B, C), or (..., B, C) for several networks at once, and so with the others.
    labels : Tensor
        int64 (B,); each label must be allowed by the mask.
    mask : Tensor
        bool (C,) or (B, C): the classes that take part in softmax and gradient.

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
        Float (B, 3, H, W), normalised.
    labels : Tensor
        int64 (B,).
    replayed : Tensor
        bool (B,): from the buffer rather than from the chunk.
    positions : Tensor
        int64 (B,): place among the chunk's samples followed by the buffer's.
    """

    images: Tensor
    labels: Tensor
    replayed: Tensor
    positions: Tensor


class Objective(Protocol):
    """A training loss that may learn from an epoch for the next one.

    One that says so by a true ``capturable`` is a :class:`CapturableObjective`.
    """

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        """Hear how often each sample of chunk and buffer will be drawn in the coming epoch; 0: the buffer is empty."""

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Return the scalar loss of a batch; logits (B, C), features (B, F)."""

    def end_epoch(self) -> None:
        """Draw the epoch's conclusions."""


class CapturableObjective(Objective, Protocol):
    """An objective whose loss can be recorded once and played back.

    Each call is the same sequence of tensor operations, which neither wait for the device nor make a tensor of a
    size that only the values tell; whatever changes from epoch to epoch is read from tensors that stay in place. A
    class that overrides ``loss`` says for itself whether it is so.
    """

    capturable: bool

    def hold(self) -> None:
        """From now on keep what steps add up in the same tensors from epoch to epoch."""

    def held(self) -> list[Tensor]:
        """The tensors that steps add to; none before the first step."""


def is_capturable(objective: Objective) -> TypeGuard[CapturableObjective]:
    """Whether an objective says of itself that its loss can be recorded."""
    return bool(getattr(objective, "capturable", False))


class TaskLoss:
    """Mean cross-entropy over allowed classes, one mask for new samples and one for replayed ones.

    Parameters
    ----------
    current, old : Tensor
        bool (C,): classes of the chunk, and of earlier chunks.

    Attributes
    ----------
    masks : Tensor
        bool (2, C): the two.
    capturable : bool
        See :class:`CapturableObjective`.
    """

    capturable = True

    def __init__(self, current: Tensor, old: Tensor) -> None:
        self.masks = torch.stack([current, old])

    def hold(self) -> None:
        """Steps add nothing up."""

    def held(self) -> list[Tensor]:
        """Nothing."""
        return []

    def masks_of(self, batch: Batch) -> Tensor:
        """The mask of each sample, bool (B, C)."""
        return self.masks[batch.replayed.long()]

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        """Nothing to prepare."""

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Mean over the batch."""
        return masked_cross_entropy(logits, batch.labels, self.masks_of(batch))[0].mean()

    def end_epoch(self) -> None:
        """Nothing to conclude."""
