"""What the two halves of Centralized share: its keys, and the choice of the rounds that it trains."""

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
    centralized_first: int = key(
        1,
        "Train in each of the first rounds up to this one as well, where the accuracy changes most.",
        unit="rounds",
        low=1,
    )

    def trains(self, round_number: int, rounds: int) -> bool:
        """Return whether a round, from 1, is trained in a run of so many rounds."""
        return (
            round_number <= self.centralized_first
            or (round_number - 1) % self.centralized_every == 0
            or round_number >= rounds
        )

    def anchors(self, round_number: int, rounds: int) -> tuple[int, int]:
        """Return the nearest trained rounds on either side of a round; both are the round itself if it is trained."""
        below = next(number for number in range(round_number, 0, -1) if self.trains(number, rounds))
        above = next(number for number in range(round_number, rounds + 1) if self.trains(number, rounds))
        return below, above


def samples(config: Config, round_number: int) -> int:
    """Count the samples of an epoch: all chunks so far, or none in a round that is not trained."""
    trained = config.of(CentralizedKeys).trains(round_number, config.stream.rounds)
    return round_number * config.mean_chunk if trained else 0
