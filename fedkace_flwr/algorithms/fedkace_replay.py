"""Responsive gradient-balanced replay (paper, section 4.2).

Pure tensor mathematics. Shapes: B samples of a batch, C classes, F features.

The weight of the replay loss in an epoch is the ratio of two squared gradient norms at the output layer h, measured
in the previous epoch. The gradient of the cross-entropy with respect to h needs no backward pass: it is the
transposed residual (softmax - one-hot) times the features.
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
        Float (B, C) and (B, F). If a column of ones is appended to ``features``, the last column of the result is
        the gradient of the bias.
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

    Sums stay on the gradients' device and are changed in place; they are read once an epoch.

    Parameters
    ----------
    gradient_norm : {"sum", "mean"}
        Compare gradients of losses summed over each set, or averaged per sample.
    lambda_max : float
        The ratio is clipped to [0, lambda_max].
    task_size, replay_size : int
        Number of samples of chunk and buffer, for ``"mean"``.

    Attributes
    ----------
    weight : float
        The current weight; 1 before the first epoch.
    skipped : int
        Epochs whose ratio was not finite, which left the weight unchanged.
    """

    unread_by_steps = ("_scale", "lambda_max", "skipped", "weight")  # they are read and changed between epochs

    def __init__(
        self, gradient_norm: str = "sum", lambda_max: float = 1e4, *, task_size: int = 1, replay_size: int = 1
    ) -> None:
        self.lambda_max = lambda_max
        self.weight = 1.0
        self.skipped = 0
        self._scale = (task_size / replay_size) ** 2 if gradient_norm == "mean" else 1.0
        self._task, self._replay = _Total(), _Total()

    def observe(self, task: Tensor | None = None, replay: Tensor | None = None) -> None:
        """Add one batch's gradients, each of the loss summed over the batch's samples of that side.

        Parameters
        ----------
        task, replay : Tensor, optional
            All of one shape; None if the batch has no sample of that side.
        """
        for total, gradient in ((self._task, task), (self._replay, replay)):
            if gradient is not None:
                total.add(gradient.detach())

    def next_weight(self) -> float:
        """Close the epoch and return the weight of the next one.

        Gradients are averaged before norms are taken. Both running averages cover the same batches, so the ratio of
        their norms is the ratio of the totals' norms. An epoch without samples of a side leaves the weight unchanged.
        """
        if self._task.is_observed and self._replay.is_observed:
            task, replay = self._task.squared_norm(), self._replay.squared_norm()
            ratio = self._scale * replay / task if task > 0 else math.inf
            if math.isfinite(ratio):
                self.weight = min(ratio, self.lambda_max)
            else:
                self.skipped += 1
        self._task.clear()
        self._replay.clear()
        return self.weight


class _Total:
    """A sum of gradients over an epoch, in tensors that stay in place from the first gradient on."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        if self._sum is None or self._count is None:
            self._sum = torch.zeros_like(gradient)
            self._count = torch.zeros((), dtype=torch.int64, device=gradient.device)
        self._sum.add_(gradient)
        self._count.add_(1)

    @property
    def is_observed(self) -> bool:
        return self._count is not None and int(self._count) > 0

    def squared_norm(self) -> float:
        assert self._sum is not None
        return float(self._sum.double().square().sum())

    def clear(self) -> None:
        if self._sum is not None and self._count is not None:
            self._sum.zero_()
            self._count.zero_()


def with_bias_column(features: Tensor) -> Tensor:
    """Append a column of ones to features (..., F); the output layer's gradient then includes the bias."""
    return torch.cat([features, features.new_ones(*features.shape[:-1], 1)], dim=-1)
