"""Averages over clients and rounds, from the records of a run; None stands for missing values and is left out."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedkace_flwr.clients.fedkace import SINGULAR
from fedkace_flwr.messaging.metrics import Metric
from fedkace_flwr.registry import METHODS
from fedkace_flwr.sections.runs import AVERAGING

_BY_MODEL = {
    "aa_local": ("local_accuracy",),
    "aa_global": ("global_accuracy",),
    "aa_unmasked": ("local_accuracy_unmasked", "global_accuracy_unmasked"),
    "aa_local_unmasked": ("local_accuracy_unmasked",),
    "aa_global_unmasked": ("global_accuracy_unmasked",),
}
"""Average accuracies, with the columns of the model that they are of: before and after the switch, or throughout."""


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean, or None if there are no values."""
    known = [float(value) for value in values if value is not None]
    return statistics.fmean(known) if known else None


def median(values: Iterable[float | None]) -> float | None:
    """Return the median, or None if there are no values."""
    known = [float(value) for value in values if value is not None]
    return statistics.median(known) if known else None


def conditions(values: Iterable[float | None]) -> list[float]:
    """Return the condition numbers of a record that are not None; those of singular matrices are infinite."""
    return [math.inf if value >= SINGULAR else value for value in values if value is not None]


def switched(config: Mapping[str, Any], switched_at: Sequence[int | None]) -> int | None:
    """Return how many clients have switched to the global model, or None if the method has no switch."""
    method = METHODS.get(config["method"])
    if method is None or not method.switches or config["predict-with"] != "auto":
        return None
    return sum(number is not None for number in switched_at)


def final_part(records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the final three quarters of the rounds; in the paper, the final 75 of 100."""
    return records[len(records) // 4 :]


def average_over_clients(metric: Metric, column: Sequence[Any]) -> float | None:
    """Return a metric's average over clients; lists over epochs are averaged without the first epoch."""
    if metric.length is None:
        return (median if metric.average_by == "median" else mean)(column)
    return mean(value for values in column if values for value in values[1 if metric.length == "epochs" else 0 :])


def of_both_models(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the average accuracies that a run would have if all clients predicted by one model throughout.

    ``aa_local`` is of the local models, ``aa_global`` of the global one; None if the run did not test both throughout
    (``evaluate = both``). With ``_unmasked``, all classes count as possible answers, not only those that a client has
    met. ``aa_unmasked`` is then of the model that each client predicts with; None if clients average several models.
    """
    row: dict[str, float | None] = {}
    for name, columns in _BY_MODEL.items():
        means = [mean(_of_models(record, columns)) for record in records] if config["evaluate"] == "both" else []
        row[name] = mean(means) if None not in means else None
    if config["predict-with"] in AVERAGING:
        row["aa_unmasked"] = None
    return row


def _of_models(record: Mapping[str, Any], columns: Sequence[str]) -> Sequence[float | None]:
    """Each client's entry in the first column while its local model answers, and in the last one from its switch on."""
    before, after = (record.get(column, ()) for column in (columns[0], columns[-1]))
    return [late if at else early for early, late, at in zip(before, after, record["switched_at"], strict=False)]


def condition_numbers(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return a run's condition numbers: those of the whole buffer's matrix, and those of the classes' matrices.

    Each is the median over clients and the final three quarters of the rounds, with the share of singular matrices,
    whose condition number is infinite.
    """
    row: dict[str, float | None] = {}
    for name, column in (("condition", "condition_number"), ("class_condition", "class_condition_number")):
        values = [value for record in final_part(records) for value in conditions(record.get(column, ()))]
        row |= {name: median(values), f"{name}_singular": mean(map(math.isinf, values))}
    return row
