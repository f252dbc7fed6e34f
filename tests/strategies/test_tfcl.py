"""The server of TFCL: the networks that it teaches, and whole runs with bad and lost replies."""

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, Message
from support.systems.runs import records, run

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import Reply
from fedkace_flwr.strategies.tfcl import teach

Make = Callable[..., Config]
SHAPE = {"method": "tfcl", "epochs": 2, "tfcl_server_epochs": 2, "weight_decay": 1e-3}


def lesson(client: int, size: int) -> Reply:
    rng = np.random.default_rng(client)
    seen = np.isin(np.arange(10), [client, client + 1])
    weights = {
        "features": rng.normal(size=(size, 8, 4, 4)).astype(np.float32),
        "logits": rng.normal(size=(size, 10)).astype(np.float32),
        "labels": rng.choice([client, client + 1], size),
        "seen": seen,
    }
    return Reply(client, weights, size, {})


def test_each_client_gets_its_own_samples_logits_in_its_own_order_whoever_answered_first(small: Make) -> None:
    config = small(**SHAPE)
    lessons = {client: lesson(client, size) for client, size in ((0, 5), (1, 9), (2, 3))}
    taught = teach(lessons, 10, config, 1)
    other = teach(dict(reversed(lessons.items())), 10, config, 1)
    assert {client: logits.shape for client, logits in taught.items()} == {0: (5, 10), 1: (9, 10), 2: (3, 10)}
    assert all(np.array_equal(taught[client], other[client]) for client in taught)
    assert not np.array_equal(taught[0], teach(lessons, 10, config, 2)[0])


def test_the_servers_network_learns_the_labels(small: Make) -> None:
    lessons = {client: lesson(client, 12) for client in (0, 5)}
    taught = teach(lessons, 10, small(**{**SHAPE, "tfcl_server_epochs": 15}), 1)
    for client, logits in taught.items():
        told = lessons[client].weights
        predicted = np.where(told["seen"], logits, -np.inf).argmax(1)
        assert (predicted == told["labels"]).mean() > 0.9
        swapped = taught[client][::-1]
        assert (np.where(told["seen"], swapped, -np.inf).argmax(1) == told["labels"]).mean() < 0.9


def test_nobody_to_teach_is_no_error(small: Make) -> None:
    assert teach({}, 10, small(**SHAPE), 1) == {}


def test_a_diverging_network_is_an_error_of_its_own(small: Make) -> None:
    with pytest.raises(RunError):
        teach({0: lesson(0, 8)}, 10, small(**{**SHAPE, "learning_rate": 1e30}), 1)


# Whole runs


def spoilt(name: str, array: np.ndarray) -> Callable[[Message], Message]:
    def act(reply: Message) -> Message:
        reply.content.array_records[wire.ARRAYS][name] = Array(array)
        return reply

    return act


FAULTS = {
    "nan": (spoilt("features", np.full((16, 8, 4, 4), np.nan, dtype=np.float32)), "'features' holds values that are"),
    "order": (spoilt("features", np.zeros((8, 16, 4, 4), dtype=np.float32)), "not float32"),
    "size": (spoilt("features", np.zeros((16, 8, 2, 2), dtype=np.float32)), "others'"),
    "flat": (spoilt("features", np.zeros((16, 8), dtype=np.float32)), "not float32 (0, 8, 0, 0)"),
    "labels": (spoilt("labels", np.full(16, 10)), "a class that the client has not met"),
    "silence": (lambda reply: None, "did not accept"),
}


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_is_left_out_and_named_and_its_sender_comes_back(small: Make, fault: str) -> None:
    act, words = FAULTS[fault]

    def meddle(kind: str, number: int, client: int, reply: Message) -> Message | None:
        return act(reply) if (kind, number, client) == ("train.head", 1, 1) else reply

    config = small(**SHAPE, rounds=2)
    grid = run(config, meddle)
    first, second = records(config)
    (failure,) = first["failures"]
    assert (failure["client"], failure["phase"]) == (1, "training") and words in failure["reason"]
    assert second["failures"] == []
    assert ("train.tail", 1, 1) not in grid.places
    assert ("train.tail", 2, 1) in grid.places
    assert first["client_accuracy"][1] is not None  # it ends its round by labels alone


@pytest.mark.slow
def test_a_client_whose_answer_gets_lost_ends_its_round_all_the_same(small: Make) -> None:
    def meddle(kind: str, number: int, client: int, reply: Message) -> Message | None:
        return None if (kind, number, client) == ("train.tail", 1, 0) else reply

    config = small(**SHAPE, rounds=2)
    run(config, meddle)
    first, second = records(config)
    assert [(f["client"], f["phase"]) for f in first["failures"]] == [(0, "tail")]
    assert second["failures"] == [] and None not in first["client_accuracy"]


def test_too_few_good_replies_stop_the_run(small: Make) -> None:
    def meddle(kind: str, number: int, client: int, reply: Message) -> Message | None:
        return FAULTS["nan"][0](reply) if kind == "train.head" and client < 2 else reply

    with pytest.raises(RunError, match=r"round 1, training: 1 of 3 clients gave a valid reply.*client 0"):
        run(small(**SHAPE), meddle)


def test_a_diverging_server_leaves_the_clients_to_themselves(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedkace_flwr.strategies import tfcl

    def diverge(*args: object) -> None:
        raise RunError("epoch 1: the training loss is not finite")

    monkeypatch.setattr(tfcl, "teach", diverge)
    config = small(**SHAPE, rounds=1)
    assert "train.tail" not in {kind for kind, _, _ in run(config).places}
    assert None not in records(config)[0]["client_accuracy"]
