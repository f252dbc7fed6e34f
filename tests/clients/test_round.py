"""The client half, driven by messages as Flower drives it."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MessageType
from support.common import SMALL
from support.made.stored import read_state
from support.systems.in_process import Federation

from fedkace_flwr.clients.fedkace import BUFFER_ACCURACY, BUFFER_PROBABILITY, GAP, GAPS, REPLAY_WEIGHTS
from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore

Make = Callable[..., Config]


def test_training_changes_the_model_and_keeps_a_balanced_buffer(small: Make) -> None:
    federation = Federation(small())
    for number in (1, 2):
        reply = federation.train(0, number)
    stream = federation.experiment.stream(0)
    met = sorted({label for classes in stream.windows[:2] for label in classes})

    assert reply.examples == 16
    assert any(not np.array_equal(reply.weights[name], federation.weights[name]) for name in reply.weights)
    counts = reply.metrics[wire.BUFFER_CLASSES]
    assert [label for label, count in enumerate(counts) if count] == met
    assert max(counts) <= 20 // len(met)
    assert reply.metrics[wire.BUFFER_SIZE] == sum(counts) <= 20
    assert len(reply.metrics[REPLAY_WEIGHTS]) == 1 and reply.metrics[REPLAY_WEIGHTS][0] == 1.0


def test_buffer_holds_only_samples_that_the_stream_has_given(small: Make) -> None:
    federation = Federation(small())
    federation.train(1, 1)
    federation.train(1, 2)
    with np.load(_body(federation.state(1, 2))) as archive:
        ids, rounds = archive["buffer.content"], archive["buffer.rounds"]
    chunks = federation.experiment.stream(1).chunks
    assert len(set(ids.tolist())) == len(ids)
    assert all(sample in chunks[number - 1] for sample, number in zip(ids, rounds, strict=True))
    assert set(rounds.tolist()) == {1, 2}


def test_a_repeated_evaluation_is_answered_and_observes_the_gap_once(small: Make) -> None:
    federation = Federation(small())
    federation.train(0, 1)
    first, second = federation.evaluate(0, 1), federation.evaluate(0, 1)
    assert first == second
    assert len(gaps_of(federation, 0, 1)) == 1


def test_an_evaluation_that_came_before_the_training_of_its_round_is_made_again(small: Make) -> None:
    """The round is repeated by a server that was killed, and this client could not train the first time."""
    usual, repeated = (Federation(small(run_name=name, method="refed")) for name in ("usual", "repeated"))
    for federation in (usual, repeated):
        federation.train(0, 1)
        federation.evaluate(0, 1)
    repeated.evaluate(0, 2)
    for federation in (usual, repeated):
        federation.train(0, 2)
    assert repeated.evaluate(0, 2).metrics[wire.ACCURACY] == usual.evaluate(0, 2).metrics[wire.ACCURACY]
    states = [federation.store(0).before(3) for federation in (usual, repeated)]
    assert torch.equal(states[0].buffer.content, states[1].buffer.content)


def test_before_the_switch_the_local_model_answers(small: Make) -> None:
    federation = Federation(small())
    federation.train(0, 1)
    reply = federation.evaluate(0, 1)
    assert reply.metrics[wire.ACCURACY] == reply.metrics[wire.LOCAL_ACCURACY]
    assert wire.SWITCHED_AT not in reply.metrics and wire.GLOBAL_ACCURACY not in reply.metrics
    assert reply.metrics[GAP] == pytest.approx(
        max(0.0, reply.metrics[BUFFER_ACCURACY] - reply.metrics[BUFFER_PROBABILITY])
    )


def test_after_the_switch_the_global_model_answers_and_the_gap_is_no_longer_taken(small: Make) -> None:
    federation = Federation(small(rounds=5))
    federation.train(0, 1)
    _edit_state(federation.state(0, 1), global_since=1)
    reply = federation.evaluate(0, 1)
    assert reply.metrics[wire.SWITCHED_AT] == 1
    assert reply.metrics[wire.ACCURACY] == reply.metrics[wire.GLOBAL_ACCURACY]
    assert GAP not in reply.metrics
    assert wire.LOCAL_ACCURACY not in federation.train(0, 2).metrics
    assert wire.LOCAL_ACCURACY not in federation.evaluate(0, 2).metrics


def test_both_models_are_tested_when_asked_for(small: Make) -> None:
    federation = Federation(small(evaluate="both"))
    federation.train(0, 1)
    metrics = federation.evaluate(0, 1).metrics
    assert {wire.LOCAL_ACCURACY, wire.GLOBAL_ACCURACY} <= set(metrics)


def test_accuracy_is_on_the_test_images_of_the_classes_met(small: Make) -> None:
    federation = Federation(small())
    trained = federation.train(0, 1)
    reply = federation.evaluate(0, 1)
    experiment, classes = federation.experiment, federation.experiment.stream(0).windows[0]
    seen = torch.tensor([label in classes for label in range(10)])
    ids = np.concatenate([experiment.dataset.test_ids(label) for label in sorted(classes)])
    net = experiment.network({name: torch.from_numpy(array) for name, array in trained.weights.items()}).eval()
    with torch.inference_mode():
        images = experiment.dataset.fetch(torch.from_numpy(ids)).double() / 255
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (experiment.dataset.mean, experiment.dataset.std))
        logits = net(((images - mean) / std).float()).masked_fill(~seen, -torch.inf)
    expected = float((logits.argmax(1).numpy() == experiment.dataset.labels[ids]).mean())
    assert reply.examples == len(ids)
    assert reply.metrics[wire.ACCURACY] == pytest.approx(expected, abs=1.5 / len(ids))


def test_a_client_that_has_met_no_class_tests_nothing(small: Make) -> None:
    assert Federation(small()).evaluate(2, 1).examples == 0


def test_a_missed_round_leaves_the_client_with_its_last_answer(small: Make) -> None:
    federation = Federation(small())
    federation.train(0, 1)
    first, second = federation.evaluate(0, 1), federation.evaluate(0, 2)
    assert second.metrics[wire.ACCURACY] == first.metrics[wire.ACCURACY]
    assert len(gaps_of(federation, 0, 1)) == 2


def test_a_failed_round_leaves_the_state_as_it_was(small: Make) -> None:
    federation = Federation(small(learning_rate=1e30, weight_decay=0.0))
    reply = federation.send(MessageType.TRAIN, 0, 1)
    assert reply.has_error() and "learning-rate" in str(reply.error.reason)
    assert not federation.state(0, 1).exists()


Outcome = tuple[list[np.ndarray], object]
READ = {"epochs": 3, "rounds": 5, "capacity": 13}


def outcome(config: Config) -> Outcome:
    federation = Federation(config)
    replies = [federation.train(0, number) for number in (1, 2, 3, 4, 5)]
    with np.load(_body(federation.state(0, 5))) as archive:
        return [r.weights["output.weight"] for r in replies], archive["buffer.content"].tolist()


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    root = str(tmp_path_factory.mktemp("usual"))
    return outcome(Config.parse({**SMALL, **READ, "results-dir": root, "run-name": "usual"}))


@pytest.mark.slow
@pytest.mark.xdist_group("readings")
@pytest.mark.parametrize(
    "changes",
    [
        {"batching": "paired"},
        {"gradient_norm": "mean"},
        {"gradient_norm": "sum-with-bias"},
        {"replay_classes": "seen"},
        {"self_distance": "exclude"},
        {"quota": "all"},
        {"leftover": "fill"},
        {"selection": "hbms:5"},
        {"normalise": False},
    ],
)
def test_every_reading_makes_a_difference(small: Make, usual: Outcome, changes: dict[str, object]) -> None:
    other = outcome(small(**READ, run_name="other", **changes))
    same_weights = all(np.array_equal(a, b) for a, b in zip(usual[0], other[0], strict=True))
    assert not (same_weights and usual[1] == other[1])


def _body(path: Path) -> io.BytesIO:
    return io.BytesIO(path.read_bytes()[32:])


def gaps_of(federation: Federation, client: int, round_number: int) -> list[float]:
    return read_state(federation.state(client, round_number)).extra[GAPS].tolist()


def _edit_state(path: Path, **changes: Any) -> None:
    """Change fields of a stored state through the store itself."""
    empty = ClientState(seen=torch.zeros(10, dtype=torch.bool), buffer=Samples.none())
    store = ClientStore(path.parent, empty)
    number = int(path.stem.removeprefix("state-"))
    store.save(replace(store.before(number + 1), **changes))
