"""How metrics are declared: the numbers that a client reports, their ranges, and where each one is recorded.

One :class:`Metric` is all that a number needs. From it follow the check of replies
(:mod:`fedkace_flwr.messaging.validation`), the column of ``rounds.jsonl``, the TensorBoard tag, the column of the
results tables, and its row in ``docs/metrics.md``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedkace_flwr.config import Config

Phase = Literal["training", "evaluation", "either", "own"]
"""Which reply carries a metric: that to the training or the evaluation message, either of the two (the later one
counts, of clients that trained), or the reply to a message of the method's own."""

_PASSES = 10  # forward passes of a step; no method makes as many


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
        Samples that a client can have trained on in a round.
    """

    config: Config
    classes: int
    examples: int

    @classmethod
    def of(cls, config: Config, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> "Limits":
        """Return the limits of a run; with ``max-examples = 0``, ``examples`` is what a chunk can hold.

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
            examples=config.run.max_examples or config.largest_chunk,
        )

    @property
    def epochs(self) -> int:
        """Epochs of local training."""
        return self.config.training.epochs

    @property
    def capacity(self) -> int:
        """Places of the buffer."""
        return self.config.buffer.capacity

    @property
    def batches(self) -> int:
        """More steps than a round can have."""
        return _PASSES * self.epochs * (self.examples + self.capacity)


@dataclass(frozen=True)
class Bound:
    """An end of a range that depends on the run.

    Attributes
    ----------
    text : str
        For the documentation, in Markdown.
    of : callable
        The value, from the run's limits.
    """

    text: str
    of: Callable[[Limits], float]


CLASSES = Bound("number of classes", lambda limits: limits.classes)
EPOCHS = Bound("`epochs`", lambda limits: limits.epochs)
CAPACITY = Bound("`capacity`", lambda limits: limits.capacity)
ROUNDS = Bound("`rounds`", lambda limits: limits.config.stream.rounds)


@dataclass(frozen=True)
class Metric:
    """A number, or a list of numbers, that clients report.

    Attributes
    ----------
    name : str
        In messages, in kebab-case.
    meaning : str
        For the documentation, in Markdown.
    phase : {"training", "evaluation", "either", "own"}
        Which reply carries it.
    high, low : float or Bound
        The ends of its range, both included.
    whole : bool
        Whether only whole numbers will do.
    length : {None, "classes", "epochs"}
        None: a single number. Otherwise a list with one entry for each class or epoch.
    unit : str
        Of the value. A recorded metric in seconds is summed over clients and phases and stands under ``seconds`` in
        the record, so that the rest of a record is equal for equal seeds.
    column : str
        Its field of ``rounds.jsonl``: a list with one entry per client, null where a client reported nothing. Empty:
        it is not recorded.
    any_client : bool
        The field holds a truth value instead: whether the number is other than 0 for any client.
    tag : str
        Its tag in TensorBoard, followed by ``/`` and the client's number: a number; of a list over epochs, the last
        entry; of a list over classes, a histogram. Empty: it is not shown.
    average : str
        Its column in the results tables (``rounds.csv``), the mean over clients; of a list over epochs, without the
        first one, in which the buffer is not weighed yet. Empty: it is left out.
    """

    name: str
    meaning: str
    phase: Phase = "training"
    high: float | Bound = 1.0
    low: float | Bound = 0.0
    whole: bool = False
    length: Literal["classes", "epochs"] | None = None
    unit: str = ""
    column: str = ""
    any_client: bool = False
    tag: str = ""
    average: str = ""

    def __post_init__(self) -> None:
        """See that what depends on a column has one.

        Raises
        ------
        ValueError
            A tag or an average without a column to read it from.
        """
        if (self.tag or self.average or self.any_client) and not self.column:
            raise ValueError(f"metric {self.name}: a tag or an average needs a column")

    def range(self, limits: Limits) -> tuple[float, float]:
        """Return the ends of the range in a run."""
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
