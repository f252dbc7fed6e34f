"""What the two halves of Centralized agree on."""

from dataclasses import dataclass

from fedkace_flwr.keys import key


@dataclass(frozen=True)
class CentralizedKeys:
    """Centralized."""

    centralized_every: int = key(
        1,
        "Train at rounds 1, 1 + m, 1 + 2m, ... and the last; values between are interpolated and marked so.",
        unit="rounds",
        low=1,
    )
