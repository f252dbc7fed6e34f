"""Partial participation: in each round, only some of the clients train."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.systems.contract import DISTINCT_METHODS, SHAPE, assert_a_run_in_pieces_equals
from support.systems.runs import EVALUATE, TRAIN, TRAINING_KINDS, failing, folder_of, last, records, run, same

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.plan import training_samples
from fedkace_flwr.export.loading import load_model
from fedkace_flwr.messaging import wire
from fedkace_flwr.privacy.accounting import epsilon
from fedkace_flwr.results.reference_cache import fingerprint
from fedkace_flwr.samples import Samples
from fedkace_flwr.sections import DELTA, StreamConfig
from fedkace_flwr.sources import StreamSource

Make = Callable[..., Config]


def drawn(config: Config, number: int) -> tuple[int, ...]:
    return config.stream.participants(number, config.run.seed)


def test_each_round_draws_its_share_of_the_clients() -> None:
    stream = StreamConfig(clients=10, fraction_train=0.3)
    rounds = [stream.participants(number, 0) for number in range(1, 201)]
    assert all(len(set(clients)) == 3 and list(clients) == sorted(clients) for clients in rounds)
    times = [sum(client in clients for clients in rounds) for client in range(10)]
    assert sum(times) == 600 and all(40 <= count <= 80 for count in times)  # 60 expected, standard deviation 6.5
    assert len(set(rounds)) > 80, "of 120 possible draws"
    assert rounds != [stream.participants(number, 1) for number in range(1, 201)]


@pytest.mark.parametrize(
    ("fraction", "clients", "count"), [(1.0, 7, 7), (0.5, 7, 4), (0.01, 7, 1), (0.99, 7, 7), (0.34, 3, 1)]
)
def test_fractions_are_rounded_to_whole_clients_at_least_one(fraction: float, clients: int, count: int) -> None:
    stream = StreamConfig(clients=clients, fraction_train=fraction)
    assert stream.participants_per_round == count == len(stream.participants(3, 0))


@pytest.mark.usefixtures("quick")
def test_only_those_drawn_train_and_all_are_evaluated(made: Make) -> None:
    config = made(fraction_train=0.6, rounds=4)
    grid = run(config)
    for number, record in enumerate(records(config), 1):
        asked = drawn(config, number)
        assert len(asked) == 2
        assert [client for kind, at, client in grid.places if at == number and kind in TRAINING_KINDS] == list(asked)
        assert [client for kind, at, client in grid.places if at == number and kind == EVALUATE] == [0, 1, 2]
        assert record["asked"] == list(asked) and record["failures"] == [] and "sat_out" not in record
        assert [client for client in range(3) if record["buffer_size"][client] is not None] == list(asked)
        met = [any(client in drawn(config, earlier) for earlier in range(1, number + 1)) for client in range(3)]
        assert [accuracy is not None for accuracy in record["client_accuracy"]] == met


def test_the_record_names_nobody_where_all_train(small: Make) -> None:
    config = small(rounds=1)
    run(config)
    assert "asked" not in records(config)[0]


def without(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("asked", "sat_out", "bytes", "seconds")}


@pytest.mark.matrix
@pytest.mark.parametrize("method", [each for each in DISTINCT_METHODS if each.values[0] != "centralized"])
def test_a_round_without_training_is_like_one_without_new_data(
    made: Make, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The models, and all numbers, of a run in which the same clients are asked but have nothing to train on."""
    partly = made("partly", method=method, **{**SHAPE, "rounds": 4}, fraction_train=0.6)
    whole = replace(
        partly, stream=replace(partly.stream, fraction_train=1.0), run=replace(partly.run, run_name="whole")
    )
    run(partly)

    def chunk(source: StreamSource, number: int, learned: int) -> Samples:
        drawn_too = source._client in drawn(partly, number)
        return source._experiment.chunk(source._client, number) if drawn_too else source.none()

    monkeypatch.setattr(StreamSource, "chunk", chunk)
    run(whole)
    assert same(last(partly), last(whole))
    assert list(map(without, records(partly))) == list(map(without, records(whole)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedkace", "dcfcl", "centralized"])
def test_a_run_in_pieces_draws_the_same_clients(made: Make, method: str) -> None:
    shape = {**SHAPE, "fraction_train": 0.6}
    whole = made("whole", method=method, **shape)
    run_inline(whole)
    folder = Path(whole.run.results_dir) / "whole"
    assert_a_run_in_pieces_equals(folder, made("pieces", method=method, resume=True, **shape))


@pytest.mark.usefixtures("quick")
def test_the_quorum_of_training_counts_those_drawn(made: Make) -> None:
    """Round 2 trains two of three clients; one of them fails."""
    enough, too_few = made("enough", fraction_train=0.6, quorum=0.5), made("few", fraction_train=0.6, quorum=0.6)
    client, other = drawn(enough, 2)
    damage = failing(("train", 2, client))
    run(enough, damage)
    record = records(enough)[1]
    assert [failure["client"] for failure in record["failures"]] == [client]
    assert record["buffer_size"][other] is not None
    with pytest.raises(RunError, match=r"round 2, training: 1 of 2 clients gave a valid reply, quorum = 0\.6"):
        run(too_few, damage)


def test_a_phase_that_is_repeated_asks_the_same_clients(made: Make, clock: object) -> None:
    config = made(fraction_train=0.6, quorum=1.0, below_quorum="repeat")
    client = drawn(config, 2)[0]
    grid = run(config, failing(("train", 2, client), times=1))
    asked = [each for kind, number, each in grid.places if (kind, number) == ("train", 2)]
    assert asked == [*drawn(config, 2)] * 2
    assert records(config)[1]["repeated"] == {"training": 1}


def test_secure_aggregation_runs_among_those_drawn(made: Make) -> None:
    config = made(clients=5, fraction_train=0.6, secagg=True)
    run(config)
    for number, record in enumerate(records(config), 1):
        assert record["asked"] == list(drawn(config, number)) and record["failures"] == []
        assert [k for k in range(5) if record["buffer_size"][k] is not None] == record["asked"]


def test_epsilon_counts_the_rounds_of_the_busiest_client(made: Make) -> None:
    config = made(clients=4, fraction_train=0.5, rounds=4, dp="central", dp_seeded=True)
    run(config)
    for number, record in enumerate(records(config), 1):
        times = [sum(client in drawn(config, each) for each in range(1, number + 1)) for client in range(4)]
        assert record["epsilon"] == epsilon(config.privacy.dp_noise, max(times), DELTA)
    assert max(times) < 4, "otherwise this seed shows nothing"


def test_centralized_learns_what_its_client_would_have_trained_on(made: Make) -> None:
    config = made(method="centralized", rounds=4, fraction_train=0.34, seed=1, centralized_rounds="every:3")
    run(config)
    experiment = Experiment(config)
    for client in range(3):
        rounds = [number for number in range(1, 5) if client in drawn(config, number)]
        expected = [id_ for number in rounds for id_ in experiment.chunk(client, number).content.tolist()]
        assert experiment.learned(client, 4).content.tolist() == expected
        accuracies = [record["client_accuracy"][client] for record in records(config)]
        first = min(rounds, default=5)
        assert [accuracy is not None for accuracy in accuracies] == [number >= first for number in range(1, 5)]
    assert any(client not in drawn(config, 1) and client in drawn(config, 2) for client in range(3)), (
        "seed shows nothing"
    )


def test_the_cache_of_references_knows_who_was_drawn(made: Make) -> None:
    def key(**changes: Any) -> str:
        return fingerprint(made(**changes))

    assert key(clients=3) == key(clients=4) == key(clients=3, fraction_train=0.9), "each client learns every chunk"
    assert len({key(), key(fraction_train=0.6), key(fraction_train=0.34), key(clients=4, fraction_train=0.5)}) == 4


@pytest.mark.slow
def test_a_model_card_lists_the_classes_that_were_learned(made: Make) -> None:
    config = made(clients=6, rounds=1, fraction_train=0.2, capacity=12)
    (only,) = drawn(config, 1)
    experiment = Experiment(config)
    met = experiment.chunk(only, 1).labels.unique().tolist()
    run(config)
    model = load_model(folder_of(config) / "model")
    assert [model.class_names.index(name) for name in model.classes_met] == met


def test_a_plan_counts_those_drawn(made: Make) -> None:
    whole, half = made(clients=4), made(clients=4, fraction_train=0.5)
    assert training_samples(half) * 2 == training_samples(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fraction_train": 0.0}, "fraction-train = 0.0: must be > 0 and <= 1"),
        ({"fraction_train": 1.5}, "fraction-train = 1.5: must be > 0 and <= 1"),
        (
            {"clients": 10, "fraction_train": 0.2, "secagg": True},
            "clients = 10 and fraction-train = 0.2, 2 a round: with secagg = true, must be between 3",
        ),
        (
            {"clients": 10, "fraction_train": 0.4, "aggregation": "multi-krum:2"},
            "aggregation = 'multi-krum:2' with clients = 10 and fraction-train = 0.4, 4 a round: hostile must be less than "
            "half of the clients, at most 1",
        ),
    ],
)
def test_too_few_are_refused(made: Make, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(**changes)
    assert words in str(refused.value)


@pytest.mark.usefixtures("quick")
def test_without_aggregation_a_client_that_first_trains_later_starts_from_the_initial_model(made: Make) -> None:
    config = made(method="lkc", fraction_train=0.34)
    grid = run(config)
    initial = Experiment(config).initial_weights()
    late = {client for number in (1, 2, 3) for client in drawn(config, number)} - set(drawn(config, 1))
    assert late
    for client in late:
        number = min(each for each in (2, 3) if client in drawn(config, each))
        sent = wire.unpack(grid.of(TRAIN, number)[client].down.array_records[wire.ARRAYS])
        assert all(sent[name].tobytes() == weights.numpy().tobytes() for name, weights in initial.items())
