"""Hooks of the server half, what a method can change in a round; and the aggregation of models that they default to."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict

from fedkace_flwr.algorithms import robust_aggregation as robust
from fedkace_flwr.config import Config
from fedkace_flwr.messaging.wire import NumpyArray, Reply, Shapes, Weights
from fedkace_flwr.rounds.server_round import ServerRound
from fedkace_flwr.sections import AggregationConfig

_BLOCK = 1 << 18  # numbers of each model that a coordinate-wise rule holds in float64 at a time


class ServerRule:
    """Plain rounds: every client trains the global model, and the new global model is the mean.

    :class:`fedkace_flwr.rounds.driver.RoundDriver` runs the rounds: it sends messages, retries, checks replies and
    keeps checkpoints. A method overrides the hooks below, listed in the order in which a round calls them. ``now`` is
    the round, with the tools that a hook may use.

    Parameters
    ----------
    config : Config
        The configuration.

    Attributes
    ----------
    train_action : str or None
        Message type of the training phase. None: there is neither a training phase nor a global model.
    aggregates : bool
        Whether the clients' models are merged, by the rule of the key ``aggregation``.
    takes_models : bool
        Whether replies to ``train`` hold models.
    undefended : str
        Why ``defence = on`` would reject honest updates; empty if it does not.
    """

    train_action: str | None = MessageType.TRAIN
    aggregates = True
    takes_models = True
    undefended = ""

    def __init__(self, config: Config) -> None:
        self.config = config

    def begin_round(self, now: ServerRound, arrays: ArrayRecord) -> None:
        """Prepare for a round that starts from the global model ``arrays``."""

    def model_for(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        """Model to send to a client in either phase; by default the global model ``arrays``."""
        return arrays

    def training_extras_for(self, client: int) -> dict[str, ArrayRecord | ConfigRecord]:
        """Further records of a client's training message, where the client finds them in ``ClientRound.content``."""
        return {}

    def expected(self, now: ServerRound, content: RecordDict) -> Shapes:
        """Name, shape and dtype of the arrays that a training reply must hold; by default those that the method declares.

        If these are part of the model, the reply is completed by what its client was sent.

        ``content`` is the reply's unchecked content; hooks may read only the declarations of its arrays.

        Raises
        ------
        MessageError
            The reply declares impossible arrays.
        """
        return now.replied

    def check(self, now: ServerRound, reply: Reply) -> None:
        """Check a well-formed training reply against the method's own requirements.

        Raises
        ------
        MessageError
            The reply is rejected, and recorded as a failure.
        """

    def compare(self, now: ServerRound, replies: Sequence[Reply]) -> list[Reply]:
        """Compare training replies with each other, and return those that count; record the others as failures.

        By default, models that cannot be the result of honest training are rejected, and updates that are longer than
        usual are scaled down.

        Parameters
        ----------
        now : ServerRound
            The round.
        replies : sequence of Reply
            Replies with arrays, in the order of client numbers.
        """
        return now.compared(replies)

    def weight(self, reply: Reply) -> float:
        """Weight of a local model in the mean, before normalisation; by default the same for all."""
        return 1.0

    def merge(self, now: ServerRound, replies: Sequence[Reply]) -> Weights:
        """New global model from at least one valid reply, in the order of client numbers; by default by ``aggregation``.

        With a ``server-optimiser``, the driver takes its step towards this model.
        """
        aggregate = Aggregator(self.config.aggregation, now.parameters)
        return aggregate([reply.weights for reply in replies], [self.weight(reply) for reply in replies])

    def drift(self, now: ServerRound, replies: Sequence[Reply], merged: Weights) -> float | None:
        """Client drift for the record, with ``diagnostics``.

        By default, the mean squared distance of the local models from the merged model.
        """
        return client_drift([reply.weights for reply in replies], merged, now.parameters)

    def trained(self, now: ServerRound, replies: Sequence[Reply]) -> None:
        """Process the valid training replies; there are none if every client skipped the round.

        Under secure aggregation the replies hold no weights.
        """

    def between(self, now: ServerRound, arrays: ArrayRecord) -> ArrayRecord:
        """Run the method's own exchanges between training and evaluation, and return the global model to continue with.

        It is not called if no client has trained.
        """
        return arrays

    def extras_for(self, client: int) -> dict[str, ArrayRecord | ConfigRecord]:
        """Further records of a client's evaluation message."""
        return {}

    def evaluated(self, now: ServerRound) -> dict[str, float]:
        """Process ``now.report.evaluated``, and return further metrics of the round for Flower's result."""
        return {}

    def state(self) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
        """Arrays, and a record ready for JSON, that later rounds need besides the global model."""
        return {}, {}

    def restore(self, arrays: Mapping[str, NumpyArray], record: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned; called before the first round."""

    def why_not_longer(self, planned: int, begun: int) -> str:
        """Why a run cannot go on with the configuration's number of rounds, in half a sentence; empty if it can.

        The method overrides this if a round depends on the number of rounds.

        Parameters
        ----------
        planned : int
            The number of rounds with which the run was begun, or last resumed.
        begun : int
            The rounds of these that are done or may be under way.
        """
        return ""

    def lacks_global_model(self) -> str:
        """Why no single model stands for the run, in half a sentence; empty if the global model does.

        A finished run leaves its global model for others to use, unless this names a reason.
        """
        return ""

    def summary(self) -> str:
        """One line for the log at the start of a run."""
        return f"{self.config.method} over {self.config.stream.clients} clients"


class Aggregator:
    """Aggregates models by the rule of the key ``aggregation``.

    ``multi-krum`` and ``geometric-median`` judge a model as a whole, once by its trained parameters and once by its
    batch-norm statistics: statistics have other units, and a client may be hostile in one part alone. Integer counters
    go with the statistics. Only ``mean`` and ``geometric-median`` use the weights of the clients; the other rules would
    let a client gain influence by its weight.

    Parameters
    ----------
    settings : AggregationConfig
        The rule and its keys.
    parameters : frozenset of str
        Names of the arrays that are trained by gradient.
    """

    def __init__(self, settings: AggregationConfig, parameters: frozenset[str]) -> None:
        self._rule = settings.rule
        self._byzantine = settings.hostile
        self._parameters = parameters

    def hostile(self, models: int) -> int:
        """Number of hostile models f that a rule protects against among ``models``: fewer than half of them."""
        return min(self._byzantine or models // 4, (models - 1) // 2)

    def __call__(self, models: Sequence[Weights], weights: Sequence[float]) -> dict[str, npt.NDArray[Any]]:
        """Aggregate models with the same names and shapes; at least one.

        Parameters
        ----------
        models : sequence of mapping
            The models, in the order of client numbers.
        weights : sequence of float
            Positive, one per model.
        """
        if self._rule == "mean" or len(models) == 1:
            return weighted_mean(models, weights)
        trained = [name for name in models[0] if name in self._parameters]
        others = [name for name in models[0] if name not in self._parameters]
        merged: dict[str, npt.NDArray[Any]] = {}
        for names in (trained, others):
            if names:
                merged |= self._part([{name: model[name] for name in names} for model in models], weights)
        return {name: merged[name] for name in models[0]}

    def _part(self, models: Sequence[Weights], weights: Sequence[float]) -> dict[str, npt.NDArray[Any]]:
        if self._rule in ("median", "trimmed-mean"):
            return {name: self._by_coordinate([model[name] for model in models]) for name in models[0]}
        compared = [name for name in models[0] if np.issubdtype(models[0][name].dtype, np.floating)]
        middle = weighted_mean(models, [1.0] * len(models))  # distances are exact only if numbers are small
        gram = robust.gram_matrix(models, compared, [middle] * len(models))
        if self._rule == "geometric-median":
            return weighted_mean(models, robust.geometric_median(gram, weights).tolist())
        chosen = robust.multi_krum(gram, self.hostile(len(models)))
        return weighted_mean([models[index] for index in chosen], [1.0] * len(chosen))

    def _by_coordinate(self, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        first, merged = arrays[0], np.empty(arrays[0].size)
        for begin in range(0, first.size, _BLOCK):
            part = slice(begin, begin + _BLOCK)
            block = np.stack([np.ravel(array)[part].astype(np.float64) for array in arrays])
            if self._rule == "median":
                merged[part] = robust.coordinate_median(block)
            else:
                merged[part] = robust.trimmed_mean(block, self.hostile(len(arrays)))
        value = merged.reshape(first.shape)
        return (value if np.issubdtype(first.dtype, np.floating) else np.rint(value)).astype(first.dtype)


def weighted_mean(models: Sequence[Weights], weights: Sequence[float]) -> dict[str, npt.NDArray[Any]]:
    """Average named arrays; sums are in float64 and in the given order.

    Batch-norm running statistics are averaged like parameters; integer counters are rounded and keep their type. An
    array that all models share, since no client has sent it, stays exactly as it is.

    Parameters
    ----------
    models : sequence of mapping
        At least one, all with the same names and shapes.
    weights : sequence of float
        Positive, one per model; normalised here.
    """
    total = float(sum(weights))
    mean: dict[str, npt.NDArray[Any]] = {}
    for name, first in models[0].items():
        if len(models) > 1 and all(model[name] is first for model in models):
            mean[name] = first
            continue
        value = np.zeros(first.shape, dtype=np.float64)
        for model, weight in zip(models, weights, strict=True):
            value += model[name] * (weight / total)
        mean[name] = (value if np.issubdtype(first.dtype, np.floating) else np.rint(value)).astype(first.dtype)
    return mean


def client_drift(models: Sequence[Weights], mean: Weights, names: Iterable[str]) -> float:
    """(1/K) sum over clients of ||theta_k - theta_g||^2, over the named arrays (paper, Theorem 3)."""
    chosen = sorted(names)
    distances = [sum(float(np.square(model[n].astype(np.float64) - mean[n]).sum()) for n in chosen) for model in models]
    return sum(distances) / len(distances)
