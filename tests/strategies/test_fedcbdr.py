"""FedCBDR: its rounds over the inline grid."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from support.doubles.faults import Damage, FaultyGrid, changed, failed, honest, lost, only
from support.doubles.leverage import pinv_leverage
from torch import Tensor

import fedkace_flwr.strategies.fedcbdr
from fedkace_flwr import client_app
from fedkace_flwr.algorithms import fedcbdr_leverage as cbdr
from fedkace_flwr.clients import fedcbdr as fedcbdr_names
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.messaging import wire
from fedkace_flwr.rounds.driver import RoundDriver
from fedkace_flwr.rounds.server_round import RoundReport
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.strategies.fedcbdr import FedCbdr

Make = Callable[..., Config]
ACTIONS = (fedcbdr_names.FEATURES_QUERY, fedcbdr_names.SCORES_QUERY)


def start(config: Config, damage: Damage = honest) -> tuple[list[RoundReport], FaultyGrid]:
    """Run all rounds; the report of each, and every message."""
    experiment, grid = Experiment(config), FaultyGrid(config, damage)
    weights, reports = as_arrays(experiment.initial_weights()), list[RoundReport]()
    told = ConfigRecord({wire.RUN: f"{1:020d}"})
    driver = RoundDriver(
        FedCbdr(config),
        config,
        experiment.travelling,
        lambda report, _: reports.append(report),
    )
    driver.start(
        grid,
        wire.array_record(weights),
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


def pools_and_features(config: Config, grid: FaultyGrid) -> tuple[list[list[int]], list[Tensor]]:
    """What each client chooses from in the second round, by id, and its features under the global model."""
    experiment = Experiment(config)
    weights = wire.unpack(grid.of(fedcbdr_names.FEATURES_QUERY, 2)[0].down.array_records[wire.ARRAYS])
    pools = [buffer_of(config, k, 1)[0] + experiment.stream(k).chunks[1].tolist() for k in range(3)]
    net = experiment.network({name: torch.from_numpy(array) for name, array in weights.items()}).eval()
    with torch.no_grad():
        images = [experiment.preprocess(experiment.dataset.fetch(torch.tensor(pool))) for pool in pools]
        return pools, [net.features(x).double() for x in images]


def array_of(content: RecordDict | None, name: str) -> np.ndarray:
    assert content is not None
    return wire.unpack(content.array_records[wire.ARRAYS])[name]


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
        sent = array_of(grid.of(fedcbdr_names.SCORES_QUERY, 2)[number].up, fedcbdr_names.SCORES)
        np.testing.assert_allclose(sent, scores[number], rtol=0, atol=1e-5)  # features are float32, batches differ
        classes = Experiment(config).labels_of(np.array(pool))
        draws = generator_for(config.run.seed, "fedcbdr-draw", number, 2)
        assert ids == [pool[i] for i in cbdr.draw(torch.from_numpy(sent), classes, 20, draws).tolist()]
        assert len(set(ids)) == 20 and set(labels) == set(classes.tolist())
        assert reports[1].trained[number][wire.BUFFER_CLASSES] == np.bincount(labels, minlength=10).tolist()
    assert selected(reports[1]) == {0: 1, 1: 1, 2: 1} and selected(reports[0]) == {0: None, 1: None, 2: None}
    assert not any(report.failures for report in reports)


def test_who_has_room_for_everything_is_not_asked(cbdr_config: Make) -> None:
    config = cbdr_config(rounds=2, capacity=32)
    reports, grid = start(config)
    assert {kind for kind, *_ in grid.places} == {MessageType.TRAIN, MessageType.EVALUATE}
    assert [report.trained[0][wire.BUFFER_SIZE] for report in reports] == [16, 32]
    assert selected(reports[1]) == {0: None, 1: None, 2: None}


def test_no_pixels_and_no_plain_features_leave_a_client(cbdr_config: Make) -> None:
    config = cbdr_config()
    _, grid = start(config)
    model, image = set(Experiment(config).weight_shapes), 3 * 8 * 8
    for crossing in grid.crossings:
        for content in (crossing.down, crossing.up):
            assert content is not None
            arrays = [item for record in content.array_records.values() for item in wire.unpack(record).items()]
            own = [(name, array) for name, array in arrays if name not in model]
            assert {name for name, _ in own} <= {
                fedcbdr_names.FEATURES,
                fedcbdr_names.ROWS,
                fedcbdr_names.SCORES,
                fedcbdr_names.LABELS,
                fedcbdr_names.POSITIONS,
            }
            assert crossing.kind in ACTIONS or {name for name, _ in own} <= {fedcbdr_names.POSITIONS}
            assert all(a.dtype != np.uint8 and a.ndim <= 2 and a.shape[-1] != image for _, a in own)
    masked = array_of(grid.of(fedcbdr_names.FEATURES_QUERY, 2)[0].up, fedcbdr_names.FEATURES)
    assert masked.min() < 0  # features end in a ReLU and an average


def emptied(reply: Message) -> Message:
    del reply.content[wire.ARRAYS]
    return reply


FAULTS = {
    "nan": (fedcbdr_names.FEATURES_QUERY, changed(fedcbdr_names.FEATURES, lambda x: x * np.nan), "not finite"),
    "width": (fedcbdr_names.FEATURES_QUERY, changed(fedcbdr_names.FEATURES, lambda x: x[:, 1:].copy()), "(32, 31)"),
    "float32": (
        fedcbdr_names.FEATURES_QUERY,
        changed(fedcbdr_names.FEATURES, lambda x: x.astype(np.float32)),
        "float32",
    ),
    "silence": (fedcbdr_names.FEATURES_QUERY, lost, "did not accept"),
    "error": (fedcbdr_names.SCORES_QUERY, failed, "disk on fire"),
    "empty": (fedcbdr_names.SCORES_QUERY, emptied, "no record"),
    "negative": (fedcbdr_names.SCORES_QUERY, changed(fedcbdr_names.SCORES, lambda x: x - 1), "within 0 and 1"),
    "labels": (fedcbdr_names.SCORES_QUERY, changed(fedcbdr_names.LABELS, lambda x: x + 10), "10 classes"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_answer_costs_its_sender_alone_the_selection(cbdr_config: Make, fault: str) -> None:
    kind, act, words = FAULTS[fault]
    config = cbdr_config(rounds=2)
    reports, grid = start(config, damage=only(1, 2, act, kind))
    (failure,) = reports[1].failures
    assert (failure["client"], failure["phase"]) == (1, kind) and words in failure["reason"]
    assert selected(reports[1]) == {0: 1, 1: 0, 2: 1}
    ids, labels = buffer_of(config, 1, 2)
    counts = np.bincount(labels)
    assert len(set(ids)) == 20 and np.ptp(counts[counts > 0]) <= 1  # the balanced random choice
    assert set(grid.of(fedcbdr_names.SCORES_QUERY, 2)) == ({0, 1, 2} if kind == fedcbdr_names.SCORES_QUERY else {0, 2})


def test_a_client_that_lost_its_training_reply_is_not_asked_and_learns_on(cbdr_config: Make) -> None:
    config = cbdr_config()
    reports, grid = start(config, damage=only(1, 2, failed, MessageType.TRAIN))
    assert set(grid.of(fedcbdr_names.FEATURES_QUERY, 2)) == {0, 2} and set(
        grid.of(fedcbdr_names.FEATURES_QUERY, 3)
    ) == {0, 1, 2}
    assert selected(reports[1]) == {0: 1, 1: 0, 2: 1} and selected(reports[2]) == {0: 1, 1: 1, 2: 1}
    assert [failure["phase"] for report in reports for failure in report.failures] == ["training"]


def test_a_pool_size_that_cannot_be_is_refused(cbdr_config: Make) -> None:
    def act(reply: Message) -> Message:
        reply.content.metric_records[wire.METRICS][fedcbdr_names.POOL_SIZE] = 10**9
        return reply

    reports, _ = start(cbdr_config(rounds=2), damage=only(1, 2, act, MessageType.TRAIN))
    (failure,) = reports[1].failures
    assert (
        failure["client"] == 1 and "'pool-size' = 1000000000: must be whole and between 1 and 36" in failure["reason"]
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    "positions", [[0] * 20, list(range(13, 33)), list(range(19)), list(range(-1, 19)), [], list(range(21))]
)
def test_a_selection_that_does_not_fit_is_not_taken(
    cbdr_config: Make, positions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = torch.tensor(positions, dtype=torch.int64)
    servers = SimpleNamespace(left_factor=cbdr.left_factor, draw=lambda *told, **more: drawn)
    monkeypatch.setattr(fedkace_flwr.strategies.fedcbdr, "cbdr", servers)
    reports, _ = start(cbdr_config(rounds=2))
    assert selected(reports[1]) == {0: 0, 1: 0, 2: 0}
    assert {failure["phase"] for failure in reports[1].failures} == {fedcbdr_names.SELECTION}


def test_a_query_out_of_turn_is_refused(cbdr_config: Make) -> None:
    config = cbdr_config(rounds=2)
    _, grid = start(config)
    down = grid.of(fedcbdr_names.SCORES_QUERY, 2)[0].down
    rows = array_of(down, fedcbdr_names.ROWS)

    def ask(number: int, action: str, sent: np.ndarray) -> str:
        content = wire.instruction(wire.array_record({fedcbdr_names.ROWS: sent}), {wire.RUN: f"{1:020d}"}, 0, number)
        again = InlineGrid(client_app.app, 3, {**config.flat(), "rounds": 3}, run_id=1)
        (reply,) = again.send_and_receive([Message(content, dst_node_id=2, message_type=action)])
        return wire.root_cause(reply.error.reason)

    assert "client 0 has not trained in round 3" in ask(3, fedcbdr_names.SCORES_QUERY, rows)
    assert f"not float64 {rows.shape}" in ask(2, fedcbdr_names.SCORES_QUERY, rows[1:])


def test_the_local_model_answers_when_asked_for(cbdr_config: Make) -> None:
    reports, _ = start(cbdr_config(rounds=2, predict_with="local"))
    metrics = reports[1].evaluated[0]
    assert metrics[wire.ACCURACY] == metrics[wire.LOCAL_ACCURACY] and metrics[fedcbdr_names.SELECTED] == 1


def test_features_are_the_same_when_they_are_asked_for_again_after_the_evaluation(small: Make) -> None:
    """A resumed run repeats the round; its clients may hold the server's choice by then."""
    config = small(method="fedcbdr", recalibrate_batchnorm=True, overlap=2, capacity=20)
    _, grid = start(config)
    for client, asked in grid.of(fedcbdr_names.FEATURES_QUERY, 3).items():
        again = Message(asked.down, dst_node_id=client + 2, message_type=fedcbdr_names.FEATURES_QUERY)
        (reply,) = grid.send_and_receive([again])
        first, second = (array_of(each, fedcbdr_names.FEATURES) for each in (asked.up, reply.content))
        assert np.array_equal(first, second)
