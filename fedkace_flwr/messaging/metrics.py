"""The metrics that every record contains, and the registry of all metrics.

These common metrics include FedKACE's, which are null in the records of methods that do not report them. Every other
method declares its own metrics, and :mod:`fedkace_flwr.registry` registers them with the method.
"""

from collections.abc import Iterable

from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods import fedkace
from fedkace_flwr.methods.metric import CAPACITY, CLASSES, ROUNDS, Metric

SHARE = 1 + 1e-6
"""Largest value of a share: rounding may push a mean of probabilities slightly above 1."""

_LONGEST, _LATEST = 1e9, 1e12  # seconds; small enough that sums stay finite

COMMON: tuple[Metric, ...] = (
    Metric(
        keys.ACCURACY,
        "Test accuracy of the model that the client answers with, over all classes seen so far.",
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
        keys.LOCAL_UNMASKED,
        "Test accuracy of the local model, on images of the classes seen so far, if every class counts as a possible answer; reported only with `evaluate = both`.",
        phase="either",
        high=SHARE,
        column="local_accuracy_unmasked",
        average="local_accuracy_unmasked",
    ),
    Metric(
        keys.GLOBAL_UNMASKED,
        "The same for the global model.",
        phase="evaluation",
        high=SHARE,
        column="global_accuracy_unmasked",
        average="global_accuracy_unmasked",
    ),
    Metric(
        keys.CLASS_ACCURACY,
        "Test accuracy on each class of the model that the client answers with, -1 (null in the record) for a class that it has not met or has no test images of; reported only with `report-classes`.",
        phase="evaluation",
        low=keys.UNTESTED,
        high=1.0,
        length="classes",
        unknown=keys.UNTESTED,
        column="class_accuracy",
    ),
    Metric(
        keys.NEW_CLASS_ACCURACY,
        "Test accuracy of the received model on each class that the client meets for the first time, before it trains on it; -1 (null in the record) for all others. Reported from the second round on, with `report-classes` and `diagnostics`.",
        phase="training",
        low=keys.UNTESTED,
        high=1.0,
        length="classes",
        unknown=keys.UNTESTED,
        column="new_class_accuracy",
    ),
    Metric(
        keys.SEEN_CLASSES,
        "Number of classes that the client has seen so far.",
        phase="evaluation",
        high=CLASSES,
        low=1,
        whole=True,
        unit="classes",
        column="seen_classes",
    ),
    Metric(
        keys.SWITCHED_AT,
        "Round from which the client has answered with the global model.",
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
        "Number of samples in the new buffer.",
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
        "Number of samples of each class in the new buffer; reported only with `report-classes`.",
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
        "Whether the accuracy was interpolated between two trained rounds (`centralized-every`, `centralized-first`).",
        phase="evaluation",
        whole=True,
        column="interpolated",
        any_client=True,
    ),
    Metric(
        keys.STARTED,
        "Time at which the client began to process the message. Together with `finished` it gives the time that a round spends on transport.",
        phase="either",
        high=_LATEST,
        unit="seconds since 1970",
    ),
    Metric(
        keys.FINISHED,
        "Time at which the client finished processing the message.",
        phase="either",
        high=_LATEST,
        unit="seconds since 1970",
    ),
    Metric(
        keys.TRAINING_SECONDS,
        "Time spent on local training.",
        phase="either",
        high=_LONGEST,
        unit="seconds",
        column="training",
    ),
    Metric(
        keys.SELECTION_SECONDS,
        "Time spent selecting the new buffer.",
        phase="either",
        high=_LONGEST,
        unit="seconds",
        column="selection",
    ),
    Metric(
        keys.EVALUATION_SECONDS,
        "Time spent on testing and on choosing the model that answers.",
        phase="either",
        high=_LONGEST,
        unit="seconds",
        column="evaluation",
    ),
)

_KNOWN: dict[str, Metric] = {metric.name: metric for metric in COMMON}
_OTHER_FIELDS = frozenset({"round", "accuracy", "chance", "client_drift", "bytes", "failures", "seconds"})


def register_metrics(metrics: Iterable[Metric]) -> None:
    """Add a method's metrics; registering a metric twice has no further effect.

    Raises
    ------
    ValueError
        One of them has the same name or column as a different metric.
    """
    for metric in metrics:
        check_metrics([metric])
        _KNOWN[metric.name] = metric


def check_metrics(metrics: Iterable[Metric]) -> None:
    """Check that metrics can be registered, each by itself.

    Raises
    ------
    ValueError
        One of them has the same name or column as a different metric.
    """
    for metric in metrics:
        if _KNOWN.get(metric.name, metric) != metric:
            raise ValueError(f"metric {metric.name} is already declared")
        columns = {other.column for other in _KNOWN.values() if other.name != metric.name} | _OTHER_FIELDS
        if metric.column in columns - {""}:
            raise ValueError(f"metric {metric.name}: column {metric.column} already belongs to another metric")


def known_metrics() -> dict[str, Metric]:
    """Return all metrics by name: first the common ones, then those of the methods."""
    return dict(_KNOWN)
