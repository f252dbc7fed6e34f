"""FedKACE's training loss: task loss plus lambda times replay loss (paper, section 4.2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkace_flwr.algorithms.fedkace_replay import GradientBalance, with_bias_column
from fedkace_flwr.training.losses import Batch, TaskLoss, masked_cross_entropy


class BalancedReplayLoss(TaskLoss):
    """Task loss plus lambda times replay loss, lambda set by gradient balance (paper, section 4.2).

    Parameters
    ----------
    current, old : Tensor
        As in :class:`TaskLoss`.
    balance : GradientBalance
        Observes the output layer's gradients and determines each epoch's weight.
    gradient_bias : bool
        Whether to include the output layer's bias.

    Attributes
    ----------
    balance : GradientBalance
        The one given.
    weights : list of float
        lambda of each epoch begun so far; the first is 1.
    gradient_bias : bool
        The one given.
    """

    unread_by_steps = ("weights",)  # a step reads the present weight in a tensor

    def __init__(self, current: Tensor, old: Tensor, balance: GradientBalance, *, gradient_bias: bool = False) -> None:
        super().__init__(current, old)
        self.balance = balance
        self.gradient_bias = gradient_bias
        self.weights: list[float] = []
        self._replays = False
        # Weight minus 1, draws of chunk and buffer; changed in place from epoch to epoch.
        self._terms = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64, device=current.device)

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        """Fix the epoch's weight."""
        self.weights.append(self.balance.weight)
        self._replays = replay_draws > 0
        for place, term in enumerate((self.weights[-1] - 1, task_draws, replay_draws)):
            self._terms[place].fill_(term)

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Weighted mean over the batch; the balance observes gradients from the same softmax."""
        losses, residual = masked_cross_entropy(batch.adjusted(logits), batch.labels, self.masks_of(batch))
        replayed = batch.replayed.to(losses.dtype)
        excess, task_draws, replay_draws = self._terms.to(losses.dtype)
        if self._replays:
            self._observe(residual, features.detach(), replayed, task_draws, replay_draws)
        weighted: Tensor = losses * (1 + excess * replayed)
        return weighted.mean()

    def _observe(
        self, residual: Tensor, features: Tensor, replayed: Tensor, task_draws: Tensor, replay_draws: Tensor
    ) -> None:
        # Divided by the draws, an epoch's total is the sum over the set, however often samples were drawn.
        known = with_bias_column(features) if self.gradient_bias else features
        task = (residual * ((1 - replayed) / task_draws).unsqueeze(1)).T @ known
        replay = (residual * (replayed / replay_draws).unsqueeze(1)).T @ known
        self.balance.observe(task=task, replay=replay)

    def end_epoch(self) -> None:
        """Set the next epoch's weight."""
        self.balance.next_weight()


class FullGradientReplayLoss(BalancedReplayLoss):
    """As :class:`BalancedReplayLoss`, with lambda from the gradient of the whole model (ablation AS5, section 5.3).

    Each step takes two more backward passes, one for each side.

    Parameters
    ----------
    current, old, balance
        As in :class:`BalancedReplayLoss`.
    parameters : sequence of Tensor
        All trainable parameters of the network.
    """

    def __init__(self, current: Tensor, old: Tensor, balance: GradientBalance, parameters: Sequence[Tensor]) -> None:
        super().__init__(current, old, balance)
        self._parameters = list(parameters)

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Weighted mean over the batch; the balance observes the gradient of each side separately."""
        losses, _ = masked_cross_entropy(batch.adjusted(logits), batch.labels, self.masks_of(batch))
        replayed = batch.replayed.to(losses.dtype)
        excess, task_draws, replay_draws = self._terms.to(losses.dtype)
        if self._replays:
            task = self._gradient((losses * (1 - replayed)).sum() / task_draws)
            replay = self._gradient((losses * replayed).sum() / replay_draws)
            self.balance.observe(task=task, replay=replay)
        weighted: Tensor = losses * (1 + excess * replayed)
        return weighted.mean()

    def _gradient(self, loss: Tensor) -> Tensor:
        parts = torch.autograd.grad(loss, self._parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])
