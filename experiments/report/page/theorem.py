"""The measurable part of Theorem 3: the distance between the clients' class proportions.

The theorem bounds the mean regret of the global model minus that of the local model by
``4 (K - 1) / K * Delta_TV(t) - mu / 2 * drift(t)``. All clients share the distribution of images within a class, so
the total variation distance of two clients' data equals that of their class proportions (appendix B.6), which follow
from the configuration. ``drift`` is in the records; the constant ``mu`` is unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from fedkace_flwr.config import Config
from fedkace_flwr.data.readers.catalogue import known_classes
from fedkace_flwr.data.schedules import Schedule, schedule_of
from fedkace_flwr.errors import FedkaceError

Floats = npt.NDArray[np.float64]

_MOST = 10**7
"""Most classes of clients in rounds that are drawn up; a configuration may name any number."""


@dataclass(frozen=True)
class Distances:
    """Total variation distance between the data that pairs of clients have received, by round.

    Attributes
    ----------
    largest, average : sequence of float
        Maximum and mean over all pairs of clients, in [0, 1].
    factor : float
        4 (K - 1) / K, the factor of ``largest`` in the theorem.
    """

    largest: Sequence[float]
    average: Sequence[float]
    factor: float


def proportions(counts: npt.ArrayLike) -> Floats:
    """Return each class's share of a client's data after each round, from the samples of each round, both (T, C)."""
    total = np.asarray(counts, dtype=np.float64).cumsum(axis=0)
    shares: Floats = total / total.sum(axis=1, keepdims=True)
    return shares


def pair_distances(shares: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Return the maximum and mean total variation distance over all pairs of clients, each (T,)."""
    pairs = np.stack([np.abs(one - other).sum(axis=1) / 2 for one, other in combinations(shares, 2)])
    return pairs.max(axis=0), pairs.mean(axis=0)


def schedules_of(config: Config, classes: int | None = None) -> list[Schedule] | None:
    """Return the schedules of all clients; None for inboxes, if they are too many, or if the files would tell the classes.

    Parameters
    ----------
    config : Config
        The run's configuration.
    classes : int, optional
        Number of classes, for data sets whose files determine it.
    """
    if config.data.arrives:
        return None
    try:
        count = config.data.num_classes or known_classes(config.data.source) or classes
        if not count or count * config.stream.clients * config.stream.rounds > _MOST:
            return None
        clients = range(config.stream.clients)
        return [schedule_of(client, config.run.seed, count, config.stream) for client in clients]
    except FedkaceError:
        return None


def distances(config: Config, classes: int | None = None) -> Distances | None:
    """Return the distances of a run's stream; None for a single client or if the classes are unknown."""
    schedules = schedules_of(config, classes)
    if schedules is None or len(schedules) < 2:
        return None
    count = config.data.num_classes or known_classes(config.data.source) or classes or 0
    largest, average = pair_distances([proportions(each.table(count)) for each in schedules])
    clients = config.stream.clients
    return Distances(largest.tolist(), average.tolist(), 4 * (clients - 1) / clients)
