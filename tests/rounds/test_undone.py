"""What servers with a state of their own hold after replies that were lost, held rounds, and a rollback."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType
from support.doubles.faults import FaultyGrid
from support.systems.runs import EVALUATE, TRAIN, folder_of, records, run

from fedkace_flwr.clients.scaffold import CONTROL, PREFIX
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.messaging import wire
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.training.loop import features_of

Make = Callable[..., Config]
pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.slow]

LOST = (2, 1)
COUNTED = {4: (1, 2, 3), 5: (1, 2, 3), 6: (1, 2, 3), 8: (1, 2)}
"""For rounds, those before them that count."""


def disturbed(made: Make, method: str, **keys: Any) -> tuple[Config, FaultyGrid]:
    """Client 1's reply of round 2 is lost, rounds 4 and 5 are held, round 7 goes back to 2, and round 8 is the last."""
    config = made(method=method, rounds=8, gate="hold", quorum=0.5, **keys)
    orders = Orders(folder_of(config))

    def disturb(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if kind == TRAIN and (number, client) == LOST:
            return None
        if kind == f"{MessageType.QUERY}.{wire.GATE}":
            counts = reply.content.metric_records[wire.METRICS]
            counts[wire.GATE_CANDIDATE] = 0 if number in (4, 5) else counts[wire.GATE_TESTED]
            counts[wire.GATE_ACCEPTED] = counts[wire.GATE_TESTED]
        if (kind, number, client) == (EVALUATE, 6, 0):
            orders.roll_back(2)
        return reply

    grid = run(config, disturb)
    lines = records(config)
    assert [line["round"] for line in lines if line.get("gate", {}).get("held")] == [4, 5]
    assert lines[6]["rolled_back_to"] == 2
    return config, grid


def head(config: Config, chunks: Iterable[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """The ridge regression over clients' rounds."""
    experiment, pairs = Experiment(config), list(chunks)
    ids = torch.cat([experiment.chunk(client, number).content for client, number in pairs])
    labels = torch.cat([experiment.chunk(client, number).labels for client, number in pairs])
    net = experiment.network(experiment.initial_weights())
    features = features_of(net, experiment.dataset.fetch, ids, experiment.preprocess).double().numpy()
    gram = features.T @ features + np.eye(features.shape[1])
    solved: np.ndarray[Any, Any] = np.linalg.solve(gram, features.T @ np.eye(experiment.num_classes)[labels.numpy()])
    return solved.T


def test_afl_counts_what_was_in_rounds_that_are_undone_never_and_the_rest_once(made: Make) -> None:
    """What client 1 sends again in round 3 is counted then, and is undone with it."""
    config, grid = disturbed(made, "afl")
    for after, rounds in ((3, (1, 2, 3)), (6, (1, 2, 3, 6)), (8, (1, 2, 8))):
        pairs = {(client, number) for client in range(3) for number in rounds}
        wanted = head(config, sorted(pairs if 3 in rounds else pairs - {LOST[::-1]}))
        found = grid.model_sent(EVALUATE, after, 0)["output.weight"]
        assert np.abs(found - wanted).max() < 1e-6, after


def test_scaffold_corrects_with_the_control_variates_that_count(made: Make) -> None:
    """Each client is told the mean of all clients' control variates minus its own; they are 0 at first."""
    _, grid = disturbed(made, "scaffold")
    for number, rounds in COUNTED.items():
        held = {
            client: grid.model_returned(max(each for each in rounds if (each, client) != LOST), client)
            for client in range(3)
        }
        for client, crossing in grid.of(TRAIN, number).items():
            told = wire.unpack(crossing.down.array_records[CONTROL])
            assert told and any(each.any() for each in told.values())
            for name, array in told.items():
                mean = np.mean([each[name] for each in held.values()], axis=0)
                assert name.startswith(PREFIX)
                np.testing.assert_allclose(array, mean - held[client][name], rtol=1e-3, atol=1e-5)


def test_fed_talora_sends_the_weights_that_are_accepted(made: Make) -> None:
    _, grid = disturbed(made, "fed-talora", learning_rate=0.02)
    models = {number: grid.model_sent(TRAIN, number, 2) for number in (3, 4, 5, 6, 8)}
    for same in ((4, 5), (4, 6), (3, 8)):
        one, other = (models[number] for number in same)
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert any(not np.array_equal(models[3][name], models[4][name]) for name in models[3] if "lora" not in name)
