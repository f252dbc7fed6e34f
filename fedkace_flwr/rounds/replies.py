"""Checked reading of what clients send: numbers, labels and class counts."""

import numpy as np
from flwr.app import MetricRecord, RecordDict

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.records import NumpyArray, Shapes
from fedkace_flwr.messaging.validation import Limits, check_metrics


def num_classes(shapes: Shapes) -> int:
    """Number of classes C: the length of the model's output bias."""
    return shapes["output.bias"][0][0]


def read_metrics(content: RecordDict, limits: Limits) -> dict[str, float]:
    """Metrics of a reply without arrays to one of a method's own messages.

    Raises
    ------
    MessageError
        The reply is too large, or a metric is not finite or out of range.
    """
    keys.check_size(content, {})
    metrics = keys.checked_metrics(content.metric_records.get(keys.METRICS, MetricRecord()))
    check_metrics(metrics, limits)
    return metrics


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
