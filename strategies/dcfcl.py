"""Server of DCFCL: clients form coalitions, and each coalition averages (Yang et al., NeurIPS 2025)."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedkace_flwr.algorithms.dcfcl_coalitions import CoalitionGame, Formation, form_coalitions
from fedkace_flwr.algorithms.robust_aggregation import gram_matrix
from fedkace_flwr.clients.dcfcl import EPSILON
from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import NumpyArray, Reply, Weights
from fedkace_flwr.rounds import client_models as models
from fedkace_flwr.rounds.server_round import ServerRound
from fedkace_flwr.strategies.base import client_drift
from fedkace_flwr.strategies.fedavg import FedAvg

logger = logging.getLogger(__name__)


class Dcfcl(FedAvg):
    """No global model: clients average within coalitions, which :mod:`fedkace_flwr.algorithms.dcfcl_coalitions` forms.

    The report's drift is the mean squared distance of the clients' models from their coalition's mean. The mean over
    all clients is kept for the record, and sent only to clients that join a run that has begun, as their first model.
    Each round's record holds the ``coalitions`` of the clients with a valid reply.

    Inferred: all clients start from one model; batch-norm statistics are averaged like parameters (in the published
    code each client keeps its own); all coalitions are considered while at most
    :data:`~fedkace_flwr.algorithms.dcfcl_coalitions.LARGEST_EXACT` clients are left in the game, before that those
    near the present ones (the paper considers all of them, which is impossible for its runs with 50 clients); a client
    without a valid reply keeps its model and returns as a coalition of its own, while the other members stay together.

    Attributes
    ----------
    models : dict of int to ArrayRecord
        The model last or next sent to each client that there was when the round began.
    partition : tuple of tuple of int
        The latest coalitions, by client number.
    formation : Formation or None
        The latest game; its players are the clients with a valid reply, in ascending order.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.models: dict[int, ArrayRecord] = {}
        self.partition: tuple[tuple[int, ...], ...] = ()
        self.formation: Formation | None = None
        self._drift = 0.0

    def begin_round(self, now: ServerRound, arrays: ArrayRecord) -> None:
        """Start every client from the common model in the first round."""
        for client in range(now.clients):
            self.models.setdefault(client, arrays)

    def model_for(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        """Mean of the client's coalition; the common model for a client that has come within the round."""
        return self.models.get(client, arrays)

    def merge(self, now: ServerRound, replies: Sequence[Reply]) -> Weights:
        """Form coalitions and average within each; return the mean over all clients."""
        self.formation = self._form(now, replies)
        coalitions = [[replies[player] for player in players] for players in self.formation.partition]
        self.partition = tuple(tuple(reply.client for reply in coalition) for coalition in coalitions)
        self._drift = sum(self._average(now, coalition) for coalition in coalitions) / len(replies)
        logger.info(
            "round %d: coalitions %s after %d passes, mean benefit %.3f",
            now.number,
            " ".join("{" + ",".join(map(str, coalition)) + "}" for coalition in self.partition),
            self.formation.passes,
            self.formation.benefits.mean(),
        )
        return self._mean(now, replies)

    def drift(self, now: ServerRound, replies: Sequence[Reply], merged: Weights) -> float:
        """Mean squared distance of the local models from their coalition's mean."""
        return self._drift

    def trained(self, now: ServerRound, replies: Sequence[Reply]) -> None:
        """Record the coalitions."""
        now.report.own["coalitions"] = [list(coalition) for coalition in self.partition] if replies else []

    def lacks_global_model(self) -> str:
        """There is none that a client predicts with: the mean over all clients is for the record alone."""
        return "each coalition of its clients has a model of its own"

    def state(self) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
        """Each distinct model once, the assignment of models to clients, and the coalitions."""
        arrays, held = models.pack(self.models)
        return arrays, {"models": held, "partition": self.partition}

    def restore(self, arrays: Mapping[str, NumpyArray], record: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.models = models.unpack(arrays, record["models"])
        self.partition = tuple(tuple(coalition) for coalition in record["partition"])

    def _form(self, now: ServerRound, replies: Sequence[Reply]) -> Formation:
        """Play the game among the clients that replied, starting from the remaining members of the latest coalitions."""
        weights = [reply.weights for reply in replies]
        sent = [wire.unpack(self.models[reply.client]) for reply in replies]
        game = CoalitionGame(
            updates=gram_matrix(weights, now.parameters, sent),
            models=gram_matrix(weights, now.parameters),
            sizes=np.array([self.weight(reply) for reply in replies]),
            epsilon=EPSILON,
        )
        player = {reply.client: index for index, reply in enumerate(replies)}
        start = [[player[client] for client in coalition if client in player] for coalition in self.partition]
        alone = set(player.values()).difference(*start)
        together = [coalition for coalition in start if coalition]
        return form_coalitions(game.benefit, together + [[p] for p in alone])

    def _average(self, now: ServerRound, coalition: Sequence[Reply]) -> float:
        """Give a coalition's members their mean, and return the sum of their squared distances from it."""
        mean = self._mean(now, coalition)
        record = wire.array_record(mean)
        self.models |= {reply.client: record for reply in coalition}
        return client_drift([reply.weights for reply in coalition], mean, now.parameters) * len(coalition)

    def _mean(self, now: ServerRound, replies: Sequence[Reply]) -> Weights:
        """Federated average; the model of a single client keeps its exact bits."""
        return replies[0].weights if len(replies) == 1 else super().merge(now, replies)
