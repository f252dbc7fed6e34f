"""SCAFFOLD: control variates of clients and server."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from flwr.app import ArrayRecord
from support.systems.runs import last, ran, run

from fedkace_flwr.clients.scaffold import PREFIX
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.rounds.server_round import ServerRound
from fedkace_flwr.strategies.scaffold import Scaffold
from fedkace_flwr.training.loop import learning_rates

Make = Callable[..., Config]


def test_with_plain_sgd_a_control_variate_is_that_of_option_two(small: Make) -> None:
    """c_i - c + (x - y_i) / (K eta), where the steps' learning rates take the place of K eta; by hand for two rounds."""
    config = small(
        method="scaffold", optimiser="sgd", epochs=2, rounds=2, clients=1, weight_decay=0.0, diagnostics=True
    )
    experiment = Experiment(config)
    grid = run(config)
    steps = [-(-len(experiment.chunk(0, number)) // config.training.batch_size) for number in (1, 2)]
    rates = [count * sum(learning_rates(config.training, range(2))) for count in steps]
    start, after = as_arrays(experiment.initial_weights()), last(config)
    first, second = (grid.model_returned(number, 0) for number in (1, 2))
    # With a single client c = c_i, so the model moves by the sum of the means of both rounds' gradients.
    for name in experiment.travelling.parameters:
        moved = rates[0] * first[f"{PREFIX}{name}"] + rates[1] * second[f"{PREFIX}{name}"]
        assert np.abs(moved).max() > 0
        assert start[name] - after.weights[name] == pytest.approx(moved, rel=1e-3, abs=1e-6)


def test_the_servers_control_variate_is_the_mean_of_all_clients_with_partial_participation(small: Make) -> None:
    config = small(method="scaffold", optimiser="sgd", fraction_train=0.6, rounds=3)
    ran(config)
    held = last(config).arrays
    for name in Experiment(config).travelling.parameters:
        each = [held.get(f"{client}.{name}", np.zeros(())) for client in range(3)]
        assert any(array.any() for array in each)
        assert held[f"{PREFIX}{name}"] == pytest.approx(sum(each) / 3, rel=1e-4, abs=1e-6)


def test_when_a_client_joins_the_servers_control_variate_stays_the_mean() -> None:
    """Two clients with c_i = 6, then three: c = 4, since the third has c_i = 0."""
    config = Config.parse({"method": "scaffold"})
    two, three = (
        cast(ServerRound, SimpleNamespace(clients=count, parameters={"w"}, replied={"w": ((1,), np.float32)}))
        for count in (2, 3)
    )
    rule, again = Scaffold(config), Scaffold(config)
    rule.begin_round(two, ArrayRecord())
    arrays, record = rule.state()
    again.restore({**arrays, f"{PREFIX}w": np.array([6.0], np.float32)}, record)
    for _ in range(2):
        again.begin_round(three, ArrayRecord())
        assert again.state()[0][f"{PREFIX}w"] == pytest.approx(4.0)


def test_in_the_first_round_it_is_federated_averaging(small: Make) -> None:
    """All control variates are 0, and adding 0 to a gradient changes no bit of it."""
    models = []
    for method in ("scaffold", "fedprox"):
        config = small(method=method, run_name=method, optimiser="sgd", rounds=1, fedprox_mu=0.0)
        ran(config)
        models.append(last(config).weights)
    assert all(np.array_equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.slow
def test_where_clients_keep_different_classes_it_does_not_lose_to_federated_averaging(small: Make) -> None:
    """By plain SGD with many small steps, over digits of five classes for each of five clients."""
    stream = {"clients": 5, "rounds": 5, "window": 5, "overlap": 5, "samples_per_class": 12}
    steps = {"optimiser": "sgd", "learning_rate": 0.1, "epochs": 10, "batch_size": 8, "network": "mlp", "width": 16}
    means = []
    for method in ("fedavg", "scaffold"):
        lines = ran(small(method=method, run_name=method, seed=0, **stream, **steps))
        means.append(sum(line["accuracy"] for line in lines) / len(lines))
    assert means[1] > means[0] > 0.8
