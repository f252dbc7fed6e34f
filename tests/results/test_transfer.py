"""Forgetting and transfer: cases worked by hand, and real rounds."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.systems.in_process import Federation

from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.results.record import summarise
from fedkace_flwr.results.transfer import accuracy_matrix, backward_transfer, forgetting, forward_transfer, transfer
from fedkace_flwr.rounds.server_round import RoundReport

Make = Callable[..., Config]
Rows = Sequence[Sequence[float | None] | None]


def records_of(*clients: Rows, untrained: Sequence[Rows] = ()) -> list[dict[str, Any]]:
    """Records of clients whose accuracies by round and class these are."""
    rounds = range(len(clients[0]))
    fresh = untrained or [[None for _ in rounds] for _ in clients]
    return [
        {
            "client_accuracy": [None for _ in clients],
            "class_accuracy": [rows[t] for rows in clients],
            "new_class_accuracy": [rows[t] for rows in fresh],
            "seen_classes": [2 * (t + 1) for _ in clients],
        }
        for t in rounds
    ]


def matrix(*rows: Sequence[float | None] | None) -> Any:
    return accuracy_matrix(records_of(rows), 0)


def test_worked_by_hand() -> None:
    learned = matrix([0.5, None, None], [0.9, 0.4, None], [0.6, 0.7, 0.2])
    assert forgetting(learned) == pytest.approx(((0.9 - 0.6) + (0.4 - 0.7)) / 2)  # the third class is new
    assert backward_transfer(learned) == pytest.approx(((0.6 - 0.5) + (0.7 - 0.4)) / 2)
    untrained = matrix(None, [None, 0.35, None], [None, None, 0.5])
    assert forward_transfer(untrained, [2, 4, 6]) == pytest.approx(((0.35 - 1 / 4) + (0.5 - 1 / 6)) / 2)


def test_a_round_that_a_client_missed_does_not_count_as_its_last() -> None:
    assert forgetting(matrix([0.8, 0.5], None, [0.6, 0.6], None)) == pytest.approx((0.2 - 0.1) / 2)
    assert backward_transfer(matrix(None, [0.5], None, [0.75], None)) == 0.25


def test_nothing_is_known_without_a_second_round_or_a_known_class() -> None:
    for learned in (matrix([0.5, None]), matrix([0.5, None], [None, 0.7]), matrix(None, None), matrix()):
        assert forgetting(learned) is None
        assert backward_transfer(learned) is None
    assert forward_transfer(matrix(None, None), [2, 4]) is None
    assert transfer([]) == {"forgetting": None, "backward_transfer": None, "forward_transfer": None}


def test_records_of_earlier_versions_have_no_transfer() -> None:
    records = records_of([[0.5], [0.25]])
    for record in records:
        del record["class_accuracy"], record["new_class_accuracy"]
    assert set(transfer(records).values()) == {None}


def test_a_runs_numbers_are_means_over_the_clients_that_have_them() -> None:
    records = records_of([[0.5], [0.25]], [[0.5], [0.75]], [None, [0.1]])
    assert transfer(records) == {"forgetting": 0.0, "backward_transfer": 0.0, "forward_transfer": None}
    records = records_of([[0.5], [0.25]], [None, None], [None, [0.1]])
    assert transfer(records) == {"forgetting": 0.25, "backward_transfer": -0.25, "forward_transfer": None}


entries = st.one_of(st.none(), st.floats(0, 1))


@given(st.integers(1, 4).flatmap(lambda classes: st.lists(st.lists(entries, min_size=classes, max_size=classes))))
def test_numbers_stay_in_their_range_and_forgetting_is_no_less_than_lost_transfer(rows: list[list[float]]) -> None:
    learned = matrix(*rows)
    lost, gained = forgetting(learned), backward_transfer(learned)
    assert (lost is None) == (gained is None)
    if lost is not None and gained is not None:
        assert -1 <= lost <= 1 and -1 <= gained <= 1
        assert lost >= -gained - 1e-12  # the best earlier accuracy is at least the first


def run(config: Config) -> list[dict[str, Any]]:
    """Run a federation in process and return its records; every client takes part in each round."""
    federation = Federation(config)
    records = []
    for number in range(1, config.stream.rounds + 1):
        clients = range(config.stream.clients)
        trained = {client: federation.train(client, number) for client in clients}
        federation.weights = {
            name: np.mean([reply.weights[name] for reply in trained.values()], axis=0).astype(array.dtype)
            for name, array in federation.weights.items()
        }
        tested = {client: federation.evaluate(client, number).metrics for client in clients}
        sent = {client: reply.metrics for client, reply in trained.items()}
        report = RoundReport(number, tuple(clients), trained=sent, evaluated=tested)
        records.append(report.record(config.stream.clients))
    return records


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["local", "global", "mean"])
def test_classes_average_to_the_accuracy_of_the_model_that_answers(small: Make, inference: str) -> None:
    config = small(rounds=3, predict_with=inference, **{"test-per-class": 5})
    federation = Federation(config)
    streams = [federation.experiment.stream(client) for client in range(config.stream.clients)]
    for number, record in enumerate(run(config), start=1):
        for client, stream in enumerate(streams):
            met = {label for classes in stream.windows[:number] for label in classes}
            classes = record["class_accuracy"][client]
            assert {label for label, value in enumerate(classes) if value is not None} == met
            known = [value for value in classes if value is not None]
            assert np.mean(known) == pytest.approx(record["client_accuracy"][client])  # all have five test images


def test_new_classes_are_tested_with_the_received_model_before_training(small: Make) -> None:
    config = small(rounds=3)
    federation = Federation(config)
    experiment = federation.experiment
    for client in range(config.stream.clients):
        assert wire.NEW_CLASS_ACCURACY not in federation.train(client, 1).metrics  # the model is untrained
    before = [set(map(int, window)) for window in experiment.stream(0).windows]
    reply = federation.train(0, 2)
    fresh = before[1] - before[0]
    reported = reply.metrics[wire.NEW_CLASS_ACCURACY]
    assert {label for label, value in enumerate(reported) if value >= 0} == fresh
    net = experiment.network({name: torch.from_numpy(array) for name, array in federation.weights.items()}).eval()
    allowed = torch.tensor([label in before[0] | before[1] for label in range(10)])
    for label in fresh:
        ids = torch.from_numpy(experiment.dataset.test_ids(label))
        with torch.inference_mode():
            logits = net(experiment.preprocess(experiment.dataset.fetch(ids))).masked_fill(~allowed, -torch.inf)
        assert reported[label] == pytest.approx(float((logits.argmax(1) == label).double().mean()))


def test_a_measured_federation_trains_as_one_that_measures_nothing(small: Make) -> None:
    measured, silent = (
        Federation(small(rounds=3, run_name=f"run-{wanted}", report_classes=wanted)) for wanted in (True, False)
    )
    for federation in (measured, silent):
        federation.train(0, 1)
        federation.evaluate(0, 1)
    one, other = measured.train(0, 2), silent.train(0, 2)
    assert all(np.array_equal(one.weights[name], other.weights[name]) for name in one.weights)
    assert wire.NEW_CLASS_ACCURACY in one.metrics and wire.NEW_CLASS_ACCURACY not in other.metrics
    assert wire.CLASS_ACCURACY not in silent.evaluate(0, 2).metrics


def test_the_summary_holds_the_numbers(small: Make) -> None:
    config = small(rounds=3)
    records = run(config)
    summary = summarise(config, records)
    assert {name: summary[name] for name in transfer(records)} == transfer(records)
    assert summary["forgetting"] is not None and summary["forward_transfer"] is not None
    assert summary["backward_transfer"] >= -summary["forgetting"] - 1e-12


def test_what_is_received_before_anybody_has_trained_transfers_nothing() -> None:
    """With late labels all sit the first rounds out, and in the next one the received model is still untrained."""
    records = records_of([None, [0.5, None], [0.5, 0.5]], untrained=[[None, [0.0, None], [None, 0.75]]])
    for record, size in zip(records, (None, 4, 4), strict=True):
        record["buffer_size"] = [size]
    assert transfer(records)["forward_transfer"] == pytest.approx(0.75 - 1 / 6)


def test_clients_that_joined_later_count() -> None:
    rows = [[0.2, 0.4], [0.6, 0.4], [0.5, 0.8]]
    alone, late = records_of(rows), records_of(rows, [None, *rows[:2]])
    late[0] = records_of(rows)[0]
    joined = transfer(late)["forgetting"]
    assert transfer(alone)["forgetting"] == pytest.approx((0.1 - 0.4) / 2)
    assert joined == pytest.approx(((0.1 - 0.4) / 2 + (-0.4 + 0.0) / 2) / 2)
