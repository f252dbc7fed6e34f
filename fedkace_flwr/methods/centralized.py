"""What the two halves of Centralized share: its key, and the choice of the rounds that it trains."""

from dataclasses import dataclass

from fedkace_flwr.config import Config
from fedkace_flwr.keys import key


@dataclass(frozen=True)
class CentralizedKeys:
    """Centralized."""

    centralized_every: int = key(
        1,
        "Train only in rounds 1, 1 + m, 1 + 2m, ... and the last, where m is the value of this key; accuracies between them are interpolated and marked as such.",
        unit="rounds",
        low=1,
    )


def samples(config: Config, round_number: int) -> int:
    """Count the samples of an epoch: all chunks so far, or none in a round that is not trained."""
    skipped = (round_number - 1) % config.of(CentralizedKeys).centralized_every
    return 0 if skipped and round_number < config.stream.rounds else round_number * config.largest_chunk
