"""Checks of what clients send, if it is well formed: numbers in their ranges, which depend on the configuration alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import MetricRecord, RecordDict

from fedkace_flwr.errors import MessageError
from fedkace_flwr.keys import keys_of
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.metrics import Limits, Metric, known_metrics
from fedkace_flwr.messaging.wire import NumpyArray, Weights
from fedkace_flwr.sections import TrainingConfig

_MOST_EPOCHS = int(keys_of(TrainingConfig)["epochs"].high or 0)
_VARIANCE, _MEAN, _COUNTER = ".running_var", ".running_mean", ".num_batches_tracked"


def check_metrics(metrics: Mapping[str, Any], limits: Limits) -> None:
    """Check each number against its declaration; numbers with unknown names pass.

    :func:`fedkace_flwr.messaging.wire.checked_metrics` has already checked that they are finite.

    Raises
    ------
    MessageError
        One is out of range, of the wrong type or of the wrong length, or a time span lacks its start or its end.
    """
    known = known_metrics()
    for name, value in metrics.items():
        if name in known:
            _check(known[name], value, limits)
    if (wire.STARTED in metrics) != (wire.FINISHED in metrics):
        raise MessageError(f"metrics {wire.STARTED!r} and {wire.FINISHED!r} must be reported together", "metrics")


def _check(metric: Metric, value: Any, limits: Limits) -> None:
    length = None if metric.length is None else int(getattr(limits, metric.length))
    # A client that trained before `epochs` was changed answers from its store.
    lengths = range(1, _MOST_EPOCHS + 1) if metric.length == "epochs" else (length,)
    if isinstance(value, list) != (length is not None) or (isinstance(value, list) and len(value) not in lengths):
        wanted = "a single number" if length is None else f"a list of {length} numbers"
        raise MessageError(f"metric {metric.name!r} = {wire.shown(value)}: must be {wanted}", "metrics")
    low, high = metric.range(limits)
    for number in value if isinstance(value, list) else [value]:
        if not low <= number <= high or (metric.whole and not isinstance(number, int)):
            kind = "whole and " if metric.whole else ""
            raise MessageError(
                f"metric {metric.name!r} = {wire.shown(value)}: must be {kind}between {low:g} and {high:g}", "metrics"
            )


def read_metrics(content: RecordDict, limits: Limits) -> dict[str, float]:
    """Metrics of a reply without arrays to one of a method's own messages.

    Raises
    ------
    MessageError
        The reply is too large, or a metric is not finite or out of range.
    """
    wire.check_size(content, {})
    metrics = wire.checked_metrics(content.metric_records.get(wire.METRICS, MetricRecord()))
    check_metrics(metrics, limits)
    return metrics


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
            f"{wire.EXAMPLES} = {examples}: must be at most {limits.examples}, the size of the largest chunk", "count"
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


def check_labels(labels: NumpyArray, classes: int, seen: NumpyArray | None = None) -> None:
    """Check that labels name existing classes and, where ``seen`` is given, classes that the client has met.

    Parameters
    ----------
    labels : array
        int64 (n,), n at least 1.
    classes : int
        C.
    seen : array, optional
        bool (C,).

    Raises
    ------
    MessageError
        A label is out of range, or its class is not among those met.
    """
    low, high = int(labels.min()), int(labels.max())
    in_range = low >= 0 and high < classes
    if seen is not None and not (in_range and bool(seen[labels].all())):
        raise MessageError("labels hold a class that the client has not met")
    if not in_range:
        raise MessageError(f"labels reach from {low} to {high}: there are {classes} classes")


def check_within(name: str, values: NumpyArray, low: float, high: float, slack: float = 0.0) -> None:
    """Check that all values of a non-empty array are within [low, high]; ``slack`` allows for rounding above.

    Raises
    ------
    MessageError
        One is not.
    """
    least, most = float(np.min(values)), float(np.max(values))
    if least < low or most > high + slack:
        raise MessageError(f"{name} reach from {least:g} to {most:g}: must be within {low:g} and {high:g}")
