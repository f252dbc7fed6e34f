"""What a configuration and its data set make together."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedkace_flwr.compute.devices import choose_device
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, DataError, StreamError
from fedkace_flwr.experiment import Experiment, shared_experiment
from fedkace_flwr.storage.paths import client_folder, run_folder

Make = Callable[..., Config]


def seen(*classes: int) -> torch.Tensor:
    mask = torch.zeros(10, dtype=torch.bool)
    mask[list(classes)] = True
    return mask


def same_weights(one: Experiment, other: Experiment) -> bool:
    first, second = one.initial_weights(), other.initial_weights()
    assert list(first) == list(second)
    return all(torch.equal(first[name], second[name]) for name in first)


def test_chunks_hold_the_stream_with_the_data_sets_labels(small: Make) -> None:
    experiment = Experiment(small(window=3, overlap=1))
    for client in range(3):
        met: set[int] = set()
        for number, (classes, ids) in enumerate(
            zip(experiment.stream(client).windows, experiment.stream(client).chunks, strict=True), start=1
        ):
            chunk = experiment.chunk(client, number)
            assert chunk.content.tolist() == ids.tolist()
            assert chunk.labels.tolist() == [int(experiment.dataset.labels[i]) for i in ids]
            assert chunk.labels.dtype == torch.int64
            assert set(chunk.rounds.tolist()) == {number}
            counts = chunk.class_counts(10)
            assert {label: int(counts[label]) for label in range(10) if counts[label]} == dict.fromkeys(classes, 8)
            assert int(chunk.content.max()) < experiment.dataset.train_size
            assert not met & set(ids.tolist())
            met |= set(ids.tolist())
        assert number == 3


def test_the_whole_test_split_is_used_unless_asked_otherwise(small: Make) -> None:
    experiment = Experiment(small())
    chosen = experiment.test_set(0, seen(2, 7))
    expected = np.concatenate([experiment.dataset.test_ids(label) for label in (2, 7)])
    assert chosen.content.tolist() == expected.tolist()
    assert chosen.labels.tolist() == experiment.dataset.labels[expected].tolist()
    assert chosen.content.tolist() == experiment.test_set(1, seen(2, 7)).content.tolist()


def test_each_client_draws_its_own_fixed_test_set_of_so_many_per_class(small: Make) -> None:
    experiment, again = Experiment(small(test_per_class=10)), Experiment(small(test_per_class=10))
    everything = seen(*range(10))
    drawn = [experiment.test_set(client, everything) for client in range(3)]
    for client, chosen in enumerate(drawn):
        assert chosen.class_counts(10).tolist() == [10] * 10
        ids = chosen.content.tolist()
        assert len(set(ids)) == 100
        assert min(ids) >= experiment.dataset.train_size
        assert chosen.labels.tolist() == experiment.dataset.labels[ids].tolist()
        assert ids == again.test_set(client, everything).content.tolist()
        part = experiment.test_set(client, seen(4))
        assert part.content.tolist() == chosen.content[chosen.labels == 4].tolist()
    assert all(one.content.tolist() != other.content.tolist() for one, other in pairwise(drawn))
    other_seed = Experiment(small(test_per_class=10, seed=8)).test_set(0, everything)
    assert other_seed.content.tolist() != drawn[0].content.tolist()


def test_a_clients_test_set_depends_on_nothing_else(small: Make) -> None:
    plain = Experiment(small(test_per_class=5))
    other = Experiment(small(test_per_class=5, clients=9, rounds=2, overlap=0, epochs=7))
    other.test_set(8, seen(1))  # the order in which clients are served does not matter
    for client in (2, 0, 1):
        one, two = (e.test_set(client, seen(0, 9)).content.tolist() for e in (plain, other))
        assert one == two


def test_too_few_test_images_are_refused_with_key_class_and_number(small: Make) -> None:
    experiment = Experiment(small())
    fewest = min(len(experiment.dataset.test_ids(label)) for label in range(10))
    Experiment(small(test_per_class=fewest)).check_streams()
    with pytest.raises(DataError) as caught:
        Experiment(small(test_per_class=fewest + 1)).check_streams()
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert f"test-per-class = {fewest + 1}" in text
    assert "class " in text
    assert f"has {fewest} test images" in text


def test_too_few_training_images_are_refused_before_any_round(small: Make) -> None:
    with pytest.raises(StreamError, match=r"samples-per-class = 200, rounds = 3"):
        Experiment(small(samples_per_class=200)).check_streams()


def test_window_and_capacity_are_held_against_the_data_sets_classes(small: Make) -> None:
    Experiment(small(window=10, capacity=10))
    with pytest.raises(ConfigError) as caught:
        Experiment(small(window=11))
    assert str(caught.value) == "window = 11: must be at most the number of classes, 10"
    with pytest.raises(ConfigError) as caught:
        Experiment(small(capacity=9))
    assert str(caught.value) == "capacity = 9: must be at least the number of classes, 10"
    assert Experiment(small(capacity=9, num_classes=9)).num_classes == 9


def test_initial_weights_depend_on_the_seed_and_on_no_other_draw(small: Make) -> None:
    torch.manual_seed(1)
    first = Experiment(small())
    assert first.initial_weights()
    torch.manual_seed(2)
    torch.rand(5)
    other = Experiment(small(clients=5, epochs=3, overlap=0, learning_rate=0.5, test_per_class=3))
    other.check_streams()
    assert same_weights(first, other)
    assert not same_weights(first, Experiment(small(seed=8)))


def test_initial_weights_are_those_of_no_trained_network(small: Make) -> None:
    experiment = Experiment(small())
    before = {name: tensor.clone() for name, tensor in experiment.initial_weights().items()}
    net = experiment.network(before)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    assert all(torch.equal(experiment.initial_weights()[name], tensor) for name, tensor in before.items())
    assert list(before) == list(experiment.weight_shapes)
    assert {name for name, _ in net.named_parameters()} == experiment.parameter_names < set(experiment.weight_shapes)


def test_a_process_keeps_one_experiment_for_equal_configurations(small: Make) -> None:
    shared_experiment.cache_clear()
    one = shared_experiment(small())
    assert shared_experiment(Config.parse(small().flat())) is one
    assert shared_experiment(small(seed=8)) is not one


# Devices


def test_a_gpu_that_is_not_there_is_refused_with_the_number_there_are(small: Make) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = [f"cuda:{found}", f"cuda:{found + 7}"] + ([] if found else ["cuda"])
    for name in missing:
        with pytest.raises(ConfigError) as caught:
            choose_device(name)
        text = str(caught.value)
        assert f"device = {name!r}" in text
        assert f"{found} CUDA devices" in text
        assert "cpu" in text
        with pytest.raises(ConfigError, match="CUDA devices"):
            _ = Experiment(small(device=name)).device


# Paths


def test_a_run_folder_is_named_by_run_name_or_flowers_number(small: Make, tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert run_folder(small(), 5) == tmp_path / "run"
    assert run_folder(small(run_name=""), 5) == tmp_path / "run-5"


def test_a_client_folder_is_the_nodes_then_the_runs_then_below_the_results(small: Make, tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert client_folder(small(), 5, 2, {}) == tmp_path / "run" / "clients" / "client-002"
    config = small(clients=13, state_dir="/state")
    assert str(client_folder(config, 5, 12, {})) == "/state/client-012"
    assert str(client_folder(config, 5, 12, {"state-dir": "/mine"})) == "/mine/client-012"
    assert str(client_folder(config, 5, 12, {"state-dir": ""})) == "/state/client-012"
