"""The server of OFCL: plain mean, or the mean of one model per class (Serra and Buettner, ICLR 2025)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.records import Reply, Weights
from fedkace_flwr.methods.ofcl import OfclKeys
from fedkace_flwr.rounds.aggregation import weighted_mean
from strategies.base import ContinualStrategy


class Ofcl(ContinualStrategy):
    """Plain mean; with ``ofcl-aggregation = "class-mean"`` the rule of the authors' published code.

    That rule averages, for each class of the round's chunks, the models of the clients that have it, each weighing
    by its samples of it; then these models, each class alike; then the result and the global model of the round
    before. All of it is one weighted mean of models, and computed as such.

    It needs the class counts of every chunk (13 + 8 C bytes up per client): the server learns which classes a
    client meets, how often and when. A reply without them, or with counts that do not add up to the samples it was
    trained on, is left out.

    Inferred: the published code also counts the global model among the models of each class; here it enters once.
    Batch-norm statistics are averaged like parameters.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_class = self.config.of(OfclKeys).ofcl_aggregation == "class-mean"
        self._before: Weights = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The global model to every client; it is also half of the next one."""
        if self._by_class:
            self._before = keys.unpack(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def check(self, reply: Reply) -> None:
        """Counts of every class, not negative, in all the samples trained on.

        Raises
        ------
        MessageError
            They are missing or cannot be.
        """
        if not self._by_class:
            return
        classes, counts = self._shapes["output.bias"][0][0], reply.metrics.get(keys.CHUNK_CLASSES)
        if not isinstance(counts, list) or len(counts) != classes or any(type(n) is not int or n < 0 for n in counts):
            raise MessageError(
                f"{keys.CHUNK_CLASSES} = {keys.shown(counts)}: must be {classes} whole numbers, none negative"
            )
        if sum(counts) != reply.examples:
            raise MessageError(
                f"{keys.CHUNK_CLASSES} = {keys.shown(counts)}: must add up to {keys.EXAMPLES} = {reply.examples}"
            )

    def merge(self, trained: Sequence[Reply]) -> Weights:
        """The mean, or half the mean by classes and half the global model before."""
        if not self._by_class:
            return super().merge(trained)
        shares = class_mean_weights([reply.metrics[keys.CHUNK_CLASSES] for reply in trained])
        return weighted_mean([*(reply.weights for reply in trained), self._before], [*shares.tolist(), 1.0])


def class_mean_weights(counts: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """Weight of each client's model in the mean, over classes, of the classes' models.

    Parameters
    ----------
    counts : sequence of sequence of int
        For each of K clients its samples of each of C classes, at least one in all.

    Returns
    -------
    array
        float64 (K,), adding up to 1: the mean, over the classes that anyone has, of the client's share of the
        class's samples.
    """
    samples = np.array(counts, dtype=np.float64)
    present = samples[:, samples.sum(axis=0) > 0]
    weights: npt.NDArray[np.float64] = (present / present.sum(axis=0)).mean(axis=1)
    return weights
