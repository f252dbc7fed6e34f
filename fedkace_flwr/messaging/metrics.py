"""Metrics: the numbers that clients report, their ranges, and where each one is recorded.

A number needs only one :class:`Metric`, which determines the check of replies
(:mod:`fedkace_flwr.messaging.validation`), the column of ``rounds.jsonl``, the TensorBoard tag, the column of the
results tables, and the row in ``docs/metrics.md``. Here are those of every method; a method declares its own in
``METHOD`` (:class:`fedkace_flwr.registry.Method`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.registry import METHODS

Phase = Literal["training", "evaluation", "either", "own"]
"""The reply that carries a metric: the reply to the training message, to the evaluation message, to either (the later
value is used, for clients that trained), or to a message of the method's own."""

_PASSES = 10  # forward passes per step; more than any method makes


@dataclass(frozen=True)
class Limits:
    """The largest values that a client's numbers can take.

    Attributes
    ----------
    config : Config
        The run's configuration, for ranges that depend on a method's keys.
    classes : int
        C.
    examples : int
        Largest number of samples that a client can train on in a round.
    """

    config: Config
    classes: int
    examples: int

    @classmethod
    def of(cls, config: Config, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> "Limits":
        """Return the limits of a run; ``examples`` is the largest size of a chunk.

        Parameters
        ----------
        config : Config
            The run's configuration.
        shapes : mapping
            Name, shape and dtype of each array of the model.
        """
        return cls(
            config=config,
            classes=shapes["output.bias"][0][0] if "output.bias" in shapes else 0,
            examples=config.largest_chunk,
        )

    @property
    def epochs(self) -> int:
        """Number of epochs of local training."""
        return self.config.training.epochs

    @property
    def capacity(self) -> int:
        """Capacity of the buffer, in samples."""
        return self.config.buffer.capacity

    @property
    def batches(self) -> int:
        """An upper bound on the number of batches in a round."""
        return _PASSES * self.epochs * (self.examples + self.capacity)


@dataclass(frozen=True)
class Bound:
    """A bound of a range that depends on the run.

    Attributes
    ----------
    text : str
        Description for the documentation, in Markdown.
    of : callable
        Computes the value from the run's limits.
    """

    text: str
    of: Callable[[Limits], float]


CLASSES = Bound("number of classes", lambda limits: limits.classes)
EPOCHS = Bound("`epochs`", lambda limits: limits.epochs)
CAPACITY = Bound("`capacity`", lambda limits: limits.capacity)
SAMPLES = Bound("samples of a chunk", lambda limits: limits.examples)
ROUNDS = Bound("`rounds`", lambda limits: limits.config.stream.rounds or math.inf)


@dataclass(frozen=True)
class Metric:
    """A number, or a list of numbers, that clients report.

    Attributes
    ----------
    name : str
        Name in messages, in kebab-case.
    meaning : str
        Description for the documentation, in Markdown.
    phase : {"training", "evaluation", "either", "own"}
        The reply that carries it.
    high, low : float or Bound
        The bounds of its range, both inclusive.
    whole : bool
        Whether it must be a whole number.
    length : {None, "classes", "epochs"}
        None: a single number. Otherwise, a list with one entry per class or epoch.
    unknown : float, optional
        The entry of a list that stands for an unknown number; null in the record.
    unit : str
        Unit of the value. Recorded metrics in seconds are summed over clients and phases and stored under ``seconds``
        in the record, so that the rest of the record is identical for identical seeds.
    column : str
        Field in ``rounds.jsonl``: a list with one entry per client, null if a client reported nothing. If empty, the
        metric is not recorded.
    any_client : bool
        Whether the field holds a single Boolean instead, which is true if the number is nonzero for any client.
    tag : str
        TensorBoard tag, followed by ``/`` and the client's number. A number is shown as it is, a list over epochs by
        its last entry, and a list over classes as a histogram. If empty, the metric is not shown.
    average : str
        Column of the results tables (``rounds.csv``) for the average over clients. That of a list over epochs leaves
        out the first epoch, in which the replay loss is not yet weighted. If empty, the tables omit the metric.
    average_by : {"mean", "median"}
        How clients are averaged: by the median if single values may be huge.
    """

    name: str
    meaning: str
    phase: Phase = "training"
    high: float | Bound = 1.0
    low: float | Bound = 0.0
    whole: bool = False
    length: Literal["classes", "epochs"] | None = None
    unknown: float | None = None
    unit: str = ""
    column: str = ""
    any_client: bool = False
    tag: str = ""
    average: str = ""
    average_by: Literal["mean", "median"] = "mean"

    def __post_init__(self) -> None:
        """Check that a metric with a tag, an average or a Boolean field has a column.

        Raises
        ------
        ValueError
            It has none.
        """
        if (self.tag or self.average or self.any_client) and not self.column:
            raise ValueError(f"metric {self.name}: a tag, an average or any_client needs a column")

    def range(self, limits: Limits) -> tuple[float, float]:
        """Return the bounds of the range in a run."""
        return _value(self.low, limits), _value(self.high, limits)

    def range_text(self) -> str:
        """Return the range in words."""
        return f"{_text(self.low)} to {_text(self.high)}"

    @property
    def is_timed(self) -> bool:
        """Whether the record holds it under ``seconds``."""
        return self.unit == "seconds" and bool(self.column)


def _value(end: float | Bound, limits: Limits) -> float:
    return end.of(limits) if isinstance(end, Bound) else end


def _text(end: float | Bound) -> str:
    return end.text if isinstance(end, Bound) else f"{end:g}"


SHARE = 1 + 1e-6
"""Largest value of a share: rounding may push a mean of probabilities slightly above 1."""

_MOST_FILES = 1e12
_TESTED = Bound("twice `capacity`", lambda limits: 2 * limits.capacity)

_LONGEST, _LATEST = 1e9, 1e12  # seconds; small enough that sums stay finite

COMMON: tuple[Metric, ...] = (
    Metric(
        wire.ACCURACY,
        "Test accuracy of the model that the client answers with, over all classes seen so far.",
        phase="evaluation",
        high=SHARE,
        column="client_accuracy",
        tag="client_accuracy",
    ),
    Metric(
        wire.LOCAL_ACCURACY,
        "Test accuracy of the local model.",
        phase="evaluation",
        high=SHARE,
        column="local_accuracy",
        average="local_accuracy",
    ),
    Metric(
        wire.GLOBAL_ACCURACY,
        "Test accuracy of the global model.",
        phase="evaluation",
        high=SHARE,
        column="global_accuracy",
        average="global_accuracy",
    ),
    Metric(
        wire.LOCAL_UNMASKED,
        "Test accuracy of the local model, on images of the classes seen so far, if every class counts as a possible answer; reported only with `evaluate = both`.",
        phase="either",
        high=SHARE,
        column="local_accuracy_unmasked",
        average="local_accuracy_unmasked",
    ),
    Metric(
        wire.GLOBAL_UNMASKED,
        "The same for the global model.",
        phase="evaluation",
        high=SHARE,
        column="global_accuracy_unmasked",
        average="global_accuracy_unmasked",
    ),
    Metric(
        wire.ARRIVED_ACCURACY,
        "As `accuracy`, but over all classes whose images have come; one of which no label has come is always answered wrongly. Reported in simulations in which labels come late or not at all.",
        phase="evaluation",
        high=SHARE,
        column="arrived_accuracy",
        average="arrived_accuracy",
    ),
    Metric(
        wire.CLASS_ACCURACY,
        "Test accuracy on each class of the model that the client answers with, -1 (null in the record) for a class that it has not met or has no test images of; reported only with `report-classes`.",
        phase="evaluation",
        low=wire.UNTESTED,
        high=1.0,
        length="classes",
        unknown=wire.UNTESTED,
        column="class_accuracy",
    ),
    Metric(
        wire.NEW_CLASS_ACCURACY,
        "Test accuracy of the received model on each class that the client meets for the first time, before it trains on it; -1 (null in the record) for all others. Reported from the second round on, with `report-classes` and `diagnostics`.",
        phase="training",
        low=wire.UNTESTED,
        high=1.0,
        length="classes",
        unknown=wire.UNTESTED,
        column="new_class_accuracy",
    ),
    Metric(
        wire.PREQUENTIAL_ACCURACY,
        "Accuracy on the new chunk before training on it, of the models that the client predicts with, over images of classes that it had met before. Where labels come late, the prediction counts that was made when the image arrived. There is none in the first round.",
        high=1.0,
        column="prequential_accuracy",
        average="prequential_accuracy",
        tag="prequential_accuracy",
    ),
    Metric(
        wire.PREQUENTIAL_SAMPLES,
        "Number of images of the chunk that the prequential accuracy is over.",
        high=SAMPLES,
        whole=True,
        unit="samples",
        column="prequential_samples",
    ),
    Metric(
        wire.SEEN_CLASSES,
        "Number of classes that the client has seen so far.",
        phase="evaluation",
        high=CLASSES,
        low=1,
        whole=True,
        unit="classes",
        column="seen_classes",
    ),
    Metric(
        wire.SWITCHED_AT,
        "Round from which the client has answered with the global model.",
        phase="evaluation",
        high=ROUNDS,
        low=1,
        whole=True,
        column="switched_at",
    ),
    Metric(
        wire.BUFFER_SIZE,
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
        wire.BUFFER_CLASSES,
        "Number of samples of each class in the new buffer; reported only with `report-classes`.",
        phase="either",
        high=CAPACITY,
        whole=True,
        length="classes",
        unit="samples",
        column="buffer_classes",
        tag="buffer_classes",
    ),
    Metric(
        wire.GATE_TESTED,
        "With `gate = hold`: number of own samples on which the client tested the candidate and the accepted model.",
        phase="own",
        high=_TESTED,
        whole=True,
        unit="samples",
    ),
    Metric(
        wire.GATE_CANDIDATE,
        "Number of them that the candidate answers rightly.",
        phase="own",
        high=_TESTED,
        whole=True,
        unit="samples",
    ),
    Metric(
        wire.GATE_ACCEPTED,
        "Number of them that the accepted model answers rightly.",
        phase="own",
        high=_TESTED,
        whole=True,
        unit="samples",
    ),
    Metric(
        wire.INTERPOLATED,
        "Whether the accuracy was interpolated between two trained rounds (`centralized-rounds`).",
        phase="evaluation",
        whole=True,
        column="interpolated",
        any_client=True,
    ),
    Metric(
        wire.WAITING,
        "Number of labelled samples that wait in the client's inbox.",
        phase="evaluation",
        high=_MOST_FILES,
        whole=True,
        unit="samples",
    ),
    Metric(
        wire.UNLABELLED,
        "Number of pictures in the client's inbox that wait for a label.",
        phase="evaluation",
        high=_MOST_FILES,
        whole=True,
        unit="pictures",
    ),
    Metric(
        wire.DROPPED,
        "Number of pictures without a label that the client has dropped in this run, because they were too old or too many.",
        phase="evaluation",
        high=_MOST_FILES,
        whole=True,
        unit="pictures",
    ),
    Metric(
        wire.REJECTED,
        "Number of files in the inbox's `rejected/`.",
        phase="evaluation",
        high=_MOST_FILES,
        whole=True,
        unit="files",
    ),
    Metric(
        wire.STARTED,
        "Time at which the client began to process the message. Together with `finished` it gives the time that a round spends on transport.",
        phase="either",
        high=_LATEST,
        unit="seconds since 1970",
    ),
    Metric(
        wire.FINISHED,
        "Time at which the client finished processing the message.",
        phase="either",
        high=_LATEST,
        unit="seconds since 1970",
    ),
    Metric(
        wire.TRAINING_SECONDS,
        "Time spent on local training.",
        phase="either",
        high=_LONGEST,
        unit="seconds",
        column="training",
    ),
    Metric(
        wire.SELECTION_SECONDS,
        "Time spent selecting the new buffer.",
        phase="either",
        high=_LONGEST,
        unit="seconds",
        column="selection",
    ),
    Metric(
        wire.EVALUATION_SECONDS,
        "Time spent on testing and on choosing the model that answers.",
        phase="either",
        high=_LONGEST,
        unit="seconds",
        column="evaluation",
    ),
    Metric(
        wire.CPU_SECONDS,
        "CPU seconds that the device has spent on the message so far, those of starting its process included; reported by devices alone, in both replies, and neither stored with an answer nor recorded ([living.md](living.md)).",
        phase="either",
        high=_LONGEST,
        unit="seconds",
    ),
    Metric(
        wire.PEAK_MEMORY,
        "The most memory that the largest of the client's processes has held; likewise.",
        phase="either",
        high=_LONGEST,
        unit="MiB",
    ),
)

_OTHER_FIELDS = frozenset({"round", "accuracy", "chance", "client_drift", "bytes", "failures", "seconds"})


def check_metrics(metrics: Iterable[Metric]) -> None:
    """Check that a method's metrics differ from all others in name and column.

    Raises
    ------
    ValueError
        One of them does not.
    """
    known = known_metrics()
    for metric in metrics:
        if known.get(metric.name, metric) != metric:
            raise ValueError(f"metric {metric.name} is already declared")
        columns = {other.column for other in known.values() if other.name != metric.name} | _OTHER_FIELDS
        if metric.column in columns - {""}:
            raise ValueError(f"metric {metric.name}: column {metric.column} already belongs to another metric")


def known_metrics() -> dict[str, Metric]:
    """Return all metrics by name: first the common ones, then those of the methods."""
    own = (metric for method in METHODS.values() for metric in method.metrics)
    return {metric.name: metric for metric in (*COMMON, *own)}
