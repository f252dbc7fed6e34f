"""Checked reading of arrays, numbers, labels and class counts."""

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict

from fedkace_flwr.config import Config
from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.metrics import Limits
from fedkace_flwr.messaging.validation import (
    check_labels,
    check_within,
    read_metrics,
)

HELD = {"scores": np.array([0.25, 0.5])}
SHAPES = wire.shapes_of(HELD)
LIMITS = Limits.of(Config(), {"output.bias": ((10,), np.dtype(np.float32))})


def test_arrays_come_back_as_they_were_sent() -> None:
    content = RecordDict({wire.ARRAYS: wire.array_record(HELD)})
    assert wire.read_arrays(content, SHAPES)["scores"].tolist() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (RecordDict(), "records"),
        (RecordDict({wire.ARRAYS: wire.array_record({"scores": np.zeros(3)})}), "arrays"),
        (RecordDict({wire.ARRAYS: wire.array_record({"scores": np.array([0, np.nan])})}), "values"),
        (RecordDict({wire.ARRAYS: wire.array_record({"scores": np.zeros(10**6)})}), "size"),
    ],
)
def test_arrays_that_differ_are_refused(content: RecordDict, kind: str) -> None:
    with pytest.raises(MessageError) as caught:
        wire.read_arrays(content, SHAPES)
    assert caught.value.kind == kind


def test_metrics_are_checked_and_may_be_missing() -> None:
    told = RecordDict({wire.METRICS: MetricRecord({wire.TRAINING_SECONDS: 2.5})})
    assert read_metrics(told, LIMITS) == {wire.TRAINING_SECONDS: 2.5} and read_metrics(RecordDict(), LIMITS) == {}
    with pytest.raises(MessageError, match="training-seconds"):
        read_metrics(RecordDict({wire.METRICS: MetricRecord({wire.TRAINING_SECONDS: -1.0})}), LIMITS)


@pytest.mark.parametrize(
    ("labels", "words"), [([0, 3], "reach from 0 to 3: there are 3 classes"), ([-1, 2], "reach from -1 to 2")]
)
def test_labels_must_be_classes(labels: list[int], words: str) -> None:
    check_labels(np.array([0, 2]), 3)
    with pytest.raises(MessageError, match=words):
        check_labels(np.array(labels), 3)


@pytest.mark.parametrize("labels", [[1], [3], [-1]])
def test_labels_must_be_of_classes_met(labels: list[int]) -> None:
    seen = np.array([True, False, True])
    check_labels(np.array([0, 2]), 3, seen)
    with pytest.raises(MessageError, match="a class that the client has not met"):
        check_labels(np.array(labels), 3, seen)


def test_values_must_be_within_bounds_and_slack_is_above_alone() -> None:
    check_within("scores", np.array([0.0, 1.05]), 0, 1, slack=0.1)
    for values in ([-0.05, 1.0], [0.0, 1.2]):
        with pytest.raises(MessageError, match=r"scores reach from .* must be within 0 and 1"):
            check_within("scores", np.array(values), 0, 1, slack=0.1)


def test_the_number_of_classes_is_the_output_layers() -> None:
    assert LIMITS.classes == 10
