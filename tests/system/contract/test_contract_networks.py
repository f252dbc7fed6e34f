"""Every network with every method, and what speaks of batch normalisation with a network that has none."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.common import rounds_of
from support.systems.contract import SHAPE, is_preset

from fedkace_flwr import configured as configuring
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.workers import Need
from fedkace_flwr.inference.model_files import load_newest
from fedkace_flwr.networks.catalogue import NETWORKS, Facts, facts_of
from fedkace_flwr.registry import METHODS

Make = Callable[..., Config]
OTHERS = sorted(set(NETWORKS) - {"resnet18", "cnn1d"})  # cnn1d takes series: test_contract_arrays.py
TINY = {**SHAPE, "clients": 2, "rounds": 2, "width": 2, "samples_per_class": 4, "epochs": 1}
_QUICK = {("cnn", "fedkace"), ("vit", "fedkace")}
_SLOW = {("mobilenet-v3-small", "refed"), ("vit", "refed"), ("cnn", "tfcl")}
_CLOSELY = ("fedkace", "refed", "tfcl")  # methods that ask different things of a network


def _marks(case: tuple[str, str]) -> list[pytest.MarkDecorator]:
    """`make quick` and `make test` run some cases of both kinds of network, with and without normalisation."""
    if case in _QUICK:
        return []
    return [pytest.mark.slow] if case in _SLOW else [pytest.mark.slow, pytest.mark.exhaustive]


def run(config: Config) -> list[dict[str, object]]:
    run_inline(config)
    records = rounds_of(Path(config.run.results_dir) / config.run.run_name)
    assert len(records) == config.stream.rounds
    assert all(record["failures"] == [] and record["accuracy"] is not None for record in records)
    return records


@pytest.mark.parametrize(
    ("network", "method"),
    [pytest.param(network, method, marks=_marks((network, method))) for network in OTHERS for method in _CLOSELY],
)
def test_a_network_with_what_methods_ask_of_it(small: Make, network: str, method: str) -> None:
    """Per-sample gradients (Re-Fed), halves (TFCL), answers of kept models, and the same numbers a second time."""
    config = small(method=method, network=network, keep_models="always", **TINY)
    records = run(config)
    if method == "fedkace":
        assert records == run(small(method=method, network=network, run_name="again", keep_models="always", **TINY))
    experiment, folder = Experiment(config), Path(config.run.results_dir) / "run" / "clients"
    for client in range(2):
        predictor = load_newest(folder / f"client-{client:03d}")
        seen = torch.zeros(10, dtype=torch.bool)
        seen[list(predictor.kept.seen)] = True
        samples = experiment.test_set(client, seen)
        found = predictor.probabilities(samples.images(experiment.dataset.fetch)).argmax(dim=1)
        accuracies = records[-1]["client_accuracy"]
        assert isinstance(accuracies, list)
        assert float((found == samples.labels).double().mean()) == pytest.approx(accuracies[client], abs=1e-9)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("network", OTHERS)
@pytest.mark.parametrize("method", sorted(name for name in METHODS if not is_preset(name) and name not in _CLOSELY))
def test_every_network_with_every_method(small: Make, network: str, method: str) -> None:
    run(small(method=method, network=network, **TINY))


def test_a_method_that_splits_networks_refuses_one_that_cannot_be_split(
    small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        configuring, "facts_of", lambda name, blueprint: Facts(features=8, has_running_means=False, half=None)
    )
    with pytest.raises(ConfigError, match=r"network = 'vit' with method = 'tfcl', .*must be one that can be split"):
        run_inline(small(method="tfcl", network="vit", **TINY))


@pytest.mark.parametrize(
    "keys",
    [
        {"dp": "local"},
        {"dp": "central"},
        {"batchnorm-statistics": "local"},
        {"secagg": True, "clients": 3},
        {"recalibrate-batchnorm": True, "classifier": "fading", "predict-with": "mean"},
        {"aggregation": "multi-krum", "clients": 3},
        {"output_layer": "simplex", "width": 2},
    ],
    ids=lambda keys: next(iter(keys.values())) if isinstance(next(iter(keys.values())), str) else next(iter(keys)),
)
def test_what_speaks_of_batch_normalisation_works_without_it(small: Make, keys: dict[str, object]) -> None:
    seen = keys.get("dp") != "central" and "secagg" not in keys
    records = run(small(network="cnn", defence="on" if seen else "off", **{**TINY, **keys}))
    assert all("running_means_cosine" not in record for record in records)
    assert ("update_cosine" in records[-1]) == seen


def test_hostile_clients_are_found_without_running_means(small: Make) -> None:
    config = small(network="cnn", defence="on", attack="sign-flip", **{**TINY, "clients": 5, "rounds": 4})
    run_inline(config)
    failures = [failure for record in rounds_of(Path(config.run.results_dir) / "run") for failure in record["failures"]]
    assert (4, "direction") in {(failure["client"], failure["kind"]) for failure in failures}


@pytest.mark.parametrize("network", ["resnet18", *OTHERS])
def test_the_need_of_a_worker_grows_with_the_batch(small: Make, network: str) -> None:
    one, other = (Need.of(small(network=network, batch_size=size)) for size in (16, 256))
    assert one.memory < other.memory and one.gpu < other.gpu


def test_a_client_reads_a_configuration_without_building_its_network(small: Make) -> None:
    """The site's policy, which may bound the network's size, is asked first."""
    config, built = small(network="cnn", width=256), facts_of.cache_info()
    assert configured(config)[1].model == config.model and facts_of.cache_info() == built


def test_too_small_images_and_too_few_features_are_refused(small: Make) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"network": "vit", "image_size": 9}, "image-size = 9: .*multiple"),
        ({"network": "mobilenet-v3-small", "stem": "imagenet"}, "image-size = 8: .*at least 32"),
        ({"network": "vit", "width": 1, "output_layer": "simplex"}, "width = 1: .*must be more; it gives 8 features"),
        ({"width": 1, "output_layer": "simplex"}, "width = 1: .*must be at least 2"),
        ({"network": "resnet"}, "network = 'resnet': must be one of resnet18, .*did you mean resnet18"),
    ]
    for keys, message in cases:
        with pytest.raises(ConfigError, match=message):
            Experiment(small(**keys))


def test_resnet18_is_the_default_and_written_down(small: Make) -> None:
    config = small(rounds=1, clients=2)
    run_inline(config)
    folder = Path(config.run.results_dir) / "run"
    assert json.loads((folder / "config.json").read_text())["network"] == "resnet18"
    assert np.isfinite(rounds_of(folder)[0]["accuracy"])
