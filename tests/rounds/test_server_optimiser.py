"""Rounds with an optimiser at the server: what it moves, and that it is resumed, undone and refused as it should be."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from support.doubles.faults import FaultyGrid
from support.systems.runs import EVALUATE, TRAIN, failing, folder_of, last, records, run, same

from fedkace_flwr import server_app
from fedkace_flwr.algorithms.server_optimisers import ServerOptimiser
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.registry import METHODS
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.rounds.gate import Gate
from fedkace_flwr.storage.checkpoint import Checkpoints
from fedkace_flwr.strategies.base import Aggregator

Make = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")

ADAM = {"server_optimiser": "adam:0.1", "method": "er"}
CLIENTS = range(3)


@pytest.mark.parametrize("aggregation", ["mean", "median"])
def test_it_steps_towards_the_aggregate_and_leaves_statistics_alone(made: Make, aggregation: str) -> None:
    config = made(**ADAM, aggregation=aggregation)
    grid = run(config)
    parameters = Experiment(config).parameter_names
    optimiser, aggregate = ServerOptimiser("adam", 0.1), Aggregator(config.aggregation, parameters)
    for number in (1, 2, 3):
        before, after = grid.model_sent(TRAIN, number, 0), grid.model_sent(EVALUATE, number, 0)
        middle = aggregate([grid.model_returned(number, client) for client in CLIENTS], [1.0] * 3)
        expected = optimiser.step(before, middle, parameters)
        assert all(np.array_equal(after[name], array) for name, array in expected.items())
        others = [name for name in after if name not in parameters]
        assert all(np.array_equal(after[name], middle[name]) for name in others)
        assert any(name.endswith("running_var") for name in others)
        assert not np.array_equal(after["output.weight"], middle["output.weight"])


@pytest.mark.parametrize("word", ["momentum", "yogi"])
def test_a_run_that_is_cut_off_again_and_again_equals_an_undisturbed_one(made: Make, word: str) -> None:
    whole, pieces = made("whole", server_optimiser=word), made("pieces", server_optimiser=word, resume=True)
    run(whole)
    cuts = 0
    while not (folder_of(pieces) / "summary.json").exists():
        left = 2 + 3 * cuts

        def cut(kind: str, number: int, client: int, reply: Message) -> Message:
            nonlocal left
            left -= 1
            if left < 0:
                raise SystemExit("cut off")
            return reply

        try:
            server_app.run(FaultyGrid(pieces, cut), pieces, run_id=1)
        except SystemExit:
            cuts += 1
    assert cuts > 2 and records(pieces) == records(whole) and same(last(pieces), last(whole))
    assert any(name.startswith("server-optimiser.") for name in last(whole).arrays)


def test_a_held_round_leaves_no_momentum(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third round is held, whatever its model is worth."""
    judge = Gate.judge
    config = made(**ADAM, gate="hold", rounds=4)
    kept = {}

    def look(kind: str, number: int, client: int, reply: Message) -> Message:
        if kind == TRAIN and client == 0 and number > 1:
            kept[number - 1] = last(config)
        return reply

    def held(gate: Gate, replies: Any) -> dict[str, Any]:
        return {**judge(gate, replies), "held": 2 in kept and 3 not in kept}

    monkeypatch.setattr(Gate, "judge", held)
    run(config, look)
    assert [line["gate"]["held"] for line in records(config)[1:]] == [False, True, False]
    assert same(kept[2], kept[3]) and not same(kept[3], last(config))


def test_a_rollback_takes_the_optimiser_back(made: Make) -> None:
    config = made(**ADAM, gate="hold", gate_tolerance=1.0, rounds=4)
    orders = Orders(folder_of(config))

    def order(kind: str, number: int, client: int, reply: Message) -> Message:
        if (kind, number, client) == (EVALUATE, 3, 0):
            orders.roll_back(1)
        return reply

    run(config, order)
    assert records(config)[3]["rolled_back_to"] == 1
    past = Checkpoints(folder_of(config) / "server")
    assert same(past.of_round(1), last(config)) and not same(past.of_round(3), last(config))


def test_a_round_that_is_skipped_is_no_step(made: Make) -> None:
    config = made(**ADAM, rounds=2, below_quorum="skip")
    run(config, failing((TRAIN, 2, 0), (TRAIN, 2, 1)))
    first = made("first", **ADAM, rounds=1)
    run(first)
    assert same(last(config), last(first))


@pytest.mark.parametrize("keys", [{"secagg": True}, {"dp": "central", "dp_seeded": True, "dp_noise": 0.01}])
def test_masked_and_noised_means_are_stepped_towards(made: Make, keys: dict[str, Any]) -> None:
    """By a rate of 1, the first step of momentum ends at the mean, and half the rate goes half the way."""
    models = {}
    for rate in ("none", "momentum:1", "momentum:0.5"):
        config = made(rate.replace(":", "-"), method="er", server_optimiser=rate, rounds=1, **keys)
        run(config)
        models[rate] = last(config).weights
    parameters = Experiment(config).parameter_names
    start = {name: tensor.numpy() for name, tensor in Experiment(config).initial_weights().items()}
    for name, mean in models["none"].items():
        half = (start[name] + mean) / 2 if name in parameters else mean
        assert np.allclose(models["momentum:1"][name], mean, rtol=0, atol=1e-4)
        assert np.allclose(models["momentum:0.5"][name], half, rtol=0, atol=1e-4)


def test_methods_whose_server_takes_no_mean_refuse_it(made: Make) -> None:
    refused = set()
    for name in METHODS:
        config = made(method=name, server_optimiser="yogi:0.1")
        try:
            configured(config)
        except ConfigError as error:
            refused.add(name)
            assert str(error).startswith(f"server-optimiser = 'yogi:0.1' with method = {name!r}: ")
            assert str(error).endswith("; must be 'none'") and "\n" not in str(error)
    assert refused == {"tfcl", "afl", "fed-talora", "dcfcl", "lkc", "centralized"}
