"""What the server knows of a round once it is over."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedkace_flwr.rounds.exchange import Exchange


@dataclass
class RoundReport:
    """What the server knows of a round once it is over.

    Attributes
    ----------
    number : int
        t, from 1.
    trained, evaluated : dict of int to dict
        Each client's metrics of the two phases.
    drift : float or None
        Client drift, (1/K) sum of squared distances of the local models from the global one.
    failures : list of dict
        Client, phase, reason and kind of each reply that did not count. Kinds are those of
        :class:`fedkace_flwr.errors.MessageError`, and ``absent`` (no SuperNode), ``silent`` (no reply in time) and
        ``unreadable`` (Flower could not unpack it).
    sat_out : list of int
        Clients that had nothing new to train on; no failures.
    below_quorum : list of str
        Phases that fell below the quorum and were skipped.
    repeated : dict of str to int
        How often a phase was asked again for that reason.
    exchanges : dict of str to Exchange
        What each phase cost.
    own : dict of str to object
        What the method alone has to tell of the round, JSON-ready; further fields of the record.
    seconds : float
        The whole round.
    """

    number: int
    trained: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    evaluated: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    drift: float | None = None
    failures: list[dict[str, Any]] = field(default_factory=list)
    sat_out: list[int] = field(default_factory=list)
    below_quorum: list[str] = field(default_factory=list)
    repeated: dict[str, int] = field(default_factory=dict)
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def unusual(self) -> dict[str, Any]:
        """Fields of the record that only a round has in which something was out of the ordinary."""
        fields = {"sat_out": self.sat_out, "below_quorum": self.below_quorum, "repeated": self.repeated}
        return {name: value for name, value in fields.items() if value}
