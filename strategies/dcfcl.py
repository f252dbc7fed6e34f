"""The server of DCFCL: clients form coalitions, each coalition averages (Yang et al., NeurIPS 2025)."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedkace_flwr.algorithms.dcfcl_coalitions import CoalitionGame, Formation, form_coalitions, gram_matrix
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.records import Reply
from fedkace_flwr.methods.dcfcl import DcfclKeys
from fedkace_flwr.rounds import client_models as models
from fedkace_flwr.rounds.aggregation import client_drift
from fedkace_flwr.rounds.vetting import TRAINING
from strategies.fedavg import FedAvg

logger = logging.getLogger(__name__)


class Dcfcl(FedAvg):
    """No global model: who moves alike averages together, by the game of :mod:`fedkace_flwr.algorithms.dcfcl_coalitions`.

    The report's drift is the mean squared distance of the clients' models from their coalition's mean. The mean
    over all clients is passed on for the record and sent to nobody.

    Each round's record holds the ``coalitions`` of the clients with a valid reply.

    Inferred: the common start of all clients; batch-norm statistics averaged like parameters
    (``dcfcl-batch-norm``; ``local`` is the published code's); which coalitions are considered
    (``dcfcl-candidates``; the paper considers all and has runs of 50 clients, for which it cannot have); a client
    without a valid reply keeps its model, its companions stay together, and it comes back alone.

    Attributes
    ----------
    models : dict of int to ArrayRecord
        What each client was or will be sent; complete from the first round on.
    partition : tuple of tuple of int
        The last coalitions, by client number. With ``models``, all that a later round depends on.
    formation : Formation or None
        The last game, its players being the clients with a valid reply, in ascending order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.models: dict[int, ArrayRecord] = {}
        self.partition: tuple[tuple[int, ...], ...] = ()
        self.formation: Formation | None = None

    def state(self) -> tuple[dict[str, keys.NumpyArray], dict[str, Any]]:
        """Each model once, who holds which, and the coalitions."""
        arrays, held = models.pack(self.models)
        return arrays, {"models": held, "partition": self.partition}

    def restore(self, done: int, arrays: Mapping[str, keys.NumpyArray], record: Mapping[str, Any]) -> None:
        """Undo :meth:`state`."""
        super().restore(done, arrays, record)
        self.models = models.unpack(arrays, record["models"])
        self.partition = tuple(tuple(coalition) for coalition in record["partition"])

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Each client's own model; in the first round the common start."""
        for client in range(self.clients):
            self.models.setdefault(client, arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def model_for(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        """The mean of the client's coalition."""
        return self.models[client]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Form the coalitions, average within each; None, and all as it was, where all clients sat the round out.

        Raises
        ------
        RunError
            Too few valid replies for the quorum.
        """
        trained = self._read(TRAINING, replies, self._shapes)
        self._report.trained = {reply.client: reply.metrics for reply in trained}
        if not trained:
            self._report.own["coalitions"] = []
            return None, None
        self.formation = self._form(trained)
        coalitions = [[trained[player] for player in players] for players in self.formation.partition]
        self.partition = tuple(tuple(reply.client for reply in coalition) for coalition in coalitions)
        self._report.own["coalitions"] = [list(coalition) for coalition in self.partition]
        self._report.drift = sum(self._average(coalition) for coalition in coalitions) / len(trained)
        logger.info(
            "round %d: coalitions %s after %d passes, mean benefit %.3f",
            server_round,
            " ".join("{" + ",".join(map(str, coalition)) + "}" for coalition in self.partition),
            self.formation.passes,
            self.formation.benefits.mean(),
        )
        return keys.array_record(self._mean(trained)), None

    def _form(self, trained: Sequence[Reply]) -> Formation:
        """Play the game of the clients that replied, from what is left of the last partition."""
        weights = [reply.weights for reply in trained]
        sent = [keys.unpack(self.models[reply.client]) for reply in trained]
        game = CoalitionGame(
            updates=gram_matrix(weights, self._parameters, sent),
            models=gram_matrix(weights, self._parameters),
            sizes=np.array([self.weight(reply) for reply in trained]),
            epsilon=self.config.of(DcfclKeys).dcfcl_epsilon,
        )
        player = {reply.client: index for index, reply in enumerate(trained)}
        start = [[player[client] for client in coalition if client in player] for coalition in self.partition]
        alone = set(player.values()).difference(*start)
        together = [coalition for coalition in start if coalition]
        return form_coalitions(
            game.benefit, together + [[p] for p in alone], self.config.of(DcfclKeys).dcfcl_candidates
        )

    def _average(self, coalition: Sequence[Reply]) -> float:
        """Give a coalition's members its mean; the sum of their squared distances from it."""
        mean = self._mean(coalition)
        record = keys.array_record(mean)
        own = set(self._shapes) - self._parameters if self.config.of(DcfclKeys).dcfcl_batch_norm == "local" else set()
        for reply in coalition:
            kept = {name: reply.weights[name] for name in own}
            self.models[reply.client] = keys.array_record({**mean, **kept}) if kept else record
        return client_drift([reply.weights for reply in coalition], mean, self._parameters) * len(coalition)

    def _mean(self, replies: Sequence[Reply]) -> keys.Weights:
        """As federated averaging does it; who is alone keeps its own bits."""
        if len(replies) == 1:
            return replies[0].weights
        return self.merge(replies)
