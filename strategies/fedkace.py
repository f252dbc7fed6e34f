"""The server of FedKACE: plain mean, and who has switched (paper, section 4 and Figure 1)."""

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord

from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods.fedkace import FedKaceKeys
from fedkace_flwr.rounds import client_models as models
from strategies.base import ContinualStrategy


class FedKace(ContinualStrategy):
    """theta_g = (1/K) sum of theta_k, as in :class:`ContinualStrategy`; collects the clients' switch decisions.

    With ``aggregation = "none"`` (ablation LKC, section 5.3) each client is sent its own last model instead.

    Attributes
    ----------
    switched_at : dict of int to int
        Round in which each client that has switched took the global model for inference.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.switched_at: dict[int, int] = {}
        self._own: dict[int, ArrayRecord] = {}

    def state(self) -> tuple[dict[str, keys.NumpyArray], dict[str, Any]]:
        """Who has switched, and without aggregation each client's model."""
        arrays, held = models.pack(self._own)
        return arrays, {"own": held, "switched_at": {str(client): at for client, at in self.switched_at.items()}}

    def restore(self, done: int, arrays: Mapping[str, keys.NumpyArray], record: Mapping[str, Any]) -> None:
        """Undo :meth:`state`."""
        super().restore(done, arrays, record)
        self._own = models.unpack(arrays, record["own"])
        self.switched_at = {int(client): at for client, at in record["switched_at"].items()}

    def model_for(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        """The global model, or the client's own."""
        return self._own.get(client, arrays)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The plain mean; without aggregation, keep each client's model for itself."""
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        if self.config.of(FedKaceKeys).aggregation == "none":
            self._own |= {client: message.content.array_records[keys.ARRAYS] for client, message in self.valid(replies)}
        return result

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean accuracy, and the share of clients that answer by the global model."""
        metrics = super().aggregate_evaluate(server_round, replies)
        for client, reported in self._report.evaluated.items():
            if keys.SWITCHED_AT in reported:
                self.switched_at[client] = int(reported[keys.SWITCHED_AT])
        if metrics is not None:
            metrics["switched-share"] = len(self.switched_at) / self.clients
        return metrics
