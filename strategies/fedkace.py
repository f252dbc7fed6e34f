"""Server of FedKACE: plain mean, and a record of which clients have switched (paper, section 4 and Figure 1)."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord

from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import NumpyArray, Reply
from fedkace_flwr.rounds import client_models as models
from fedkace_flwr.rounds.server_round import ServerRound
from fedkace_flwr.strategies.base import ServerRule


class FedKace(ServerRule):
    """theta_g = (1/K) sum of theta_k, as in :class:`ServerRule`; records when clients switch.

    Attributes
    ----------
    switched_at : dict of int to int
        Round in which each client that has switched chose the global model for inference.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.switched_at: dict[int, int] = {}

    def evaluated(self, now: ServerRound) -> dict[str, float]:
        """Record which clients have switched, and return the share of clients that predict with the global model."""
        for client, metrics in now.report.evaluated.items():
            if wire.SWITCHED_AT in metrics:
                self.switched_at[client] = int(metrics[wire.SWITCHED_AT])
        return {"switched-share": len(self.switched_at) / now.clients}

    def state(self) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
        """Rounds of the clients' switches."""
        return {}, {"switched_at": {str(client): at for client, at in self.switched_at.items()}}

    def restore(self, arrays: Mapping[str, NumpyArray], record: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.switched_at = {int(client): at for client, at in record["switched_at"].items()}


class Unaggregated(FedKace):
    """Sends each client its own last model instead of the mean (ablation LKC, section 5.3).

    A client that joins a run that has begun starts from the mean.
    """

    aggregates = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._own: dict[int, ArrayRecord] = {}

    def begin_round(self, now: ServerRound, arrays: ArrayRecord) -> None:
        """Start every client of the first round from the initial model, whenever it first trains."""
        for client in range(now.clients):
            self._own.setdefault(client, arrays)

    def model_for(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        """The client's own model."""
        return self._own.get(client, arrays)

    def compare(self, now: ServerRound, replies: Sequence[Reply]) -> list[Reply]:
        """There is nothing to defend, since each model goes back to its own client."""
        return list(replies)

    def trained(self, now: ServerRound, replies: Sequence[Reply]) -> None:
        """Keep each client's model to send it back."""
        self._own |= {reply.client: wire.array_record(reply.weights) for reply in replies}

    def lacks_global_model(self) -> str:
        """There is none."""
        return "without aggregation each client keeps a model of its own"

    def state(self) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
        """The clients' models and switches."""
        arrays, held = models.pack(self._own)
        return arrays, {"own": held, **super().state()[1]}

    def restore(self, arrays: Mapping[str, NumpyArray], record: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        super().restore(arrays, record)
        self._own = models.unpack(arrays, record["own"])
