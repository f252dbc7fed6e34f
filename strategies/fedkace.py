"""The server of FedKACE: plain mean, and who has switched (paper, section 4 and Figure 1)."""

from collections.abc import Iterable
from typing import Any

from flwr.app import Message, MetricRecord

from fedkace_flwr import messages as keys
from strategies.base import ContinualStrategy


class FedKace(ContinualStrategy):
    """theta_g = (1/K) sum of theta_k, as in :class:`ContinualStrategy`; collects the clients' switch decisions.

    Attributes
    ----------
    switched_at : dict of int to int
        Round in which each client that has switched took the global model for inference.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.switched_at: dict[int, int] = {}

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean accuracy, and the share of clients that answer by the global model."""
        metrics = super().aggregate_evaluate(server_round, replies)
        for client, reported in self._report.evaluated.items():
            if keys.SWITCHED_AT in reported:
                self.switched_at[client] = int(reported[keys.SWITCHED_AT])
        if metrics is not None:
            metrics["switched-share"] = len(self.switched_at) / self.clients
        return metrics
