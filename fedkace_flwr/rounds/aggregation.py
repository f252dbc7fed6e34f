"""Aggregation of models by the configured rule, and client drift."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkace_flwr.algorithms import robust_aggregation as robust
from fedkace_flwr.messaging.records import Weights
from fedkace_flwr.sections import AggregationConfig

_BLOCK = 1 << 18  # numbers of each model that a coordinate-wise rule holds in float64 at a time


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

    Batch-norm running statistics are averaged like parameters; integer counters are rounded and keep their type.

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
