"""Server of OFCL: plain mean, or the mean of one model per class (Serra and Buettner, ICLR 2025)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord

from clients.ofcl import CHUNK_CLASSES, OfclKeys
from fedkace_flwr.config import Config
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.records import Reply, Weights
from fedkace_flwr.rounds.aggregation import weighted_mean
from fedkace_flwr.rounds.replies import check_class_counts
from fedkace_flwr.rounds.server_round import ServerRound
from strategies.base import ServerRule


class Ofcl(ServerRule):
    """Plain mean; with ``ofcl-aggregation = "class-mean"`` the rule of the authors' published code.

    For each class of the round's chunks, that rule averages the models of the clients that have it, weighted by their
    samples of the class. It then averages these class models with equal weights, and the result with the previous
    global model. All of this is one weighted mean of models, and is computed as such.

    The rule needs the class counts of every chunk (13 + 8 C bytes up per client): the server learns which classes a
    client meets, how often and when. A reply without counts, or with counts whose sum is not the number of samples
    trained on, is rejected.

    Inferred: the published code also counts the global model among the models of each class; here it enters once.
    Batch-norm statistics are averaged like parameters.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._by_class = config.of(OfclKeys).ofcl_aggregation == "class-mean"
        self._before: Weights = {}

    def begin_round(self, now: ServerRound, arrays: ArrayRecord) -> None:
        """Keep the global model, which makes up half of the next one."""
        if self._by_class:
            self._before = keys.unpack(arrays)

    def check(self, now: ServerRound, reply: Reply) -> None:
        """Check the class counts.

        Raises
        ------
        MessageError
            The counts are missing or impossible.
        """
        if self._by_class:
            counts = reply.metrics.get(CHUNK_CLASSES)
            check_class_counts(CHUNK_CLASSES, counts, now.classes, reply.examples)

    def merge(self, now: ServerRound, replies: Sequence[Reply]) -> Weights:
        """Mean of the local models, or the average of the mean by classes and the previous global model."""
        if not self._by_class:
            return super().merge(now, replies)
        shares = class_mean_weights([reply.metrics[CHUNK_CLASSES] for reply in replies])
        models = [reply.weights for reply in replies]
        if self.config.aggregation.aggregation_rule == "mean":  # in one sum, which is rounded once
            return weighted_mean([*models, self._before], [*shares.tolist(), 1.0])
        return weighted_mean([now.aggregate(models, shares.tolist()), self._before], [1.0, 1.0])


def class_mean_weights(counts: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """Weight of each client's model in the mean of the class models.

    Parameters
    ----------
    counts : sequence of sequence of int
        For each of K clients, its number of samples of each of C classes; at least one sample in total.

    Returns
    -------
    array
        float64 (K,), with sum 1: the client's share of a class's samples, averaged over the classes that any client
        has.
    """
    samples = np.array(counts, dtype=np.float64)
    present = samples[:, samples.sum(axis=0) > 0]
    weights: npt.NDArray[np.float64] = (present / present.sum(axis=0)).mean(axis=1)
    return weights
