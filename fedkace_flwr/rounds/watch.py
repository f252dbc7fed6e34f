"""Watches a run's quality: running means of prequential accuracy for each client and for all, and alarms if one falls."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedkace_flwr.algorithms.page_hinkley import PageHinkley
from fedkace_flwr.messaging import wire

ACCURACY = "accuracy"
"""Kind of the alarms for prequential accuracy that has fallen."""


@dataclass(frozen=True)
class Alarm:
    """Something that an operator should look at.

    Attributes
    ----------
    round : int
        The round in which it was found.
    kind : str
        ``accuracy`` (prequential accuracy has fallen) or ``gate`` (a new global model was held back).
    client : int or None
        The client; None if it concerns all.
    text : str
        What happened, in one line.
    """

    round: int
    kind: str
    client: int | None
    text: str


class Watch:
    """Follows what clients say of each new chunk before they train on it, by :class:`PageHinkley`.

    The stream of all is the mean over the round's clients, weighted by samples. A client that tests nothing in a round
    is left as it is.
    """

    def __init__(self) -> None:
        self._streams: dict[int | None, PageHinkley] = {}

    def take(self, trained: Mapping[int, Mapping[str, Any]]) -> dict[int | None, str]:
        """Take a round's training metrics by client; for each client that needs an alarm, and None for all, the text."""
        found: dict[int | None, tuple[float, int]] = {
            client: (float(metrics[wire.PREQUENTIAL_ACCURACY]), int(metrics[wire.PREQUENTIAL_SAMPLES]))
            for client, metrics in trained.items()
            if metrics.get(wire.PREQUENTIAL_SAMPLES) and wire.PREQUENTIAL_ACCURACY in metrics
        }
        if found:
            count = sum(samples for _, samples in found.values())
            found[None] = sum(accuracy * samples for accuracy, samples in found.values()) / count, count
        texts: dict[int | None, str] = {}
        for who, (accuracy, samples) in found.items():
            stream = self._streams.setdefault(who, PageHinkley())
            if stream.add(accuracy, samples):
                texts[who] = (
                    f"prequential accuracy{'' if who is not None else ' of all clients'} has fallen: "
                    f"{accuracy:.0%} of {samples} new samples in this round, {stream.before:.0%} in the mean before"
                )
        return texts

    def means(self) -> dict[int | None, float]:
        """Running mean of prequential accuracy by client, under None of all; since its last alarm, if it had one."""
        return {client: stream.mean for client, stream in self._streams.items()}

    def state(self) -> list[dict[str, Any]]:
        """What :meth:`restore` takes, JSON-ready."""
        return [{"client": client, **asdict(stream)} for client, stream in self._streams.items()]

    def restore(self, record: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`state` returned."""
        self._streams = {
            each["client"]: PageHinkley(**{name: value for name, value in each.items() if name != "client"})
            for each in record
        }
