"""FedCBDR: leverage through masks, temperatures, and its rounds over the inline grid."""

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Error, Message, MessageType, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from support.common import rounds_of
from torch import Tensor

from clients.fedcbdr import FedCbdrClient
from experiments.running.inline import InlineGrid, run_inline
from fedkace_flwr import client_app
from fedkace_flwr.algorithms import fedcbdr_leverage as cbdr
from fedkace_flwr.algorithms.fedcbdr_loss import TemperatureLoss, TwiceScaledLoss
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods import fedcbdr as fedcbdr_names
from fedkace_flwr.registry import METHODS, Method
from fedkace_flwr.rounds.round_report import RoundReport
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.training.losses import Batch, TaskLoss
from strategies.fedcbdr import FedCbdr

Make = Callable[..., Config]
ACTIONS = (fedcbdr_names.FEATURES_QUERY, fedcbdr_names.SCORES_QUERY)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """The method under its name, whether or not the package already knows it."""
    with pytest.MonkeyPatch.context() as patch:
        if "fedcbdr" not in METHODS:
            patch.setitem(METHODS, "fedcbdr", Method(FedCbdr, FedCbdrClient, actions=ACTIONS))
            for action in ACTIONS:
                client_app._register(action)
        yield


# Leverage


def pinv_leverage(stacked: Tensor) -> Tensor:
    """x_j (X^T X)^+ x_j^T, in NumPy."""
    x = stacked.numpy()
    return torch.from_numpy(np.einsum("ij,jk,ik->i", x, np.linalg.pinv(x.T @ x, rcond=1e-10, hermitian=True), x))


def federated_leverage(
    clients: list[Tensor], seed: int, *, joint: bool = True, off: bool | None = None
) -> list[Tensor]:
    """As the two halves do it; ``off``: the clients take their masks off again."""
    lefts = [cbdr.random_orthogonal(len(x), generator_for(seed, "p", k)) for k, x in enumerate(clients)]
    right = cbdr.random_orthogonal(clients[0].shape[1], generator_for(seed, "q"))
    masked = [cbdr.mask(x, left, right) for x, left in zip(clients, lefts, strict=True)]
    together = torch.split(cbdr.left_factor(torch.cat(masked)), [len(x) for x in clients])
    rows = together if joint else [cbdr.left_factor(x) for x in masked]
    off = joint if off is None else off
    return [cbdr.leverage(cbdr.unmask(u, p) if off else u) for u, p in zip(rows, lefts, strict=True)]


def features(seed: int, sizes: Iterable[int] = (30, 22, 41), width: int = 12) -> list[Tensor]:
    generator = generator_for(seed, "features")
    return [torch.randn(n, width, dtype=torch.float64, generator=generator).relu().exp() - 1 for n in sizes]


def test_a_random_orthogonal_matrix_is_orthogonal_and_the_streams() -> None:
    first, again, other = (cbdr.random_orthogonal(20, generator_for(0, "q", round)) for round in (1, 1, 2))
    assert torch.allclose(first @ first.T, torch.eye(20, dtype=torch.float64), atol=1e-12)
    assert torch.equal(first, again) and not torch.allclose(first, other)


@pytest.mark.parametrize("seed", range(3))
def test_unmasked_scores_are_the_leverage_of_all_features_together(seed: int) -> None:
    clients = features(seed)
    scores = torch.cat(federated_leverage(clients, seed))
    stacked = torch.cat(clients)
    plain = torch.from_numpy(np.linalg.svd(stacked.numpy(), full_matrices=False)[0]).square().sum(dim=1)
    assert torch.allclose(scores, plain, rtol=0, atol=1e-8)
    assert torch.allclose(scores, pinv_leverage(stacked), rtol=0, atol=1e-8)
    assert float(scores.sum()) == pytest.approx(12, abs=1e-8)
    assert float(scores.min()) >= 0 and float(scores.max()) <= 1 + 1e-9


def test_scores_do_not_depend_on_the_masks() -> None:
    clients = features(3)
    for one, other in zip(federated_leverage(clients, 1), federated_leverage(clients, 2), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-8)


def test_with_the_mask_on_only_a_clients_total_is_right() -> None:
    clients = features(4)
    true, masked = federated_leverage(clients, 1), federated_leverage(clients, 1, off=False)
    for one, other in zip(true, masked, strict=True):
        assert float(one.sum()) == pytest.approx(float(other.sum()), abs=1e-8)
        assert not torch.allclose(one, other, rtol=0, atol=1e-2)


def test_the_published_codes_scores_are_right_in_sum_alone_and_follow_the_mask() -> None:
    clients = features(4)
    first, second = (federated_leverage(clients, seed, joint=False) for seed in (1, 2))
    for x, one, other in zip(clients, first, second, strict=True):
        own = pinv_leverage(x)
        assert float(one.sum()) == pytest.approx(float(own.sum()), abs=1e-8)
        assert float(other.sum()) == pytest.approx(12, abs=1e-8)
        assert not torch.allclose(one, own, rtol=0, atol=1e-2) and not torch.allclose(one, other, rtol=0, atol=1e-2)
    unmasked = federated_leverage(clients, 1, joint=False, off=True)
    assert all(torch.allclose(u, pinv_leverage(x), rtol=0, atol=1e-8) for u, x in zip(unmasked, clients, strict=True))


def test_all_left_singular_vectors_would_make_every_sample_alike() -> None:
    stacked = torch.cat(features(5))
    full = torch.linalg.svd(stacked, full_matrices=True)[0]
    assert torch.allclose(cbdr.leverage(full), torch.ones(len(stacked), dtype=torch.float64), atol=1e-8)
    assert cbdr.left_factor(stacked).shape == (len(stacked), 12)


def test_dead_and_repeated_features_change_nothing() -> None:
    clients = features(6)
    wider = [torch.cat([x, torch.zeros(len(x), 3).double(), x[:, :4], 2 * x[:, 1:2]], dim=1) for x in clients]
    for one, other in zip(federated_leverage(clients, 1), federated_leverage(wider, 1), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-8)
    assert sum(float(s.sum()) for s in federated_leverage(wider, 2)) == pytest.approx(12, abs=1e-8)


def test_fewer_samples_than_features_and_no_features_at_all() -> None:
    few = federated_leverage(features(7, sizes=(3, 4), width=12), 1)
    assert torch.allclose(torch.cat(few), torch.ones(7, dtype=torch.float64), atol=1e-8)
    none = federated_leverage([torch.zeros(5, 4).double(), torch.zeros(2, 4).double()], 1)
    assert torch.cat(none).tolist() == [0.0] * 7


def test_scores_survive_features_of_any_size() -> None:
    clients = features(8)
    for factor in (1e-200, 1e200):
        for one, other in zip(
            federated_leverage(clients, 1), federated_leverage([factor * x for x in clients], 1), strict=True
        ):
            assert torch.allclose(one, other, rtol=0, atol=1e-8)


# The draw


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(6, 70), st.integers(0, 10**6))
def test_a_draw_is_distinct_full_and_as_even_as_the_classes_allow(labels: list[int], capacity: int, seed: int) -> None:
    classes = torch.tensor(labels)
    scores = torch.rand(len(labels), dtype=torch.float64, generator=generator_for(seed, "scores"))
    kept = cbdr.draw(scores, classes, capacity, generator_for(seed, "draw"))
    assert len(set(kept.tolist())) == len(kept) == min(capacity, len(labels))
    assert kept.tolist() == sorted(kept.tolist()) and int(kept.min()) >= 0 and int(kept.max()) < len(labels)
    before, after = (torch.bincount(part, minlength=6) for part in (classes, classes[kept]))
    assert bool((after[before > 0] > 0).all())
    open_classes = after[after < before]
    assert len(open_classes) == 0 or int(after.max()) - int(open_classes.min()) <= 1


def test_how_many_of_each_class_does_not_depend_on_the_scores() -> None:
    labels = torch.tensor([0] * 9 + [1] * 9 + [2] * 9)
    ones, zeros = (torch.full((27,), value, dtype=torch.float64) for value in (1.0, 0.0))
    for seed in range(5):
        first, second = (labels[cbdr.draw(s, labels, 11, generator_for(seed))] for s in (ones, zeros))
        assert torch.bincount(first).tolist() == torch.bincount(second).tolist()


def test_a_sample_is_drawn_in_proportion_to_its_score() -> None:
    scores, labels = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    generator = generator_for(0, "proportion")
    count = torch.bincount(torch.cat([cbdr.draw(scores, labels, 1, generator) for _ in range(3000)]), minlength=4)
    assert torch.allclose(count.double() / 3000, scores, atol=0.03)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 70), st.integers(0, 10**6))
def test_a_draw_with_replacement_never_exceeds_a_classs_places(labels: list[int], capacity: int, seed: int) -> None:
    classes = torch.tensor(labels)
    scores = torch.rand(len(labels), dtype=torch.float64, generator=generator_for(seed, "scores"))
    once, again = (
        cbdr.draw(scores, classes, capacity, generator_for(seed, "draw"), replacement=replacement)
        for replacement in (False, True)
    )
    assert len(set(again.tolist())) == len(again) and again.tolist() == sorted(again.tolist())
    places, held = (torch.bincount(classes[kept], minlength=6) for kept in (once, again))
    assert bool((held <= places).all()) and bool(((held > 0) == (places > 0)).all())


def test_a_sample_drawn_twice_is_kept_once() -> None:
    scores, labels = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    generator = generator_for(0, "again")
    kept = [cbdr.draw(scores, labels, 2, generator, replacement=True) for _ in range(3000)]
    found = torch.bincount(torch.cat(kept), minlength=4).double() / 3000
    assert torch.allclose(found, 1 - (1 - scores) ** 2, atol=0.03)
    alone = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert cbdr.draw(alone, labels, 3, generator, replacement=True).tolist() == [1]


def test_samples_without_leverage_fill_what_the_others_leave() -> None:
    scores = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    kept = cbdr.draw(scores, torch.zeros(5, dtype=torch.int64), 3, generator_for(0)).tolist()
    assert {1, 3} < set(kept) and len(kept) == 3


# Temperatures


def objective(
    kind: type[TemperatureLoss] = TemperatureLoss,
    *,
    taus: tuple[float, float] = (0.9, 1.1),
    weights: tuple[float, float] = (1.1, 0.9),
) -> TemperatureLoss:
    new = torch.tensor([False, False, True])
    return kind(
        torch.ones(3, dtype=torch.bool),
        new,
        tau_old=taus[0],
        tau_new=taus[1],
        weight_old=weights[0],
        weight_new=weights[1],
    )


def batch_of(labels: list[int], replayed: list[bool]) -> tuple[Tensor, Batch]:
    logits = torch.tensor([[2.0, 1.0, 0.5]] * len(labels), dtype=torch.float64, requires_grad=True)
    return logits, Batch(torch.empty(0), torch.tensor(labels), torch.tensor(replayed), torch.arange(len(labels)))


@pytest.mark.parametrize(
    ("labels", "replayed", "weights", "expected"),
    [
        ([0], [True], (1.0, 1.0), 0.405413),
        ([2], [False], (1.0, 1.0), 2.173090),
        ([0, 2], [True, False], (1.1, 0.9), 2.401736),
        ([0, 0, 2], [True, True, False], (1.1, 0.9), 2.401736),  # a mean on each side
        ([2], [False], (1.1, 0.9), 0.9 * 2.173090),  # no replayed sample: its term is left out
        ([2], [True], (1.1, 0.9), 1.1 * 2.173090),  # a replayed sample of a class of the chunk
    ],
)
def test_the_loss_worked_by_hand(
    labels: list[int], replayed: list[bool], weights: tuple[float, float], expected: float
) -> None:
    logits, batch = batch_of(labels, replayed)
    assert objective(weights=weights).loss(logits, torch.empty(0), batch).item() == pytest.approx(expected, abs=2e-6)


# Cross-entropy at 0 of (2 / .81, 1 / .81, .5 / .99), and at 2 of (2 / .99, 1 / .99, .5 / 1.21).
OLD_ROW, NEW_ROW = 0.358544, 2.054657


@pytest.mark.parametrize(
    ("labels", "replayed", "expected"),
    [
        ([0, 2], [True, False], 1.121795),
        ([0], [True], 1.1 * OLD_ROW),
        ([2], [False], 0.9 * NEW_ROW),
        ([0, 0, 2], [True, True, False], (2 * 1.1 * OLD_ROW + 0.9 * NEW_ROW) / 3),  # one mean, not one on each side
    ],
)
def test_the_published_codes_loss_worked_by_hand(labels: list[int], replayed: list[bool], expected: float) -> None:
    logits, batch = batch_of(labels, replayed)
    found = objective(TwiceScaledLoss).loss(logits, torch.empty(0), batch)
    assert found.item() == pytest.approx(expected, abs=2e-6)


def test_without_temperatures_and_weights_the_published_codes_loss_is_the_plain_one() -> None:
    logits, batch = batch_of([0, 2, 1, 2], [True, False, False, False])
    everything = torch.ones(3, dtype=torch.bool)
    plain = TaskLoss(everything, everything).loss(logits, torch.empty(0), batch)
    twice = objective(TwiceScaledLoss, taus=(1.0, 1.0), weights=(1.0, 1.0)).loss(logits, torch.empty(0), batch)
    assert twice.item() == pytest.approx(plain.item(), rel=1e-6)


def test_without_temperatures_and_weights_it_is_twice_the_plain_loss() -> None:
    logits, batch = batch_of([0, 2, 1, 2], [True, True, False, False])
    everything = torch.ones(3, dtype=torch.bool)
    plain = TaskLoss(everything, everything).loss(logits, torch.empty(0), batch)
    scaled = objective(taus=(1.0, 1.0), weights=(1.0, 1.0)).loss(logits, torch.empty(0), batch)
    assert scaled.item() == pytest.approx(2 * plain.item(), rel=1e-6)


def test_a_class_not_met_gets_no_gradient() -> None:
    logits, batch = batch_of([0, 1], [True, False])
    seen = torch.tensor([True, True, False])
    TemperatureLoss(seen, seen, tau_old=0.9, tau_new=1.1, weight_old=1.1, weight_new=0.9).loss(
        logits, torch.empty(0), batch
    ).backward()
    assert logits.grad is not None and logits.grad[:, 2].tolist() == [0.0, 0.0] and bool(logits.grad[:, 0].all())


# Rounds


class WatchedGrid(InlineGrid):
    """Keeps every message, and passes replies through ``damage(kind, round, client, reply)``; None loses one."""

    def __init__(self, config: Config, damage: Callable[..., Message | None] = lambda *told: told[-1]) -> None:
        super().__init__(client_app.app, config.stream.clients, config.flat(), run_id=1)
        self._damage = damage
        self.sent: list[tuple[str, int, int, RecordDict, RecordDict | None]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            (number,) = super().push_messages([message])
            numbers.append(number)
            told = message.content.config_records[keys.CONFIG]
            if keys.ROUND in told:
                place = message.metadata.message_type, int(told[keys.ROUND]), int(told[keys.CLIENT])
                reply = self._damage(*place, self._replies.pop(number))
                answer = reply.content if reply is not None and reply.has_content() else None
                self.sent.append((*place, message.content, answer))
                if reply is not None:
                    self._replies[number] = reply
        return numbers

    def of(self, kind: str, number: int) -> dict[int, tuple[RecordDict, RecordDict | None]]:
        return {client: (down, up) for k, n, client, down, up in self.sent if (k, n) == (kind, number)}


def start(config: Config, **watch: Any) -> tuple[list[RoundReport], WatchedGrid]:
    """Run all rounds; what the server knows of each, and every message."""
    experiment, grid = Experiment(config), WatchedGrid(config, **watch)
    weights, reports = as_arrays(experiment.initial_weights()), list[RoundReport]()
    told = ConfigRecord({keys.RUN: f"{1:020d}"})
    FedCbdr(
        config, keys.shapes_of(weights), experiment.parameter_names, lambda report, _: reports.append(report)
    ).start(
        grid,
        keys.array_record(weights),
        num_rounds=config.stream.rounds,
        timeout=config.run.deadline,
        train_config=told,
        evaluate_config=told,
    )
    return reports, grid


def buffer_of(config: Config, client: int, number: int) -> tuple[list[int], list[int]]:
    """Ids and labels in a stored buffer."""
    folder = Path(config.run.results_dir) / config.run.run_name / "clients" / f"client-{client:03d}"
    with np.load(io.BytesIO((folder / f"state-{number:06d}.npz").read_bytes()[32:])) as archive:
        return archive["buffer.content"].tolist(), archive["buffer.labels"].tolist()


def pools_and_features(config: Config, grid: WatchedGrid) -> tuple[list[list[int]], list[Tensor]]:
    """What each client chooses from in the second round, by id, and its features under the global model."""
    experiment = Experiment(config)
    weights = keys.unpack(grid.of(fedcbdr_names.FEATURES_QUERY, 2)[0][0].array_records[keys.ARRAYS])
    pools = [buffer_of(config, k, 1)[0] + experiment.stream(k).chunks[1].tolist() for k in range(3)]
    net = experiment.network({name: torch.from_numpy(array) for name, array in weights.items()}).eval()
    with torch.no_grad():
        images = [experiment.preprocess(experiment.dataset.fetch(torch.tensor(pool))) for pool in pools]
        return pools, [net.features(x).double() for x in images]


def at(kind: str, number: int, client: int, act: Callable[[Message], Message | None]) -> Callable[..., Message | None]:
    return lambda *told: act(told[-1]) if told[:-1] == (kind, number, client) else told[-1]


def array_of(content: RecordDict | None, name: str) -> np.ndarray:
    assert content is not None
    return keys.unpack(content.array_records[keys.ARRAYS])[name]


def selected(report: RoundReport) -> dict[int, object]:
    return {client: metrics.get(fedcbdr_names.SELECTED) for client, metrics in report.evaluated.items()}


@pytest.fixture
def cbdr_config(small: Make) -> Make:
    return lambda **changes: small(method="fedcbdr", **changes)


def test_the_buffer_is_what_global_leverage_draws(cbdr_config: Make) -> None:
    config = cbdr_config(rounds=2)
    reports, grid = start(config)
    pools, clients = pools_and_features(config, grid)
    scores = torch.split(pinv_leverage(torch.cat(clients)), [len(x) for x in clients])
    for number, pool in enumerate(pools):
        ids, labels = buffer_of(config, number, 2)
        sent = array_of(grid.of(fedcbdr_names.SCORES_QUERY, 2)[number][1], fedcbdr_names.SCORES)
        np.testing.assert_allclose(sent, scores[number], rtol=0, atol=1e-5)  # features are float32, batches differ
        classes = Experiment(config).labels_of(np.array(pool))
        draws = generator_for(config.run.seed, "fedcbdr-draw", number, 2)
        assert ids == [pool[i] for i in cbdr.draw(torch.from_numpy(sent), classes, 20, draws).tolist()]
        assert len(set(ids)) == 20 and set(labels) == set(classes.tolist())
        assert reports[1].trained[number][keys.BUFFER_CLASSES] == np.bincount(labels, minlength=10).tolist()
    assert selected(reports[1]) == {0: 1, 1: 1, 2: 1} and selected(reports[0]) == {0: None, 1: None, 2: None}
    assert not any(report.failures for report in reports)


def test_with_the_published_codes_scores_only_each_clients_sum_is_that_of_its_features(cbdr_config: Make) -> None:
    config = cbdr_config(rounds=2, width=2, fedcbdr_scores="published-code")
    reports, grid = start(config)
    _, clients = pools_and_features(config, grid)
    for number, x in enumerate(clients):
        own, sent = pinv_leverage(x), array_of(grid.of(fedcbdr_names.SCORES_QUERY, 2)[number][1], fedcbdr_names.SCORES)
        assert sent.sum() == pytest.approx(float(own.sum()), abs=1e-3) and own.sum() < len(x) - 1
        assert np.abs(sent - own.numpy()).max() > 0.05
    assert selected(reports[1]) == {0: 1, 1: 1, 2: 1} and not any(report.failures for report in reports)


def test_three_rounds_with_the_same_seed_give_the_same_numbers(cbdr_config: Make) -> None:
    first, second, other = (cbdr_config(run_name=name, seed=seed) for name, seed in (("a", 7), ("b", 7), ("c", 8)))
    for config in (first, second, other):
        run_inline(config)
    records = [rounds_of(Path(config.run.results_dir) / config.run.run_name) for config in (first, second, other)]
    assert records[0] == records[1] != records[2]
    assert [record["failures"] for record in records[0]] == [[], [], []]
    assert all(size == 20 for record in records[0][1:] for size in record["buffer_size"])
    assert all(
        accuracy == record["global_accuracy"][k]
        for record in records[0]
        for k, accuracy in enumerate(record["client_accuracy"])
    )
    assert all(buffer_of(first, client, 3) == buffer_of(second, client, 3) for client in range(3))


def test_who_has_room_for_everything_is_not_asked(cbdr_config: Make) -> None:
    config = cbdr_config(rounds=2, capacity=32)
    reports, grid = start(config)
    assert {kind for kind, *_ in grid.sent} == {MessageType.TRAIN, MessageType.EVALUATE}
    assert [report.trained[0][keys.BUFFER_SIZE] for report in reports] == [16, 32]
    assert selected(reports[1]) == {0: None, 1: None, 2: None}


def test_no_pixels_and_no_plain_features_leave_a_client(cbdr_config: Make) -> None:
    config = cbdr_config()
    _, grid = start(config)
    model, image = set(Experiment(config).weight_names), 3 * 8 * 8
    for kind, _, _, *contents in grid.sent:
        for content in contents:
            arrays = [item for record in content.array_records.values() for item in keys.unpack(record).items()]
            own = [(name, array) for name, array in arrays if name not in model]
            assert {name for name, _ in own} <= {
                fedcbdr_names.FEATURES,
                fedcbdr_names.ROWS,
                fedcbdr_names.SCORES,
                fedcbdr_names.LABELS,
                fedcbdr_names.POSITIONS,
            }
            assert kind in ACTIONS or {name for name, _ in own} <= {fedcbdr_names.POSITIONS}
            assert all(a.dtype != np.uint8 and a.ndim <= 2 and a.shape[-1] != image for _, a in own)
    masked = array_of(grid.of(fedcbdr_names.FEATURES_QUERY, 2)[0][1], fedcbdr_names.FEATURES)
    assert masked.min() < 0  # features end in a ReLU and an average


def test_without_classes_no_labels_travel_and_the_record_shows_the_true_buffer(cbdr_config: Make) -> None:
    config = cbdr_config(rounds=2, fedcbdr_balanced=False)
    reports, grid = start(config)
    for client, (_, reply) in grid.of(fedcbdr_names.SCORES_QUERY, 2).items():
        assert reply is not None and set(reply.array_records[keys.ARRAYS]) == {fedcbdr_names.SCORES}
        labels = buffer_of(config, client, 2)[1]
        assert reports[1].evaluated[client][keys.BUFFER_CLASSES] == np.bincount(labels, minlength=10).tolist()
        assert len(labels) == 20


def test_with_replacement_the_buffer_is_what_was_drawn_and_the_record_says_how_much(cbdr_config: Make) -> None:
    config = cbdr_config(rounds=3, fedcbdr_replacement=True)
    run_inline(config)
    records = rounds_of(Path(config.run.results_dir) / config.run.run_name)
    for number in (2, 3):
        held = [buffer_of(config, client, number) for client in range(3)]
        assert records[number - 1]["buffer_size"] == [len(set(ids)) for ids, _ in held]
        assert all(len(set(ids)) == len(ids) < 20 for ids, _ in held)
        assert records[number - 1]["buffer_classes"] == [np.bincount(y, minlength=10).tolist() for _, y in held]
        assert records[number - 1]["failures"] == []


def test_with_replacement_the_evaluation_is_longer_by_the_size_and_the_selection_shorter(cbdr_config: Make) -> None:
    reports, _ = start(cbdr_config(rounds=2, evaluate="both", fedcbdr_replacement=True))
    before, after = (report.exchanges["evaluation"] for report in reports)
    kept = sum(reports[1].evaluated[client][keys.BUFFER_SIZE] for client in range(3))
    assert after.bytes_down == before.bytes_down + 3 * 137 + 8 * kept
    assert after.bytes_up == before.bytes_up + 3 * (16 + 14 + 8 * 10 + 19)


def with_array(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], Message]:
    def act(reply: Message) -> Message:
        record = reply.content.array_records[keys.ARRAYS]
        record[name] = Array(change(record[name].numpy()))
        return reply

    return act


def failed(reply: Message) -> Message:
    reply.__dict__["_content"], reply.__dict__["_error"] = None, Error(2, "Traceback\nOSError: disk on fire")
    return reply


def emptied(reply: Message) -> Message:
    del reply.content[keys.ARRAYS]
    return reply


FAULTS = {
    "nan": (fedcbdr_names.FEATURES_QUERY, with_array(fedcbdr_names.FEATURES, lambda x: x * np.nan), "not finite"),
    "width": (fedcbdr_names.FEATURES_QUERY, with_array(fedcbdr_names.FEATURES, lambda x: x[:, 1:].copy()), "(32, 31)"),
    "float32": (
        fedcbdr_names.FEATURES_QUERY,
        with_array(fedcbdr_names.FEATURES, lambda x: x.astype(np.float32)),
        "float32",
    ),
    "silence": (fedcbdr_names.FEATURES_QUERY, lambda reply: None, "no reply"),
    "error": (fedcbdr_names.SCORES_QUERY, failed, "disk on fire"),
    "empty": (fedcbdr_names.SCORES_QUERY, emptied, "no record"),
    "negative": (fedcbdr_names.SCORES_QUERY, with_array(fedcbdr_names.SCORES, lambda x: x - 1), "within 0 and 1"),
    "labels": (fedcbdr_names.SCORES_QUERY, with_array(fedcbdr_names.LABELS, lambda x: x + 10), "10 classes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_answer_costs_its_sender_alone_the_selection(cbdr_config: Make, fault: str) -> None:
    kind, act, words = FAULTS[fault]
    config = cbdr_config(rounds=2, deadline=0.2 if fault == "silence" else 60.0)
    reports, grid = start(config, damage=at(kind, 2, 1, act))
    (failure,) = reports[1].failures
    assert (failure["client"], failure["phase"]) == (1, kind) and words in failure["reason"]
    assert selected(reports[1]) == {0: 1, 1: 0, 2: 1}
    ids, labels = buffer_of(config, 1, 2)
    counts = np.bincount(labels)
    assert len(set(ids)) == 20 and np.ptp(counts[counts > 0]) <= 1  # the balanced random choice
    assert set(grid.of(fedcbdr_names.SCORES_QUERY, 2)) == ({0, 1, 2} if kind == fedcbdr_names.SCORES_QUERY else {0, 2})


def test_a_client_that_lost_its_training_reply_is_not_asked_and_learns_on(cbdr_config: Make) -> None:
    config = cbdr_config()
    reports, grid = start(config, damage=at(MessageType.TRAIN, 2, 1, failed))
    assert set(grid.of(fedcbdr_names.FEATURES_QUERY, 2)) == {0, 2} and set(
        grid.of(fedcbdr_names.FEATURES_QUERY, 3)
    ) == {0, 1, 2}
    assert selected(reports[1]) == {0: 1, 1: 0, 2: 1} and selected(reports[2]) == {0: 1, 1: 1, 2: 1}
    assert [failure["phase"] for report in reports for failure in report.failures] == ["training"]


def test_a_pool_size_that_cannot_be_is_refused(cbdr_config: Make) -> None:
    def act(reply: Message) -> Message:
        reply.content.metric_records[keys.METRICS][fedcbdr_names.POOL_SIZE] = 10**9
        return reply

    reports, _ = start(cbdr_config(rounds=2), damage=at(MessageType.TRAIN, 2, 1, act))
    (failure,) = reports[1].failures
    assert failure["client"] == 1 and "pool-size = 1000000000: must be between 1 and 36" in failure["reason"]


def test_repeated_messages_get_the_same_answers(cbdr_config: Make) -> None:
    config = cbdr_config(rounds=2)
    _, grid = start(config)
    before = buffer_of(config, 0, 2)
    for kind in (fedcbdr_names.FEATURES_QUERY, fedcbdr_names.SCORES_QUERY, MessageType.EVALUATE):
        content, first = grid.of(kind, 2)[0]
        again = InlineGrid(client_app.app, 3, config.flat(), run_id=1)
        (reply,) = again.send_and_receive([Message(content, dst_node_id=2, message_type=kind)])
        assert first is not None
        for record, array in first.array_records.items():
            assert all(value.data == reply.content.array_records[record][name].data for name, value in array.items())
        assert dict(first.metric_records) == dict(reply.content.metric_records)
    assert buffer_of(config, 0, 2) == before


@pytest.mark.parametrize(
    ("positions", "replacement"),
    [
        ([0] * 20, False),
        (list(range(13, 33)), False),
        (list(range(19)), False),
        (list(range(-1, 19)), False),
        ([3, 3], True),
        ([], True),
        (list(range(21)), True),
    ],
)
def test_a_selection_that_does_not_fit_is_not_taken(
    cbdr_config: Make, positions: list[int], replacement: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = keys.array_record({fedcbdr_names.POSITIONS: np.array(positions, dtype=np.int64)})
    monkeypatch.setattr(FedCbdr, "_draw", lambda *told: record)
    reports, _ = start(cbdr_config(rounds=2, fedcbdr_replacement=replacement))
    assert selected(reports[1]) == {0: 0, 1: 0, 2: 0}
    assert {failure["phase"] for failure in reports[1].failures} == {fedcbdr_names.SELECTION}


def test_a_query_out_of_turn_is_refused(cbdr_config: Make) -> None:
    config = cbdr_config(rounds=2)
    _, grid = start(config)
    down, _ = grid.of(fedcbdr_names.SCORES_QUERY, 2)[0]
    rows = array_of(down, fedcbdr_names.ROWS)

    def ask(number: int, action: str, sent: np.ndarray) -> str:
        content = keys.instruction(keys.array_record({fedcbdr_names.ROWS: sent}), {keys.RUN: f"{1:020d}"}, 0, number)
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=2, message_type=action)])
        return keys.root_cause(reply.error.reason)

    assert "client 0 has not trained in round 3" in ask(3, fedcbdr_names.SCORES_QUERY, rows)
    assert "must be float64 (32, rank)" in ask(2, fedcbdr_names.SCORES_QUERY, rows[1:])


@pytest.mark.parametrize(
    "changes",
    [
        {"fedcbdr_tau_old": 0.5},
        {"fedcbdr_tau_new": 2.0},
        {"fedcbdr_weight_old": 2.0},
        {"fedcbdr_weight_new": 0.5},
        {"fedcbdr_new_columns": "novel"},
        {"fedcbdr_temperatures": "published-code"},
    ],
)
def test_every_key_makes_a_difference_from_the_second_round(cbdr_config: Make, changes: dict[str, object]) -> None:
    outcomes = []
    for name, other in (("usual", {}), ("other", changes)):
        _, grid = start(cbdr_config(rounds=2, overlap=1, run_name=name, **other))
        outcomes.append([array_of(grid.of(MessageType.TRAIN, n)[0][1], "output.weight") for n in (1, 2)])
    (first, second), (first_other, second_other) = outcomes
    assert np.array_equal(first, first_other) and not np.array_equal(second, second_other)


def test_the_local_model_answers_when_asked_for(cbdr_config: Make) -> None:
    reports, _ = start(cbdr_config(rounds=2, inference="local"))
    metrics = reports[1].evaluated[0]
    assert metrics[keys.ACCURACY] == metrics[keys.LOCAL_ACCURACY] and metrics[fedcbdr_names.SELECTED] == 1
