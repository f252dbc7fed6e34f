"""Losses between a student's and a teacher's logits.

Pure tensor mathematics. Shapes: B samples of a batch, n samples in all, C classes. The teacher is constant. Both
sides use the same classes; excluded classes have a probability of exactly 0 (no infinity is subtracted from infinity).
"""

import torch
from torch import Tensor

from fedkace_flwr.training.losses import Batch, TaskLoss, masked_cross_entropy


def soft_cross_entropy(student: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of softmax(student / T) under softmax(teacher / T), averaged over the batch.

    Parameters
    ----------
    student, teacher : Tensor
        Float logits (B, C).
    mask : Tensor
        bool (C,), or int64 (c,) with their numbers: the included classes; at least one.
    temperature : float
        T; the result is not multiplied by T^2.

    Returns
    -------
    Tensor
        Scalar; at student == teacher it is the teacher's mean entropy, and its gradient is 0.
    """
    target = (teacher.detach()[:, mask] / temperature).softmax(dim=1)
    return -(target * (student[:, mask] / temperature).log_softmax(dim=1)).sum(dim=1).mean()


def softened_divergence(student: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) of each sample, over the sample's own classes.

    Parameters
    ----------
    student, teacher : Tensor
        Float logits (B, C).
    mask : Tensor
        bool (C,) or (B, C): the included classes; at least one per sample.
    temperature : float
        T.

    Returns
    -------
    Tensor
        (B,), at least 0; 0 if student and teacher agree up to a constant.
    """
    lowest = torch.finfo(student.dtype).min
    target = (teacher.detach() / temperature).masked_fill(~mask, lowest).log_softmax(dim=1)
    given = (student / temperature).masked_fill(~mask, lowest).log_softmax(dim=1)
    # Outside the mask both logarithms are large but finite, and the target's probability is exactly 0.
    difference = (target - given).masked_fill(~mask, 0.0)
    return temperature**2 * (target.exp() * difference).sum(dim=1)


class DistillationLoss(TaskLoss):
    """Cross-entropy over all classes met, plus lambda times soft cross-entropy from a teacher over some of them.

    Parameters
    ----------
    seen, distilled : Tensor
        bool (C,): C_<=t, and the classes that are distilled, at least one.
    teacher : Tensor
        Float (n, C): the teacher's logits of the chunk's samples, in their order; constant.
    weight : float
        lambda.
    temperature : float
        Divides the logits of both sides.
    """

    def __init__(self, seen: Tensor, distilled: Tensor, teacher: Tensor, weight: float, temperature: float) -> None:
        super().__init__(seen, seen)
        self._distilled = distilled.nonzero().squeeze(1)  # found now, since finding them in a step waits for the device
        self._teacher = teacher
        self._weight = weight
        self._temperature = temperature

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Mean over the batch."""
        learned = self._teacher[batch.positions]
        forgotten = soft_cross_entropy(logits, learned, self._distilled, self._temperature)
        return super().loss(logits, features, batch) + self._weight * forgotten


class DistilledLoss:
    """Label loss; with a teacher, weight * label loss + (1 - weight) * softened divergence.

    Parameters
    ----------
    masks : Tensor
        bool (n, C): the classes of each sample.
    teacher : Tensor, optional
        Float logits (n, C).
    weight : float
        Of the label loss, in [0, 1].
    temperature : float
        T.
    """

    def __init__(self, masks: Tensor, teacher: Tensor | None, *, weight: float, temperature: float) -> None:
        self._masks = masks
        self._teacher = teacher if weight < 1 else None
        self._weight, self._temperature = weight, temperature

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        """Nothing to prepare."""

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Mean over the batch; each sample over its own classes."""
        mask = self._masks[batch.positions]
        label_loss = masked_cross_entropy(batch.adjusted(logits), batch.labels, mask)[0].mean()
        if self._teacher is None:
            return label_loss
        divergence = softened_divergence(logits, self._teacher[batch.positions], mask, self._temperature)
        return self._weight * label_loss + (1 - self._weight) * divergence.mean()

    def end_epoch(self) -> None:
        """Nothing to conclude."""
