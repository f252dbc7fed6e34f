"""Watches a run's quality, and says when something is wrong."""

from dataclasses import dataclass


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
