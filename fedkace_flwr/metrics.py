"""Accuracy, average accuracy and regret (paper, section 5.1)."""

from collections.abc import Sequence

from torch import Tensor


def accuracy(logits: Tensor, labels: Tensor, mask: Tensor) -> float:
    """Share of samples whose largest logit among the allowed classes is the label's.

    Parameters
    ----------
    logits : Tensor
        Float (N, C), N >= 1.
    labels : Tensor
        int64 (N,).
    mask : Tensor
        bool (C,).
    """
    predicted = logits.masked_fill(~mask, -float("inf")).argmax(dim=1)
    return float((predicted == labels).double().mean())


def true_class_probability(logits: Tensor, labels: Tensor, mask: Tensor) -> float:
    """Mean probability of the label's class, softmax over the allowed classes; arguments as in :func:`accuracy`."""
    probability = logits.double().masked_fill(~mask, -float("inf")).softmax(dim=1)
    return float(probability.gather(1, labels.unsqueeze(1)).mean())


def average_accuracy(accuracies: Sequence[float]) -> float:
    """AA: mean of ACC_t over rounds.

    Raises
    ------
    ValueError
        No round at all.
    """
    if not accuracies:
        raise ValueError("average accuracy needs at least one round")
    return sum(accuracies) / len(accuracies)


def average_regret(reference: Sequence[float], method: Sequence[float]) -> float:
    """AR: mean over rounds of the reference's ACC_t (Centralized) less the method's.

    Raises
    ------
    ValueError
        Differing numbers of rounds, or none.
    """
    if len(reference) != len(method):
        raise ValueError(f"regret needs the same rounds of both, not {len(reference)} and {len(method)}")
    return average_accuracy([upper - own for upper, own in zip(reference, method, strict=True)])
