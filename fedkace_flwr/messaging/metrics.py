"""The metrics that every record has a place for, and the registry of all metrics.

FedKACE's metrics are among them: they are null in the records of methods that do not report them. The metrics of other
methods are declared with the method and registered with it (:mod:`fedkace_flwr.registry`).
"""

from collections.abc import Iterable

from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods import fedkace
from fedkace_flwr.methods.metric import CAPACITY, CLASSES, ROUNDS, Metric

SHARE = 1 + 1e-6
"""Largest value of a share: rounding may carry a mean of probabilities a little beyond 1."""

_LONGEST, _LATEST = 1e9, 1e12  # seconds; sums of them stay finite

COMMON: tuple[Metric, ...] = (
    Metric(
        keys.ACCURACY,
        "Test accuracy of the model that answers, over all classes met.",
        phase="evaluation",
        high=SHARE,
        column="client_accuracy",
        tag="client_accuracy",
    ),
    Metric(
        keys.LOCAL_ACCURACY,
        "Test accuracy of the local model.",
        phase="evaluation",
        high=SHARE,
        column="local_accuracy",
        average="local_accuracy",
    ),
    Metric(
        keys.GLOBAL_ACCURACY,
        "Test accuracy of the global model.",
        phase="evaluation",
        high=SHARE,
        column="global_accuracy",
        average="global_accuracy",
    ),
    Metric(
        keys.SEEN_CLASSES,
        "Classes that the client has met so far.",
        phase="evaluation",
        high=CLASSES,
        low=1,
        whole=True,
        unit="classes",
        column="seen_classes",
    ),
    Metric(
        keys.SWITCHED_AT,
        "Round since which the global model answers.",
        phase="evaluation",
        high=ROUNDS,
        low=1,
        whole=True,
        column="switched_at",
    ),
    *fedkace.SWITCH_METRICS,
    *fedkace.REPLAY_METRICS,
    Metric(
        keys.BUFFER_SIZE,
        "Samples in the new buffer.",
        phase="either",
        high=CAPACITY,
        whole=True,
        unit="samples",
        column="buffer_size",
        tag="buffer_size",
        average="buffer_size",
    ),
    Metric(
        keys.BUFFER_CLASSES,
        "Samples of each class in the new buffer; with `report-classes` alone.",
        phase="either",
        high=CAPACITY,
        whole=True,
        length="classes",
        unit="samples",
        column="buffer_classes",
        tag="buffer_classes",
    ),
    *fedkace.BUFFER_METRICS,
    Metric(
        keys.INTERPOLATED,
        "Whether the accuracy lies between two trained rounds (`centralized-every`).",
        phase="evaluation",
        whole=True,
        column="interpolated",
        any_client=True,
    ),
    Metric(
        keys.STARTED,
        "When the client began to work on the message; with `finished`, what a round spends on transport.",
        phase="either",
        high=_LATEST,
        unit="seconds since 1970",
    ),
    Metric(
        keys.FINISHED, "When the client finished the message.", phase="either", high=_LATEST, unit="seconds since 1970"
    ),
    Metric(keys.TRAINING_SECONDS, "Local training.", phase="either", high=_LONGEST, unit="seconds", column="training"),
    Metric(
        keys.SELECTION_SECONDS,
        "Choice of the new buffer.",
        phase="either",
        high=_LONGEST,
        unit="seconds",
        column="selection",
    ),
    Metric(
        keys.EVALUATION_SECONDS,
        "Tests, and the choice of the model that answers.",
        phase="either",
        high=_LONGEST,
        unit="seconds",
        column="evaluation",
    ),
)

_KNOWN: dict[str, Metric] = {metric.name: metric for metric in COMMON}
_OTHER_FIELDS = frozenset({"round", "accuracy", "chance", "client_drift", "bytes", "failures", "seconds"})


def register_metrics(metrics: Iterable[Metric]) -> None:
    """Add a method's metrics; registering one twice is the same as once.

    Raises
    ------
    ValueError
        Another metric has the name or the column of one of them.
    """
    for metric in metrics:
        if _KNOWN.get(metric.name, metric) != metric:
            raise ValueError(f"metric {metric.name} is declared already")
        columns = {other.column for other in _KNOWN.values() if other.name != metric.name} | _OTHER_FIELDS
        if metric.column in columns - {""}:
            raise ValueError(f"metric {metric.name}: column {metric.column} is another one's")
        _KNOWN[metric.name] = metric


def known_metrics() -> dict[str, Metric]:
    """Return all metrics by name: the common ones, then the methods' own."""
    return dict(_KNOWN)
