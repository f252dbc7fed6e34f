"""What local training minimises: one class per loss, all driven by the one loop in ``training.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedkace_flwr.replay import GradientBalance, masked_cross_entropy, with_bias_column


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
    """A training loss that may learn from an epoch for the next one."""

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        """Hear how often each sample of chunk and buffer will be drawn in the coming epoch; 0: the buffer is empty."""

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Return the scalar loss of a batch; logits (B, C), features (B, F)."""

    def end_epoch(self) -> None:
        """Draw the epoch's conclusions."""


class TaskLoss:
    """Mean cross-entropy over allowed classes, one mask for new samples and one for replayed ones.

    Parameters
    ----------
    current, old : Tensor
        bool (C,): classes of the chunk, and of earlier chunks.
    """

    def __init__(self, current: Tensor, old: Tensor) -> None:
        self._masks = torch.stack([current, old])

    def masks_of(self, batch: Batch) -> Tensor:
        """The mask of each sample, bool (B, C)."""
        return self._masks[batch.replayed.long()]

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        """Nothing to prepare."""

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Mean over the batch."""
        return masked_cross_entropy(logits, batch.labels, self.masks_of(batch))[0].mean()

    def end_epoch(self) -> None:
        """Nothing to conclude."""


class BalancedReplayLoss(TaskLoss):
    """Task loss plus lambda times replay loss, lambda set by gradient balance (paper, section 4.2).

    Parameters
    ----------
    current, old : Tensor
        As in :class:`TaskLoss`.
    balance : GradientBalance
        Observes the output layer's gradients and gives each epoch's weight.
    gradient_bias : bool
        Whether the output layer's bias takes part.

    Attributes
    ----------
    balance : GradientBalance
        The one given.
    weights : list of float
        lambda of each epoch begun so far; the first is 1.
    """

    def __init__(self, current: Tensor, old: Tensor, balance: GradientBalance, *, gradient_bias: bool = False) -> None:
        super().__init__(current, old)
        self.balance = balance
        self._gradient_bias = gradient_bias
        self._draws = (1.0, 1.0)
        self.weights: list[float] = []

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        """Fix the epoch's weight."""
        self._draws = (task_draws, replay_draws)
        self.weights.append(self.balance.weight)

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Weighted mean over the batch; the gradients for the balance come from the same softmax."""
        losses, residual = masked_cross_entropy(logits, batch.labels, self.masks_of(batch))
        replayed = batch.replayed.to(losses.dtype)
        self._observe(residual, features.detach(), replayed)
        return (losses * (1 + (self.weights[-1] - 1) * replayed)).mean()

    def _observe(self, residual: Tensor, features: Tensor, replayed: Tensor) -> None:
        # Dividing by the draws makes an epoch's total the sum over the set, however often its samples came up.
        task_draws, replay_draws = self._draws
        if replay_draws == 0:
            return
        known = with_bias_column(features) if self._gradient_bias else features
        task = (residual * ((1 - replayed) / task_draws).unsqueeze(1)).T @ known
        replay = (residual * (replayed / replay_draws).unsqueeze(1)).T @ known
        self.balance.observe(task=task, replay=replay)

    def end_epoch(self) -> None:
        """Set the next epoch's weight."""
        self.balance.next_weight()


class FullGradientReplayLoss(BalancedReplayLoss):
    """As :class:`BalancedReplayLoss`, with lambda from the gradient of the whole model (ablation AS5, section 5.3).

    Every step with samples of a side costs one more backward pass for that side.

    Parameters
    ----------
    current, old, balance
        As in :class:`BalancedReplayLoss`.
    parameters : sequence of Tensor
        What the gradient is taken by: all trainable parameters of the network.
    """

    def __init__(self, current: Tensor, old: Tensor, balance: GradientBalance, parameters: Sequence[Tensor]) -> None:
        super().__init__(current, old, balance)
        self._parameters = list(parameters)

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Weighted mean over the batch; the two sides' gradients are taken on their own before it is returned."""
        losses, _ = masked_cross_entropy(logits, batch.labels, self.masks_of(batch))
        replayed = batch.replayed.to(losses.dtype)
        task_draws, replay_draws = self._draws
        if replay_draws > 0:
            task = self._gradient((losses * (1 - replayed)).sum() / task_draws)
            replay = self._gradient((losses * replayed).sum() / replay_draws)
            self.balance.observe(task=task, replay=replay)
        return (losses * (1 + (self.weights[-1] - 1) * replayed)).mean()

    def _gradient(self, loss: Tensor) -> Tensor:
        parts = torch.autograd.grad(loss, self._parameters, retain_graph=True)
        return torch.cat([part.flatten() for part in parts])
