"""The server of Centralized: asks each client for its reference, and moves no model (paper, section 5.1)."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from strategies.base import ContinualStrategy


class Centralized(ContinualStrategy):
    """No training phase, and evaluation messages without a model: 0 bytes of weights either way."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing to send."""
        return []

    def phase_clients(self, phase: str) -> set[int]:
        """Nobody trains."""
        return super().phase_clients(phase) if phase == "evaluation" else set()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Nothing to average."""
        return ArrayRecord(), None
