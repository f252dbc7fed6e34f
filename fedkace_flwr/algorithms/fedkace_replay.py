"""Responsive gradient-balanced replay (paper, section 4.2).

Pure tensor mathematics. Shapes: B samples of a batch, C classes, F features.

The weight of the replay loss in an epoch is the ratio of two squared gradient norms at the output layer h
measured in the epoch before. The gradient of the cross-entropy with respect to h needs no backward pass:
it is the residual (softmax - one-hot), transposed, times the features.
"""

import math

import torch
from torch import Tensor

from fedkace_flwr.training.losses import masked_cross_entropy


def output_layer_gradient(logits: Tensor, features: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Gradient of the summed masked cross-entropy with respect to the output layer's weights.

    Parameters
    ----------
    logits, features : Tensor
        Float (B, C) and (B, F). With a column of ones appended to ``features`` the last column of the
        result is the gradient of the bias.
    labels : Tensor
        int64 (B,).
    mask : Tensor
        bool (C,) or (B, C).

    Returns
    -------
    Tensor
        (C, F), summed over samples, zero in the rows of masked classes.
    """
    _, residual = masked_cross_entropy(logits.detach(), labels, mask)
    return residual.T @ features.detach()


class GradientBalance:
    """The replay weight lambda, epoch by epoch (paper, section 4.2).

    Sums stay on the gradients' device; reading them once an epoch is the only synchronisation.

    Parameters
    ----------
    gradient_norm : {"sum", "mean"}
        Compare gradients of the losses summed over each set, or averaged per sample.
    lambda_max : float
        The ratio is clipped to [0, lambda_max].
    task_size, replay_size : int
        Samples of chunk and buffer, by which ``"mean"`` divides.

    Attributes
    ----------
    weight : float
        The present weight; 1 before the first epoch.
    skipped : int
        Epochs whose ratio was not finite, so that the weight stayed as it was.
    """

    def __init__(
        self, gradient_norm: str = "sum", lambda_max: float = 1e4, *, task_size: int = 1, replay_size: int = 1
    ) -> None:
        self.lambda_max = lambda_max
        self.weight = 1.0
        self.skipped = 0
        self._scale = (task_size / replay_size) ** 2 if gradient_norm == "mean" else 1.0
        self._task: Tensor | None = None
        self._replay: Tensor | None = None
        self._held = False

    def hold(self) -> None:
        """Keep the sums in place when an epoch closes.

        A recorded step adds to them without :meth:`observe` being called; from now on every epoch is taken to have
        observed what the first one has.
        """
        self._held = True

    def sums(self) -> list[Tensor]:
        """The running sums, those that there are."""
        return [total for total in (self._task, self._replay) if total is not None]

    def observe(self, task: Tensor | None = None, replay: Tensor | None = None) -> None:
        """Take in one batch's gradients, each of the loss summed over the batch's samples of that side.

        Parameters
        ----------
        task, replay : Tensor, optional
            Of any one shape; None where the batch holds no sample of that side.
        """
        self._task = _added(self._task, task)
        self._replay = _added(self._replay, replay)

    def next_weight(self) -> float:
        """Close the epoch and return the weight of the next one.

        Average first, norm after. Both running averages cover the same batches, so the ratio of their norms
        is the ratio of the totals' norms. An epoch without one of the sides leaves the weight as it was.
        """
        if self._task is not None and self._replay is not None:
            task, replay = (float(total.double().square().sum()) for total in (self._task, self._replay))
            ratio = self._scale * replay / task if task > 0 else math.inf
            if math.isfinite(ratio):
                self.weight = min(ratio, self.lambda_max)
            else:
                self.skipped += 1
        if self._held:
            for total in self.sums():
                total.zero_()
        else:
            self._task = self._replay = None
        return self.weight


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return total
    return gradient.detach().clone() if total is None else total.add_(gradient.detach())


def with_bias_column(features: Tensor) -> Tensor:
    """Append a column of ones to features (..., F), so that the bias takes part in the output layer's gradient."""
    return torch.cat([features, features.new_ones(*features.shape[:-1], 1)], dim=-1)
