"""Rejects updates that keep pointing against those of the other clients.

Clients of a stream have different classes, so their updates are almost perpendicular, but what they have in common is
what the mean learns. A client whose updates point against the others' undoes their progress, however short its updates
are. An honest client may do so in a single round, when its classes compete with theirs, but not round after round.

With many classes and few clients, honest updates may all point slightly against each other, because each client's
classes are none of the others'. The bound is then lowered by the usual cosine.
"""

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from fedkace_flwr.algorithms.robust_aggregation import Floats, cosines_to_others

FEWEST = 4
"""Smallest number of updates that are compared; among three, two honest ones with different classes may be opposed."""

_DECAY = 0.7


class Directions:
    """Compares directions of updates, and remembers each client's.

    A client's standing is an exponential mean, with decay 0.7, of the cosines between its update and the mean of the
    others'. That mean is over updates scaled to equal length, without those already rejected. A round counts once
    :meth:`remember` is called, however often it was attempted.

    Parameters
    ----------
    bound : float
        Smallest cosine that is accepted; -1: nothing is rejected. In a round whose median cosine is negative, the bound
        is lowered by the median, and at most doubled.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._sums: dict[int, tuple[float, float]] = {}  # weighted sum of cosines, and sum of weights
        self._latest: dict[int, float] = {}  # cosines of the latest attempt at a round

    def begin(self) -> None:
        """Begin an attempt at a round: forget the one before, unless it was remembered."""
        self._latest = {}

    def opposed(self, clients: Sequence[int], gram: Floats) -> dict[int, float]:
        """Clients to reject, and each one's cosine when it was rejected.

        A client is rejected if both its cosine and its standing, this round included, are below the bound. The
        farthest is rejected first, and the others are compared anew. More than half of the updates are always kept.

        Parameters
        ----------
        clients : sequence of int
            Each once; of fewer than four none is rejected.
        gram : array
            float64 (m, m), inner products of their updates.
        """
        left, rejected = list(range(len(clients))), dict[int, float]()
        while True:
            cosines = dict(zip(left, cosines_to_others(gram[np.ix_(left, left)]).tolist(), strict=True))
            bound = self._bound + max(self._bound, min(0.0, median(cosines.values())))
            worst = min(left, key=lambda place: self._judged(clients[place], cosines[place]))
            keeps_most = len(left) >= FEWEST and 2 * (len(left) - 1) > len(clients)
            if not keeps_most or self._judged(clients[worst], cosines[worst]) >= bound:
                break
            rejected[clients[worst]] = cosines[worst]
            left.remove(worst)
        self._latest |= {clients[place]: cosine for place, cosine in cosines.items()} | rejected
        return rejected

    def remember(self) -> None:
        """Count the latest attempt in the clients' standings."""
        self._sums |= {client: self._added(client, cosine) for client, cosine in self._latest.items()}
        self._latest = {}

    def state(self) -> dict[str, list[float]]:
        """What later rounds need, JSON-ready."""
        return {str(client): list(sums) for client, sums in self._sums.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue with what :meth:`state` gave."""
        self._sums = {int(client): (total, weight) for client, (total, weight) in state.items()}

    def _added(self, client: int, cosine: float) -> tuple[float, float]:
        total, weight = self._sums.get(client, (0.0, 0.0))
        return _DECAY * total + cosine, _DECAY * weight + 1.0

    def _judged(self, client: int, cosine: float) -> float:
        total, weight = self._added(client, cosine)
        return max(cosine, total / weight)


def equal_starts(starts: Sequence[int]) -> list[list[int]]:
    """Positions of updates that began at the same model, from the identity of each one's start."""
    groups: dict[int, list[int]] = {}
    for position, start in enumerate(starts):
        groups.setdefault(start, []).append(position)
    return list(groups.values())
