"""Adaptive inference switching: from the local to the global model, once (paper, section 4.1)."""

from collections.abc import Iterable
from itertools import pairwise


class InferenceSwitch:
    """Decides from when on the global model answers for a client.

    The gap is max(0, ACC - PROB): the global model's accuracy on the buffer minus its mean probability of the true
    class. The client switches permanently at the first round at whose end the gap has shrunk ``patience`` times in a
    row.

    Parameters
    ----------
    patience : int
        Consecutive decreases needed; 2 in the paper, so round 3 is the earliest.
    gaps : iterable of float
        Earlier gaps, to continue from a stored state.
    switched_at : int, optional
        The round of the switch, if it has happened.

    Attributes
    ----------
    gaps : list of float
        One per observed round.
    switched_at : int or None
        1-based round of the switch.
    """

    def __init__(self, patience: int = 2, *, gaps: Iterable[float] = (), switched_at: int | None = None) -> None:
        self.patience = patience
        self.gaps = list(gaps)
        self.switched_at = switched_at

    def observe(self, accuracy: float, probability: float, *, round_number: int | None = None) -> bool:
        """Process one round's ACC and PROB, each in [0, 1]; do nothing after the switch.

        Parameters
        ----------
        accuracy, probability : float
            Of the global model on the buffer.
        round_number : int, optional
            The round, 1-based; by default the number of observations so far.

        Returns
        -------
        bool
            Whether the global model answers from this round on.
        """
        if self.switched_at is None:
            self.gaps.append(max(0.0, accuracy - probability))
            latest = self.gaps[-self.patience - 1 :]
            shrinks = all(after < before for before, after in pairwise(latest))
            if len(latest) == self.patience + 1 and shrinks:
                self.switched_at = round_number if round_number is not None else len(self.gaps)
        return self.switched_at is not None
