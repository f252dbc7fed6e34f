"""DCFCL: both halves over the inline grid on digits, with clients that drop out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType
from support.doubles.faults import failed, on_training, only, with_array
from support.systems.runs import records, run

import fedkace_flwr.clients.dcfcl
import fedkace_flwr.strategies.dcfcl
from fedkace_flwr.algorithms.dcfcl_coalitions import Formation, form_coalitions
from fedkace_flwr.clients.base import ClientRound
from fedkace_flwr.clients.dcfcl import DcfclClient
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.messaging import wire
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import METHODS
from fedkace_flwr.rounds.server_round import ServerRound
from fedkace_flwr.strategies.base import client_drift, weighted_mean
from fedkace_flwr.strategies.dcfcl import Dcfcl
from fedkace_flwr.training.distillation import DistillationLoss
from fedkace_flwr.training.losses import Batch, TaskLoss

Make = Callable[..., Config]
Model = dict[str, np.ndarray]

SERVERS: list["Kept"] = []
OBJECTIVES: list[tuple[int, int, TaskLoss, torch.Tensor]] = []


class Kept(Dcfcl):
    """The rule, within reach of the test."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        SERVERS.append(self)
        self.partitions: list[tuple[tuple[int, ...], ...]] = []

    def trained(self, now: ServerRound, replies: Sequence[wire.Reply]) -> None:
        super().trained(now, replies)
        self.partitions.append(self.partition)


class Observed(DcfclClient):
    """The client, with its objectives within reach of the test."""

    def objective(self, net: Network, now: ClientRound) -> TaskLoss:
        teacher = self.logits(net, now.chunk)
        found = super().objective(net, now)
        assert isinstance(found, TaskLoss)
        OBJECTIVES.append((self.number, now.number, found, teacher))
        return found


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "dcfcl", replace(METHODS["dcfcl"], client=Observed, server=Kept))
    SERVERS.clear()
    OBJECTIVES.clear()


def parameter_names(config: Config) -> frozenset[str]:
    return Experiment(config).parameter_names


def same(first: Model, second: Model, names: Iterable[str] | None = None) -> bool:
    return all(first[name].tobytes() == second[name].tobytes() for name in names or first)


def always(monkeypatch: pytest.MonkeyPatch, *partition: tuple[int, ...]) -> None:
    """Let every game end alike."""
    players = sum(len(coalition) for coalition in partition)
    fixed = Formation(tuple(partition), 1, np.zeros(players))
    monkeypatch.setattr(fedkace_flwr.strategies.dcfcl, "form_coalitions", lambda *told: fixed)


def test_a_coalition_shares_the_mean_of_its_members_and_trains_on_from_it(small: Make) -> None:
    grid = run(small(method="dcfcl"))
    for number, partition in enumerate(SERVERS[0].partitions, 1):
        for coalition in partition:
            mean = weighted_mean([grid.model_returned(number, client) for client in coalition], [1] * len(coalition))
            for client in coalition:
                received = grid.model_sent(MessageType.EVALUATE, number, client)
                assert same(received, mean)
                if number < 3:
                    assert same(grid.model_sent(MessageType.TRAIN, number + 1, client), received)


def test_who_is_alone_keeps_its_own_bits(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, (0,), (1, 2))

    def negative_zero(number: int, client: int, reply: Message) -> Message:
        bias = np.full(10, -0.0, dtype=np.float32)
        return with_array("output.bias", bias)(reply) if client == 0 else reply

    grid = run(small(method="dcfcl", rounds=1), on_training(negative_zero))
    alone, first, second = (grid.model_sent(MessageType.EVALUATE, 1, client) for client in range(3))
    assert same(alone, grid.model_returned(1, 0))
    assert same(first, second) and not same(first, grid.model_returned(1, 1))
    assert not same(alone, first)


@pytest.mark.slow
def test_the_grand_coalition_without_distillation_is_federated_averaging(
    small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(monkeypatch, (0, 1, 2))
    monkeypatch.setattr(fedkace_flwr.clients.dcfcl, "LAMBDA", 0.0)
    ours = small(method="dcfcl", run_name="dcfcl")
    fedavg = small(method="fedavg", run_name="fedavg")
    grids = run(ours), run(fedavg)
    found = records(ours)
    assert [record.pop("coalitions") for record in found] == [[[0, 1, 2]]] * 3
    assert found == records(fedavg)  # bytes up and down and drift among them
    assert all(same(grids[0].model_sent(*place), grids[1].model_sent(*place)) for place in grids[1].places)


def test_drift_is_the_distance_from_the_own_coalition(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, (0, 2), (1,))
    config = small(method="dcfcl", rounds=1)
    grid = run(config)
    pair = [grid.model_returned(1, 0), grid.model_returned(1, 2)]
    names = parameter_names(config)
    expected = 2 / 3 * client_drift(pair, weighted_mean(pair, [1, 1]), names)
    assert records(config)[0]["client_drift"] == pytest.approx(expected)


NAN = with_array("output.bias", np.full(10, np.nan, dtype=np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("fault, words", [(failed, "disk on fire"), (NAN, "not finite")])
def test_a_client_that_drops_out_keeps_its_model_and_comes_back_alone(
    small: Make, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Message], Message], words: str
) -> None:
    starts = []

    def united(benefit: Any, start: Any) -> Formation:
        starts.append([list(coalition) for coalition in start])
        found = form_coalitions(benefit, start)
        return Formation((tuple(range(len(found.benefits))),), found.passes, found.benefits)

    monkeypatch.setattr(fedkace_flwr.strategies.dcfcl, "form_coalitions", united)
    config = small(method="dcfcl")
    grid = run(config, only(1, 2, fault))

    (failure,) = records(config)[1]["failures"]
    assert failure["client"] == 1 and failure["phase"] == "training" and words in failure["reason"]
    assert SERVERS[0].partitions == [((0, 1, 2),), ((0, 2),), ((0, 1, 2),)]
    assert [record["coalitions"] for record in records(config)] == [[[0, 1, 2]], [[0, 2]], [[0, 1, 2]]]
    assert starts == [[[0], [1], [2]], [[0, 1]], [[0, 2], [1]]]  # places among those who replied
    kept = grid.model_sent(MessageType.TRAIN, 2, 1)
    assert same(grid.model_sent(MessageType.EVALUATE, 2, 1), kept) and same(
        grid.model_sent(MessageType.TRAIN, 3, 1), kept
    )
    mean = weighted_mean([grid.model_returned(2, 0), grid.model_returned(2, 2)], [1, 1])
    assert same(grid.model_sent(MessageType.EVALUATE, 2, 0), mean) and same(
        grid.model_sent(MessageType.EVALUATE, 2, 2), mean
    )
    assert all(np.isfinite(array).all() for place in grid.places for array in grid.model_sent(*place).values())


@pytest.mark.slow
def test_coalitions_follow_the_updates_of_the_round_and_not_the_models(small: Make) -> None:
    """Client 2 moves against the other two, which then go together without it."""
    config = small(method="dcfcl")

    def act(number: int, client: int, reply: Message) -> Message:
        arrays = reply.content.array_records[wire.ARRAYS]
        start = wire.unpack(SERVERS[0].models[client])
        for name, value in start.items():
            if name in parameter_names(config):
                step = np.ones_like(value) * (-0.01 if client == 2 else 0.01)
                arrays[name] = wire.array_record({name: value + step})[name]
        return reply

    run(config, on_training(act))
    assert SERVERS[0].partitions == [((0, 1), (2,))] * 3


def test_distillation_begins_in_round_two_and_its_teacher_never_changes(small: Make) -> None:
    grid = run(small(method="dcfcl", rounds=2, epochs=2))
    assert [type(objective) for _, number, objective, _ in OBJECTIVES if number == 1] == [TaskLoss] * 3
    later = [(client, objective, teacher) for client, number, objective, teacher in OBJECTIVES if number == 2]
    assert len(later) == 3
    for client, objective, teacher in later:
        assert isinstance(objective, DistillationLoss)
        assert torch.equal(objective._teacher, teacher)
        assert same(grid.model_sent(MessageType.TRAIN, 2, client), grid.model_sent(MessageType.EVALUATE, 1, client))


def test_the_teacher_speaks_of_the_classes_met_before(small: Make) -> None:
    config = small(method="dcfcl", rounds=2)
    run(config)
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0), requires_grad=True)
    batch = _batch([0, 1, 2, 3], [0, 1, 2, 0])
    later = [(client, objective) for client, number, objective, _ in OBJECTIVES if number == 2]
    assert len(later) == 3
    for client, objective in later:
        weighed = objective.loss(logits, torch.zeros(4, 1), batch) - TaskLoss.loss(
            objective, logits, torch.zeros(4, 1), batch
        )
        (gradient,) = torch.autograd.grad(weighed, logits)
        spoken_of = gradient.abs().sum(dim=0) > 0
        met_before = torch.isin(torch.arange(10), torch.tensor(Experiment(config).stream(client).windows[0]))
        assert torch.equal(spoken_of, met_before)


def _batch(positions: list[int], labels: list[int]) -> Batch:
    count = len(positions)
    return Batch(
        torch.zeros(count, 3, 2, 2), torch.tensor(labels), torch.zeros(count, dtype=torch.bool), torch.tensor(positions)
    )


def test_the_loss_worked_by_hand() -> None:
    seen, old = torch.tensor([True, True, True, False]), torch.tensor([True, True, False, False])
    teacher = torch.tensor([[0.0, 0.0, 9.0, 9.0], [2.0, 0.0, 9.0, 9.0], [0.0, 4.0, 9.0, 9.0]])
    logits = torch.tensor([[1.0, 3.0, 2.0, 50.0], [0.0, 0.0, 1.0, 50.0]])
    loss = DistillationLoss(seen, old, teacher, 0.3, 2.0).loss(logits, torch.zeros(2, 1), _batch([2, 1], [2, 0]))

    plain = -(logits[0, :3].log_softmax(0)[2] + logits[1, :3].log_softmax(0)[0]) / 2
    soft = 0.0
    for row, place in enumerate([2, 1]):
        target = (teacher[place, :2] / 2).softmax(0)
        soft -= float((target * (logits[row, :2] / 2).log_softmax(0)).sum()) / 2
    assert float(loss) == pytest.approx(float(plain) + 0.3 * soft, abs=1e-6)


def test_a_client_that_comes_within_a_round_is_sent_the_common_model(small: Make) -> None:
    run(small(method="dcfcl", rounds=1))
    common = wire.array_record({"w": np.zeros(1, np.float32)})
    assert SERVERS[0].model_for(3, common) is common
