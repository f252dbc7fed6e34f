"""Whether a well-formed reply can be true: ranges of its numbers, and how far a model can have moved in a round.

The first needs the configuration alone. The second compares a round's replies with one another, so it holds while
the honest ones are in the majority: a bound is a multiple of a median, which fewer than half of the replies cannot
move out of the range of the others'.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.metrics import known_metrics
from fedkace_flwr.messaging.records import NumpyArray, Weights
from fedkace_flwr.methods.metric import Limits as Limits
from fedkace_flwr.methods.metric import Metric

FEWEST_COMPARED = 3
"""Replies of a round from which on a median tells more than the last one did: of two, either may be the odd one."""

_VARIANCE, _MEAN, _COUNTER = ".running_var", ".running_mean", ".num_batches_tracked"


def check_metrics(metrics: Mapping[str, Any], limits: Limits) -> None:
    """Check each number against its declaration; numbers of unknown names pass.

    That they are finite is known already (:func:`fedkace_flwr.messaging.records.checked_metrics`).

    Raises
    ------
    MessageError
        One is out of its range, of the wrong type or of the wrong length, or a span has a start or an end alone.
    """
    known = known_metrics()
    for name, value in metrics.items():
        if name in known:
            _check(known[name], value, limits)
    if (keys.STARTED in metrics) != (keys.FINISHED in metrics):
        raise MessageError(f"metrics {keys.STARTED!r} and {keys.FINISHED!r} go together", "metrics")


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
    """See that a client claims no more samples than it can have met; where they weigh, a claim is influence.

    Raises
    ------
    MessageError
        It does.
    """
    if examples > limits.examples:
        raise MessageError(
            f"{keys.EXAMPLES} = {examples}: a round brings at most max-examples = {limits.examples}", "count"
        )


def check_statistics(weights: Weights, origin: Weights, limits: Limits) -> None:
    """See that batch-norm variances are not negative, and counters of batches those of one round more.

    Raises
    ------
    MessageError
        They are not.
    """
    for name, array in weights.items():
        if name.endswith(_VARIANCE) and bool((array < 0).any()):
            raise MessageError(f"array {name!r} holds negative variances", "values")
        if name.endswith(_COUNTER):
            count, highest = int(array), int(origin[name]) + limits.batches
            if not 0 <= count <= highest:
                raise MessageError(f"array {name!r} = {count}: must be between 0 and {highest}", "values")


def distance(weights: Weights, origin: Weights, names: Iterable[str]) -> float:
    """Euclidean distance over the named arrays, in float64; infinite only where it is beyond float64's range.

    Squares of large differences would overflow, so differences are scaled by the largest first.
    """
    with np.errstate(over="ignore"):
        differences = [weights[name].astype(np.float64) - origin[name] for name in sorted(names)]
    return _norm(differences)


def statistics_distance(weights: Weights, origin: Weights) -> float:
    """The same over batch-norm's running means and standard deviations, which are of one unit."""
    differences = []
    for name, array in weights.items():
        new, old = array.astype(np.float64), origin[name].astype(np.float64)
        if name.endswith(_MEAN):
            differences.append(new - old)
        elif name.endswith(_VARIANCE):
            differences.append(np.sqrt(new) - np.sqrt(np.maximum(old, 0)))
    return _norm(differences)


def root_mean_square(rows: NumpyArray) -> float:
    """Length of the rows (n, F) of a client's matrix, on average."""
    return _norm([rows.astype(np.float64)]) / math.sqrt(max(1, len(rows)))


def _norm(parts: Sequence[NumpyArray]) -> float:
    largest = max((float(np.abs(part).max(initial=0.0)) for part in parts), default=0.0)
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(sum(float(np.square(part / largest).sum()) for part in parts))


@dataclass(frozen=True)
class Yardstick:
    """What is usual in a round.

    Attributes
    ----------
    distance : float
        Median distance of the replies.
    per_sample : float
        Median of distance by samples trained on.
    """

    distance: float
    per_sample: float

    @classmethod
    def of(cls, distances: Sequence[float], samples: Sequence[int]) -> "Yardstick":
        """From one distance and one number of samples for each reply, at least one."""
        each = [far / max(1, count) for far, count in zip(distances, samples, strict=True)]
        return cls(median(distances), median(each))

    def bound(self, samples: int, factor: float) -> float:
        """How far a client may have moved on so many samples; infinite where nobody usually moves.

        ``factor`` times the median distance, or as often its samples times the median distance per sample where
        that is more: a step of AdamW moves a weight by about the learning rate whatever the gradient's size, so who
        has more batches moves farther, in proportion at most.
        """
        usual = max(self.distance, samples * self.per_sample)
        return factor * usual if usual > 0 else math.inf


def yardstick(distances: Sequence[float], samples: Sequence[int], before: Yardstick | None) -> Yardstick | None:
    """The round's own yardstick; of too few replies the last one of enough, or none at the beginning of a run."""
    return Yardstick.of(distances, samples) if len(distances) >= FEWEST_COMPARED else before
