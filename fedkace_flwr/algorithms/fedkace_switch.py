"""Adaptive inference switching: from the local to the global model, once (paper, section 4.1)."""

from collections.abc import Sequence
from itertools import pairwise


def gap_of(accuracy: float, probability: float) -> float:
    """The gap max(0, ACC - PROB), in [0, 1], between the global model's accuracy on the buffer and its confidence.

    The confidence is the mean probability of the true class.
    """
    return max(0.0, accuracy - probability)


def has_shrunk(gaps: Sequence[float], patience: int = 2) -> bool:
    """Whether the last ``patience`` gaps are each smaller than the one before.

    At the end of the first such round a client switches to the global model for good. ``patience`` is 2 in the paper,
    so round 3 is the earliest.
    """
    latest = gaps[-patience - 1 :]
    return len(latest) == patience + 1 and all(after < before for before, after in pairwise(latest))
