"""What a phase does in which too few clients gave a valid reply."""

import math
from collections.abc import Sequence

from fedkace_flwr.errors import RunError
from fedkace_flwr.messaging.records import Reply
from fedkace_flwr.sections import RunConfig


class BelowQuorumError(RunError):
    """Fewer valid replies than the quorum wants.

    Attributes
    ----------
    phase : str
        In which.
    valid : sequence of Reply
        What did come.
    """

    def __init__(self, text: str, phase: str, valid: Sequence[Reply]) -> None:
        super().__init__(text)
        self.phase = phase
        self.valid = valid


class Quorum:
    """Counts what is below the quorum in a row, by the keys ``quorum``, ``below-quorum`` and ``below-quorum-limit``.

    Parameters
    ----------
    settings : RunConfig
        The run's keys.
    clients : int
        K.
    """

    def __init__(self, settings: RunConfig, clients: int) -> None:
        self._limit = settings.below_quorum_limit
        self._rule = settings.below_quorum
        self._in_a_row = 0
        self._clients = clients
        self.share = settings.quorum

    @property
    def least(self) -> int:
        """Valid replies that are enough."""
        return math.ceil(self.share * self._clients)

    @property
    def skips(self) -> bool:
        """Whether a phase that fell short is passed over."""
        return self._rule == "skip"

    @property
    def repeats(self) -> bool:
        """Whether a phase that fell short is asked again."""
        return self._rule == "repeat"

    def met(self) -> None:
        """Begin to count anew."""
        self._in_a_row = 0

    def short(self, shortfall: BelowQuorumError) -> None:
        """Count one more round (``skip``) or asking (``repeat``) that fell short.

        Raises
        ------
        RunError
            The run ends: at once with ``stop``, else when it was the last that is allowed.
        """
        if self._rule == "stop":
            raise shortfall
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            what = "rounds" if self._rule == "skip" else "askings"
            raise RunError(
                f"{shortfall}; below-quorum = {self._rule}, and these were below-quorum-limit = {self._limit} {what} "
                "in a row: what is done is kept; the same command with resume = true goes on"
            ) from shortfall
