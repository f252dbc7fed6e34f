"""OFCL's server: the mean by classes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MessageType, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from support.doubles.faults import FaultyGrid, only
from support.systems.runs import records, run

from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.rounds.aggregation import weighted_mean
from strategies.ofcl import class_mean_weights

Make = Callable[..., Config]


def up_of(grid: FaultyGrid, number: int, client: int) -> RecordDict:
    """A training reply."""
    content = grid.of(MessageType.TRAIN, number)[client].up
    assert content is not None
    return content


def test_weights_of_the_mean_by_classes_by_hand() -> None:
    assert class_mean_weights([[4, 0, 0], [4, 8, 0], [0, 8, 0]]).tolist() == [0.25, 0.5, 0.25]
    assert class_mean_weights([[1, 0, 0], [3, 0, 2]]).tolist() == [0.125, 0.875]


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=1, max_size=5), st.data())
def test_one_mean_by_those_weights_is_the_mean_of_the_classes_means(
    counts: list[list[int]], data: st.DataObject
) -> None:
    models = [{"w": np.array([data.draw(st.floats(-9, 9))])} for _ in counts]
    by_class = []
    for label in range(4):
        having = [(model, row[label]) for model, row in zip(models, counts, strict=True) if row[label]]
        if having:
            by_class.append(weighted_mean([model for model, _ in having], [n for _, n in having]))
    expected = weighted_mean(by_class, [1.0] * len(by_class))["w"]
    weights = class_mean_weights(counts)
    assert weights.sum() == pytest.approx(1) and (weights > 0).all()
    assert weighted_mean(models, weights.tolist())["w"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_the_global_model_is_half_the_classes_mean_and_half_the_one_before(small: Make) -> None:
    config = small(
        method="ofcl",
        rounds=2,
        clients=4,
        window=3,
        ofcl_aggregation="class-mean",
        report_classes=False,
    )
    grid = run(config)
    experiment = Experiment(config)
    before = as_arrays(experiment.initial_weights())
    for number in (1, 2):
        sent = grid.model_sent(MessageType.EVALUATE, number, 0)
        counts = [experiment.chunk(client, number).class_counts(10).tolist() for client in range(4)]
        replies = [up_of(grid, number, client) for client in range(4)]
        values: list[Any] = [reply.metric_records[keys.METRICS][keys.CHUNK_CLASSES] for reply in replies]
        reported = [list(value) for value in values]
        weights = class_mean_weights(counts)
        assert reported == counts and len(set(weights.tolist())) > 1
        models = [keys.unpack(reply.array_records[keys.ARRAYS]) for reply in replies]
        for name, value in sent.items():
            if value.dtype.kind == "f":
                mean = sum(w * model[name] for w, model in zip(weights, models, strict=True))
                np.testing.assert_allclose(value, (mean + before[name]) / 2, rtol=1e-5, atol=1e-6)
        before = sent


def test_class_counts_leave_a_client_where_they_are_needed_alone(small: Make) -> None:
    replies = {}
    for rule in ("mean", "class-mean"):
        config = small(method="ofcl", run_name=rule, rounds=1, ofcl_aggregation=rule)
        replies[rule] = up_of(run(config), 1, 0)
    assert keys.CHUNK_CLASSES not in replies["mean"].metric_records[keys.METRICS]
    assert keys.size_in_bytes(replies["class-mean"]) - keys.size_in_bytes(replies["mean"]) == 13 + 8 * 10


def counting(counts: Any) -> Callable[[Message], Message]:
    def act(reply: Message) -> Message:
        metrics = reply.content.metric_records[keys.METRICS]
        del metrics[keys.CHUNK_CLASSES]
        if counts is not None:
            metrics[keys.CHUNK_CLASSES] = counts
        return reply

    return act


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (None, "chunk-classes = None: must be 10 whole numbers"),
        ([16], "must be a list of 10 numbers"),
        ([16.0] + [0.0] * 9, "must be whole and between 0 and 16"),
        ([17, -1] + [0] * 8, "must be whole and between 0 and 16"),
        ([15] + [0] * 9, "must add up to num-examples = 16"),
    ],
)
def test_a_client_that_does_not_say_what_it_trained_on_is_left_out(small: Make, counts: object, words: str) -> None:
    config = small(method="ofcl", rounds=2, ofcl_aggregation="class-mean")
    grid = run(config, only(1, 2, counting(counts)))
    first, second = records(config)
    assert first["failures"] == []
    (failure,) = second["failures"]
    assert (failure["client"], failure["phase"]) == (1, "training") and words in failure["reason"]
    chunks = [Experiment(config).chunk(client, 2).class_counts(10).tolist() for client in (0, 2)]
    models = [grid.model_returned(2, client) for client in (0, 2)]
    before, after = (grid.model_sent(MessageType.EVALUATE, number, 0) for number in (1, 2))
    mean = weighted_mean([*models, before], [*class_mean_weights(chunks).tolist(), 1.0])
    np.testing.assert_array_equal(after["output.weight"], mean["output.weight"])
