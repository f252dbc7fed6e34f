"""Accuracy, average accuracy and regret (paper, section 5.1)."""

from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST_WEIGHT = 0.01


def accuracy(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> float:
    """Return the share of samples whose largest logit among the allowed classes is that of the label.

    Parameters
    ----------
    logits : Tensor
        Float (N, C), N >= 1.
    labels : Tensor
        int64 (N,).
    mask : Tensor, optional
        bool (C,): the allowed classes; by default all are.
    """
    allowed = logits if mask is None else logits.masked_fill(~mask, -float("inf"))
    predicted = allowed.argmax(dim=1)
    return float((predicted == labels).double().mean())


def class_accuracies(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return :func:`accuracy` on the samples of each class, float64 (C,); NaN for a class without samples.

    Parameters
    ----------
    logits : Tensor
        Float (N, C).
    labels : Tensor
        int64 (N,).
    mask : Tensor
        bool (C,): the allowed classes.
    """
    predicted = logits.masked_fill(~mask, -float("inf")).argmax(dim=1)
    samples = torch.bincount(labels, minlength=len(mask))
    right = torch.bincount(labels[predicted == labels], minlength=len(mask))
    return right.double() / samples


def true_class_probability(logits: Tensor, labels: Tensor, mask: Tensor) -> float:
    """Return the mean softmax probability of the label over the allowed classes; arguments as in :func:`accuracy`."""
    probability = logits.double().masked_fill(~mask, -float("inf")).softmax(dim=1)
    return float(probability.gather(1, labels.unsqueeze(1)).mean())


def fading(round_number: int) -> float:
    """Weight of what helps in the first rounds: 1 in round 1, halved with each further one, 0 once below one percent."""
    weight = 2.0 ** (1 - round_number)
    return weight if weight >= _LEAST_WEIGHT else 0.0


def combined_scores(logits: Sequence[Tensor], mask: Tensor, shares: Sequence[float] = ()) -> Tensor:
    """Return the scores by which several models answer together: the mean of their probabilities.

    Parameters
    ----------
    logits : sequence of Tensor
        Float (N, C), at least one; a single model's are returned as they are.
    mask : Tensor
        bool (C,): the allowed classes; the others have probability 0.
    shares : sequence of float
        The models' weights in the mean, which sum to 1; by default all have the same.
    """
    if len(logits) == 1:
        return logits[0]
    each = torch.stack([one.masked_fill(~mask, -float("inf")).softmax(dim=1) for one in logits])
    if not shares:
        return each.mean(dim=0)
    return (each * torch.tensor(shares, dtype=each.dtype, device=each.device)[:, None, None]).sum(dim=0)


def average_accuracy(accuracies: Sequence[float]) -> float:
    """Return AA, the mean of ACC_t over rounds.

    Raises
    ------
    ValueError
        There are no rounds.
    """
    if not accuracies:
        raise ValueError("average accuracy needs at least one round")
    return sum(accuracies) / len(accuracies)


def average_regret(reference: Sequence[float], method: Sequence[float]) -> float:
    """Return AR, the mean over rounds of the reference's ACC_t (Centralized) minus the method's.

    Raises
    ------
    ValueError
        The numbers of rounds differ, or there are no rounds.
    """
    if len(reference) != len(method):
        raise ValueError(f"regret needs equal numbers of rounds, not {len(reference)} and {len(method)}")
    return average_accuracy([upper - own for upper, own in zip(reference, method, strict=True)])
