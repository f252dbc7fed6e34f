"""Plausibility of well-formed replies: the ranges of their numbers, which depend on the configuration alone, and distances."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.metrics import Limits as Limits
from fedkace_flwr.messaging.metrics import Metric, known_metrics
from fedkace_flwr.messaging.records import NumpyArray, Weights

_VARIANCE, _MEAN, _COUNTER = ".running_var", ".running_mean", ".num_batches_tracked"


def check_metrics(metrics: Mapping[str, Any], limits: Limits) -> None:
    """Check each number against its declaration; numbers with unknown names pass.

    :func:`fedkace_flwr.messaging.records.checked_metrics` has already checked that they are finite.

    Raises
    ------
    MessageError
        One is out of range, of the wrong type or of the wrong length, or a time span lacks its start or its end.
    """
    known = known_metrics()
    for name, value in metrics.items():
        if name in known:
            _check(known[name], value, limits)
    if (keys.STARTED in metrics) != (keys.FINISHED in metrics):
        raise MessageError(f"metrics {keys.STARTED!r} and {keys.FINISHED!r} must be reported together", "metrics")


def _check(metric: Metric, value: Any, limits: Limits) -> None:
    length = None if metric.length is None else int(getattr(limits, metric.length))
    if isinstance(value, list) != (length is not None) or (length is not None and len(value) != length):
        wanted = "a single number" if length is None else f"a list of {length} numbers"
        raise MessageError(f"metric {metric.name!r} = {keys.shown(value)}: must be {wanted}", "metrics")
    low, high = metric.range(limits)
    for number in value if isinstance(value, list) else [value]:
        if not low <= number <= high or (metric.whole and not isinstance(number, int)):
            kind = "whole and " if metric.whole else ""
            raise MessageError(
                f"metric {metric.name!r} = {keys.shown(value)}: must be {kind}between {low:g} and {high:g}", "metrics"
            )


def check_examples(examples: int, limits: Limits) -> None:
    """Check that a client claims no more samples than it can have received in a round.

    Where models are weighted by samples, a false claim would give a client more influence.

    Raises
    ------
    MessageError
        It claims more.
    """
    if examples > limits.examples:
        raise MessageError(
            f"{keys.EXAMPLES} = {examples}: must be at most {limits.examples}, the size of the largest chunk", "count"
        )


def check_statistics(weights: Weights, origin: Weights, limits: Limits) -> None:
    """Check that batch-norm variances are not negative and that batch counters grew by no more than one round allows.

    Raises
    ------
    MessageError
        A variance is negative, or a counter is out of range.
    """
    for name, array in weights.items():
        if name.endswith(_VARIANCE) and bool((array < 0).any()):
            raise MessageError(f"array {name!r} holds negative variances", "values")
        if name.endswith(_COUNTER):
            count, highest = int(array), int(origin[name]) + limits.batches
            if not 0 <= count <= highest:
                raise MessageError(f"array {name!r} = {count}: must be between 0 and {highest}", "values")


def distance(weights: Weights, origin: Weights, names: Iterable[str]) -> float:
    """Return the Euclidean distance over the named arrays, in float64; infinite only if it exceeds float64's range.

    Squares of large differences would overflow, so the differences are first divided by the largest.
    """
    with np.errstate(over="ignore"):
        differences = [weights[name].astype(np.float64) - origin[name] for name in sorted(names)]
    return length(differences)


def root_mean_square(rows: NumpyArray) -> float:
    """Return the root mean square length of the rows of a client's matrix (n, F)."""
    return length([rows.astype(np.float64)]) / math.sqrt(max(1, len(rows)))


def length(parts: Sequence[NumpyArray]) -> float:
    """Return the Euclidean length of float64 arrays, taken as one vector."""
    largest = max((float(np.abs(part).max(initial=0.0)) for part in parts), default=0.0)
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(sum(float(np.square(part / largest).sum()) for part in parts))
