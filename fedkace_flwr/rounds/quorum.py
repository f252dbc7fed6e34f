"""Quorum of a phase: stop, skip or retry when too few clients give a valid reply."""

import math
from collections.abc import Sequence

from fedkace_flwr.errors import RunError
from fedkace_flwr.keys import word_of
from fedkace_flwr.messaging.records import Reply
from fedkace_flwr.sections import RunConfig


class BelowQuorumError(RunError):
    """Fewer valid replies than the quorum.

    Attributes
    ----------
    phase : str
        Name of the phase.
    valid : sequence of Reply
        The valid replies.
    """

    def __init__(self, text: str, phase: str, valid: Sequence[Reply]) -> None:
        super().__init__(text)
        self.phase = phase
        self.valid = valid


class Quorum:
    """Counts consecutive shortfalls; keys ``quorum`` and ``below-quorum``.

    Parameters
    ----------
    settings : RunConfig
        The run's keys.
    clients : int
        K.
    """

    def __init__(self, settings: RunConfig, clients: int) -> None:
        self._rule, numbers = word_of(settings, "below_quorum")
        self._limit = int(numbers.get("limit", 0))
        self._in_a_row = 0
        self._clients = clients
        self.share = settings.quorum

    @property
    def least(self) -> int:
        """Smallest sufficient number of valid replies in a phase that asks all clients."""
        return math.ceil(self.share * self._clients)

    @property
    def skips(self) -> bool:
        """Whether a phase below the quorum is skipped."""
        return self._rule == "skip"

    @property
    def repeats(self) -> bool:
        """Whether a phase below the quorum is retried."""
        return self._rule == "repeat"

    def met(self) -> None:
        """Reset the count."""
        self._in_a_row = 0

    def short(self, shortfall: BelowQuorumError) -> None:
        """Count one more round (``skip``) or attempt (``repeat``) below the quorum.

        Raises
        ------
        RunError
            The run ends: at once with ``stop``, otherwise when the limit is reached.
        """
        if self._rule == "stop":
            raise shortfall
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            what = "rounds" if self._rule == "skip" else "attempts"
            raise RunError(
                f"{shortfall}; below-quorum = {self._rule}:{self._limit}, so many consecutive {what} reached: "
                "finished rounds are kept, the same command with resume = true goes on"
            ) from shortfall
