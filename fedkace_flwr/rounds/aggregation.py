"""Weighted means of models, and client drift."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkace_flwr.messaging.records import Weights


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
