"""The gate: which candidates are held, and what a held or undone round leaves behind."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message, MessageType
from support.doubles.faults import FaultyGrid
from support.made.stored import read_state
from support.systems.runs import EVALUATE, TRAIN, failing, folder_of, last, records, run, same

from fedkace_flwr import server_app
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError, MessageError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import Reply
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.rounds.gate import Gate, check
from fedkace_flwr.sections import RunConfig
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints

Make = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")

GATE = f"{MessageType.QUERY}.{wire.GATE}"
ROUNDS = {"gate": "hold", "rounds": 6, "method": "er", "gate_tolerance": 0.2, "epochs": 4, "window": 4}
BAD = (3, 4)


def counted(tested: int, candidate: int, accepted: int, client: int = 0) -> Reply:
    numbers = {wire.GATE_TESTED: tested, wire.GATE_CANDIDATE: candidate, wire.GATE_ACCEPTED: accepted}
    return Reply(client, {}, tested, numbers)


def spoilt(kind: str, number: int, client: int, reply: Message) -> Message:
    """In two rounds everyone sends a model whose weights have changed places."""
    if kind == TRAIN and number in BAD:
        record = reply.content.array_records[wire.ARRAYS]
        for name in [name for name in record if name.endswith("weight")]:
            array = record[name].numpy()
            record[name] = Array(np.random.default_rng(0).permutation(array.ravel()).reshape(array.shape))
    return reply


# The verdict


def test_all_samples_count_alike_and_nobody_with_none_does() -> None:
    gate = Gate(RunConfig(gate="hold", gate_tolerance=0.1))
    assert not gate.judges, "the first model replaces an untrained one"
    gate.settle(1, held=False)
    assert gate.judges
    verdict = gate.judge([counted(80, 60, 70), counted(20, 20, 20), counted(0, 0, 0)])
    assert verdict == {"candidate": 0.8, "accepted": 0.9, "tested": 100, "held": False}, "worse by the tolerance"
    assert gate.judge([counted(80, 59, 70), counted(20, 20, 20)])["held"]
    assert gate.judge([counted(0, 0, 0)]) == {"candidate": None, "accepted": None, "tested": 0, "held": False}


def test_rounds_that_are_undone_are_told_as_spans() -> None:
    gate = Gate(RunConfig(gate="hold"))
    for number, held in enumerate((False, True, True, False, True), 1):
        gate.settle(number, held=held)
    assert gate.told() == {wire.UNDONE: [2, 3, 5, 5]}
    at_four = {"accepted": 4, "undone": [(2, 3)]}
    gate.undo(at_four, 4, 9)
    assert gate.told() == {wire.UNDONE: [2, 3, 5, 9]} and gate.state()["accepted"] == 4
    again = Gate(RunConfig())
    again.restore(json.loads(json.dumps(gate.state())), 9)
    assert again.told() == gate.told()
    gate.undo({"accepted": 8, "undone": [[2, 3]]}, 8, 10)
    assert gate.told() == {wire.UNDONE: [2, 3, 9, 10]}, "forwards again"
    again.restore({}, 7)
    assert again.state() == {"accepted": 7, "undone": []}, "of an earlier version"


@pytest.mark.parametrize("counts", [(10, 11, 3), (10, 3, 11)])
def test_more_right_answers_than_samples_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(MessageError, match=r"gate-tested"):
        check(counted(*counts))
    with pytest.raises(MessageError):
        check(Reply(0, {}, 1, {wire.GATE_TESTED: 1}))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"method": "dcfcl"}, r"^gate = 'hold' with method = 'dcfcl': each coalition .*; must be 'off'$"),
        ({"method": "er", "dp": "central"}, r"^gate = 'hold' with dp = 'central': .*; must be 'off'$"),
    ],
)
def test_what_does_not_fit_a_gate_is_refused(made: Make, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(made(gate="hold", **keys))


# Rounds


@pytest.mark.parametrize(
    "method",
    ["er", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fedkace", "refed", "fedcbdr", "fedframe"))],
)
def test_a_held_round_has_not_been(made: Make, method: str) -> None:
    """Model, server's state, buffers, classes met and predictions are those from before."""
    tolerance = {"fedkace": 0.15, "fedframe": 0.1}.get(method, 0.2)  # their first models have less to lose
    config = made(**{**ROUNDS, "method": method, "gate_tolerance": tolerance})
    at: dict[int, Checkpoint] = {}

    def look(kind: str, number: int, client: int, reply: Message) -> Message:
        if number > 1 and number - 1 not in at:
            at[number - 1] = last(config)
        return spoilt(kind, number, client, reply)

    grid = run(config, look)
    lines = records(config)
    assert [line["round"] for line in lines if line.get("gate", {}).get("held")] == [*BAD]
    assert "gate" not in lines[0] and lines[1]["gate"]["tested"] > 0
    assert [(alarm["kind"], alarm["client"]) for alarm in lines[2]["alarms"]] == [("gate", None)]
    assert "alarms" not in lines[1] and "alarms" not in lines[4]
    if method == "fedkace":
        assert [None not in line["gap"] for line in lines[:4]] == [True, True, False, False], "no gap of an old model"
    for number in BAD:
        assert same(at[2], at[number]) and at[number].record["gate"]["accepted"] == 2
        for client, evaluation in grid.of(EVALUATE, number).items():
            sent = wire.unpack(evaluation.down.array_records[wire.ARRAYS])
            assert all(np.array_equal(sent[name], array) for name, array in at[2].weights.items()), client
    assert at[5].record["gate"] == {"accepted": 5, "undone": [[3, 4]]}
    for client in range(3):
        state = read_state(folder_of(config) / "clients" / f"client-{client:03d}" / "state-000006.npz")
        assert not np.isin(state.buffer.rounds, BAD).any() and len(state.buffer)


def test_a_client_goes_back_to_its_memory_and_predicts_with_the_accepted_model(made: Make) -> None:
    config = made(**{**ROUNDS, "predict_with": "mean", "rounds": 4})
    kept: dict[int, Any] = {}

    def look(kind: str, number: int, client: int, reply: Message) -> Message:
        folder = folder_of(config) / "clients" / "client-000"
        if client == 0 and kind == EVALUATE and number in (2, *BAD):
            kept[number] = read_state(folder / f"state-{number:06d}.npz")
        return spoilt(kind, number, client, reply)

    run(config, look)
    before = kept[2]
    for number in BAD:
        after = kept[number]
        assert after.round == number and not after.has_local_model
        assert torch.equal(after.buffer.content, before.buffer.content) and torch.equal(after.seen, before.seen)
        assert wire.LOCAL_ACCURACY not in after.evaluation
        assert after.evaluation[wire.ACCURACY] == after.evaluation[wire.GLOBAL_ACCURACY]


def test_a_run_with_held_rounds_that_is_cut_off_again_and_again_equals_an_undisturbed_one(made: Make) -> None:
    whole, pieces = made("whole", **ROUNDS), made("pieces", resume=True, **ROUNDS)
    run(whole, spoilt)
    cuts = 0
    while not (folder_of(pieces) / "summary.json").exists():
        left = 2 + 3 * cuts

        def cut(kind: str, number: int, client: int, reply: Message) -> Message:
            nonlocal left
            left -= 1
            if left < 0:
                raise SystemExit("cut off")
            return spoilt(kind, number, client, reply)

        try:
            server_app.run(FaultyGrid(pieces, cut), pieces, run_id=1)
        except SystemExit:
            cuts += 1
    assert cuts > 3 and records(pieces) == records(whole) and same(last(pieces), last(whole))
    assert sum("gate" in line and line["gate"]["held"] for line in records(whole)) == 2


def test_without_a_verdict_everyone_keeps_the_accepted_model(made: Make) -> None:
    config = made(**{**ROUNDS, "rounds": 3}, below_quorum="skip")
    grid = run(config, failing((GATE, 3, 0), (GATE, 3, 1)))
    _, second, third = records(config)
    assert second["gate"]["held"] is False and third["below_quorum"] == ["gate"]
    assert third["gate"] == {"candidate": None, "accepted": None, "tested": 0, "held": True}
    assert None not in third["client_accuracy"] and last(config).record["gate"]["accepted"] == 2
    sent = [wire.unpack(grid.of(EVALUATE, number)[0].down.array_records[wire.ARRAYS]) for number in (2, 3)]
    assert all(np.array_equal(sent[0][name], sent[1][name]) for name in sent[0])


def test_a_gate_below_the_quorum_is_repeated(made: Make) -> None:
    config, whole = made(**ROUNDS, below_quorum="repeat"), made("whole", **ROUNDS)
    run(config, failing((GATE, 3, 0), (GATE, 3, 1), times=2))
    run(whole)
    assert records(config)[2]["repeated"] == {"gate": 2}
    numbers = [[line["client_accuracy"] for line in records(each)] for each in (config, whole)]
    assert numbers[0] == numbers[1]


def test_a_false_count_is_left_out(made: Make) -> None:
    def lie(reply: Message) -> Message:
        reply.content.metric_records[wire.METRICS][wire.GATE_ACCEPTED] = 10**6
        return reply

    config = made(**{**ROUNDS, "rounds": 2})
    run(config, lambda *told: lie(told[-1]) if told[:-1] == (GATE, 2, 1) else told[-1])
    (failure,) = records(config)[1]["failures"]
    assert (failure["client"], failure["phase"]) == (1, "gate")


# Wrong labels


TRIAL = {
    "attack": "brief-label-flip:11",
    "hostile_clients": 3,
    "clients": 4,
    "capacity": 60,
    "epochs": 5,
    "width": 8,
    "rounds": 18,
}
ALL_CLASSES = {"window": 10, "overlap": 9, "samples_per_class": 5}
TWO_CLASSES = {"window": 2, "overlap": 1, "samples_per_class": 20}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("method", "stream", "loss"),
    [("er", ALL_CLASSES, 0.15), ("fedkace", TWO_CLASSES, 0.15), ("fedframe", TWO_CLASSES, 0.1)],
)
def test_labels_swapped_on_three_of_four_devices_cost_little_with_the_gate(
    made: Make, method: str, stream: dict[str, Any], loss: float
) -> None:
    found = {}
    for gate in ("off", "hold"):
        config = made(gate, **TRIAL, **stream, method=method, gate=gate)
        run(config)
        found[gate] = [line["accuracy"] for line in records(config)]
    assert min(found["off"][10:15]) < found["off"][9] - loss
    assert min(found["hold"][10:]) > found["hold"][9] - 0.03


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("method", ["fedframe", "er"])
def test_one_command_restores_what_wrong_labels_have_spoilt_without_a_gate(made: Make, method: str) -> None:
    """FedFrame predicts with a local model as well, and adapts the global one to samples of the client's."""
    config = made(**TRIAL, **ALL_CLASSES, method=method, gate="hold", gate_tolerance=1.0)
    orders = Orders(folder_of(config))

    def order(kind: str, number: int, client: int, reply: Message) -> Message:
        if (kind, number, client) == (EVALUATE, 15, 3):
            orders.roll_back(10)
        return reply

    run(config, order)
    lines = records(config)
    accuracies = [line["accuracy"] for line in lines]
    assert accuracies[14] < accuracies[9] - 0.15
    assert lines[15]["rolled_back_to"] == 10
    assert min(accuracies[15], accuracies[17]) > accuracies[9] - 0.03


# Rollback


def test_a_round_goes_back_and_the_next_one_trains_from_there(made: Make) -> None:
    config, whole = made(**ROUNDS, resume=True), made("whole", **ROUNDS)
    orders = Orders(folder_of(config))

    def order(kind: str, number: int, client: int, reply: Message) -> Message:
        if (kind, number, client) == (EVALUATE, 4, 0):
            orders.roll_back(3)
            orders.roll_back(2)  # the newest counts
        if (kind, number, client) == (EVALUATE, 5, 1) and not orders_seen:
            orders_seen.append(orders.rollback)
            raise SystemExit("cut off")
        return reply

    orders_seen: list[int | None] = []
    with pytest.raises(SystemExit):
        run(config, order)
    grid = run(config, order)  # the round is repeated
    run(whole)
    lines = records(config)
    assert orders_seen == [2] and orders.rollback is None and list((folder_of(config) / "orders").iterdir()) == []
    fifth = lines[4]
    assert fifth["rolled_back_to"] == 2 and "gate" not in fifth and fifth["buffer_size"] == [None] * 3
    assert fifth["accuracy"] is not None and "rolled_back_to" not in lines[5]
    past = Checkpoints(folder_of(config) / "server").of_round(2)
    assert not grid.of(TRAIN, 5)
    for kind, number in ((EVALUATE, 5), (TRAIN, 6)):
        for crossing in grid.of(kind, number).values():
            sent = wire.unpack(crossing.down.array_records[wire.ARRAYS])
            assert all(np.array_equal(sent[name], array) for name, array in past.weights.items())
            assert crossing.down.config_records[wire.CONFIG][wire.UNDONE] == [3, 5]
    for client in range(3):
        folder = folder_of(config) / "clients" / f"client-{client:03d}"
        states = [read_state(path) for path in sorted(folder.glob("state-*.npz"))]
        assert not np.isin(states[-1].buffer.rounds, (3, 4)).any()
        labels = [Experiment(config).chunk(client, number).labels for number in (1, 2, 6)]
        assert states[-1].seen.nonzero().flatten().tolist() == sorted(set(torch.cat(labels).tolist()))
    assert [each["accuracy"] for each in lines[:4]] == [each["accuracy"] for each in records(whole)[:4]]


def test_an_order_for_a_model_that_is_gone_costs_nothing(made: Make, caplog: pytest.LogCaptureFixture) -> None:
    config = made(**{**ROUNDS, "rounds": 3})
    orders = Orders(folder_of(config))

    def order(kind: str, number: int, client: int, reply: Message) -> Message:
        if (kind, number, client) == (EVALUATE, 1, 0):
            orders.roll_back(7)
        return reply

    run(config, order)
    assert len(records(config)) == 3 and orders.rollback is None
    assert "cannot go back to round 7" in caplog.text


def test_a_simulation_without_a_gate_keeps_no_past_models(made: Make) -> None:
    config, holds, none = made(), made("holds", gate="hold", method="er"), made("none", gate="hold", past_models=0)
    for each in (config, holds, none):
        run(each)
    kept = [sorted(path.name for path in (folder_of(each) / "server").glob("past/*")) for each in (config, holds, none)]
    assert kept == [[], [f"checkpoint-{number:06d}.npz" for number in (1, 2, 3)], []]
