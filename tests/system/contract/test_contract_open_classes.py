"""Every method with open classes on a stream: samples wait until their class has a number, and are then learned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.common import rounds_of
from support.doubles.faults import FaultyGrid
from support.systems.contract import (
    DISTINCT_METHODS,
    SHAPE,
    Make,
    assert_a_run_in_pieces_equals,
    run_over,
)

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import AgreedClasses
from fedkace_flwr.sources import StreamSource
from fedkace_flwr.storage.checkpoint import Checkpoints

Open = Callable[..., Config]
GROWING = [each for each in DISTINCT_METHODS if each.values[0] != "centralized"]


@pytest.fixture
def opened(small: Make) -> Open:
    return lambda **changes: small(**{**SHAPE, "classes": "open", "max_classes": 12, **changes})


@pytest.mark.matrix
@pytest.mark.parametrize("method", GROWING)
def test_a_run_with_open_classes_names_them_as_they_come_and_resumes_exactly(
    opened: Open, method: str, tmp_path: Path
) -> None:
    config = opened(method=method)
    whole = run_over(FaultyGrid(config), config)
    lines = rounds_of(whole)
    assert all(line["failures"] == [] for line in lines)
    assert lines[0]["sat_out"] == [0, 1, 2]
    experiment = Experiment(config)
    met_first = {label for client in range(3) for label in experiment.chunk(client, 1).labels.tolist()}
    assert lines[0]["new_classes"] == sorted(map(str, met_first))
    assert all(accuracy is not None for accuracy in lines[1]["client_accuracy"])
    last = Checkpoints(whole / "server").newest()
    assert last is not None
    agreed = AgreedClasses(*map(tuple, last.record["class-names"].values()))
    assert list(agreed.names) == [name for line in lines for name in line.get("new_classes", [])]
    for client in range(3):
        waiting, met = StreamSource(experiment, client, agreed), torch.zeros(12, dtype=torch.bool)
        for number in (2, 3):
            met |= waiting.chunk(number, number - 1 if number > 2 else 0).class_counts(12) > 0
        assert lines[-1]["seen_classes"][client] == int(met.sum())
    assert_a_run_in_pieces_equals(whole, opened(method=method, run_name="pieces", resume=True))


def test_if_all_names_are_known_from_the_start_the_run_is_that_with_fixed_classes(small: Make) -> None:
    fixed = small(run_name="fixed", fraction_train=0.7, **SHAPE)
    names = ",".join("0123456789")
    same = small(run_name="open", fraction_train=0.7, classes="open", class_names=names, max_classes=10, **SHAPE)
    lines = [rounds_of(run_over(FaultyGrid(config), config)) for config in (fixed, same)]
    for line in (line for run in lines for line in run):
        del line["bytes"]
    assert lines[0] == lines[1]


def test_each_sample_is_learned_once_as_soon_as_its_class_counts(opened: Open) -> None:
    experiment = Experiment(opened(rounds=6, window=3, overlap=1))
    known = experiment.dataset.class_names
    drawn = [experiment.chunk(0, number) for number in range(1, 7)]
    met = list(dict.fromkeys(known[label] for chunk in drawn for label in chunk.labels.tolist()))
    agreed = AgreedClasses(tuple(met), tuple(2 + place // 2 for place in range(len(met))))
    source, learned, last = StreamSource(experiment, 0, agreed), list[int](), 0
    for number in (1, 2, 4, 5, 6):  # the client misses round 3
        chunk = source.chunk(number, last)
        assert torch.equal(source.again(number, last).content, chunk.content)
        assert all(agreed.rounds[label] <= number for label in chunk.labels.unique().tolist())
        assert [known[int(experiment.dataset.labels[each])] for each in chunk.content] == [
            agreed.names[label] for label in chunk.labels.tolist()
        ]
        learned += chunk.content.tolist()
        last = number if len(chunk) else last
    assert len(set(learned)) == len(learned)
    lost = set(drawn[2].content.tolist()) - set(learned)
    assert set(learned) | lost == {each for chunk in drawn for each in chunk.content.tolist()}
    assert len(lost) < len(drawn[2])


def test_names_leave_a_client_a_few_at_a_time(opened: Open) -> None:
    experiment = Experiment(opened(window=10, samples_per_class=2, rounds=1, capacity=60, max_classes=50))
    assert StreamSource(experiment, 0, AgreedClasses()).new_classes(1) == list("0123456789")
    assert StreamSource(experiment, 0, AgreedClasses(), tells=False).new_classes(1) == []
    assert wire.MOST_NEW_CLASSES >= 10


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"class_names": "1,cat"}, "class-names: 'cat' is no class of digits"),
        ({"method": "centralized"}, "method = 'centralized': .* works with classes = 'fixed' only"),
        (
            {"method": "fedframe", "max_classes": 12, "width": 1},
            "width = 1: .* and max-classes = 12, must be at least 2",
        ),
    ],
)
def test_what_does_not_fit_open_classes_is_refused_before_any_round(
    opened: Open, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Experiment(configured(opened(**changes))[1])
