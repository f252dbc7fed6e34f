"""The server's report of a round."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedkace_flwr.rounds.exchange import Exchange

TRAINING, EVALUATION = "training", "evaluation"
"""Names of the two phases that every round has."""


@dataclass
class RoundReport:
    """What the server records about a round.

    Attributes
    ----------
    number : int
        Round t, counted from 1.
    asked : tuple of int
        Clients that are to train in this round; none if the method has no training phase.
    trained, evaluated : dict of int to dict
        Each client's metrics in the two phases.
    drift : float or None
        Client drift: (1/K) sum of squared distances between the local models and the global model.
    updates : dict of int to dict
        What the server measured of each client's update: ``update_length``, cosines to the mean of the others'
        (``update_cosine``, and ``running_means_cosine`` if the network has any), the smallest part of a layer that it
        keeps (``retention``), and the number of ``clipped_layers`` if there are any.
    failures : list of dict
        Client, phase, reason and kind of each reply that was rejected. The kinds are those of
        :class:`fedkace_flwr.errors.MessageError`, and ``absent`` (no SuperNode), ``refused`` (Flower did not
        accept the message), ``silent`` (no reply in time) and ``unreadable`` (Flower could not unpack the reply).
    sat_out : list of int
        Clients without new data to train on. This is not a failure.
    below_quorum : list of str
        Phases that were skipped because too few clients replied.
    repeated : dict of str to int
        Number of retries of each phase for the same reason.
    exchanges : dict of str to Exchange
        Bytes and seconds of each phase.
    own : dict of str to object
        Further JSON-ready fields of the record that the method adds.
    seconds : float
        Duration of the whole round.
    """

    number: int
    asked: tuple[int, ...]
    trained: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    evaluated: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    drift: float | None = None
    updates: dict[int, dict[str, float]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    sat_out: list[int] = field(default_factory=list)
    below_quorum: list[str] = field(default_factory=list)
    repeated: dict[str, int] = field(default_factory=dict)
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def reasons(self) -> str:
        """Return the first failures on one line; empty if there are none."""
        return "; ".join(f"client {failure['client']}: {failure['reason']}" for failure in self.failures[:3])

    def unusual(self, clients: int) -> dict[str, Any]:
        """Fields that appear in the record only when they are not empty, and who was asked to train, if not all of K clients."""
        asked = list(self.asked) if len(self.asked) < clients else []
        fields = {"asked": asked, "sat_out": self.sat_out, "below_quorum": self.below_quorum, "repeated": self.repeated}
        return {name: value for name, value in fields.items() if value}

    def compared(self, clients: int) -> dict[str, list[float | None]]:
        """Columns of :attr:`updates` for the record, each with a value for every client; none without comparison."""
        names = sorted({name for measured in self.updates.values() for name in measured})
        return {name: [self.updates.get(client, {}).get(name) for client in range(clients)] for name in names}
