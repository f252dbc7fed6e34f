"""FedFrame: its preset of parts, and the fixed output layer that all clients share."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.systems.runs import ran

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.inference.model_files import load_newest
from fedkace_flwr.registry import METHODS

Make = Callable[..., Config]
SHAPE = {"rounds": 4, "epochs": 2, "capacity": 20, "samples_per_class": 12}


@pytest.mark.slow
def test_the_method_is_balanced_replay_with_its_parts_and_no_more_bytes(small: Make, tmp_path: Path) -> None:
    method = ran(small(method="fedframe", run_name="method", **SHAPE))
    parts = {name.replace("-", "_"): value for name, value in METHODS["fedframe"].preset.items()}
    by_hand = ran(small(method="er-balanced", run_name="parts", **parts, **SHAPE))
    assert [line["client_accuracy"] for line in method] == [line["client_accuracy"] for line in by_hand]
    recorded = json.loads((tmp_path / "method" / "config.json").read_text())
    assert recorded["augment"] == "none" and recorded["test-time-augmentation"] == "none", "digits are not mirrored"
    plain = ran(small(method="fedavg", run_name="plain", **SHAPE))
    assert method[-1]["bytes"]["down"] == plain[-1]["bytes"]["down"]
    assert all(value is not None for value in method[-1]["local_accuracy"] + method[-1]["global_accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [{}, {"dp": "local", "dp_noise": 0.01}, {"dp": "central", "dp_noise": 0.01}])
def test_all_models_keep_the_frame_that_the_seed_draws(small: Make, tmp_path: Path, privacy: dict[str, Any]) -> None:
    shown = {"predict-with": "mean", "keep_models": "always"}
    config = small(method="er-balanced", output_layer="simplex", **shown, **privacy, **SHAPE)
    ran(config)
    frame = as_arrays(Experiment(config).initial_weights())
    for client in range(config.stream.clients):
        kept = load_newest(tmp_path / "run" / "clients" / f"client-{client:03d}").kept
        assert set(kept.weights) == {"local", "global"}
        for weights in kept.weights.values():
            for name in ("output.weight", "output.bias"):
                assert np.array_equal(weights[name], frame[name]), name
            assert not np.array_equal(weights["stem.0.weight"], frame["stem.0.weight"])


@pytest.mark.parametrize(
    ("data", "mirrored"),
    [
        ({"dataset": "digits"}, False),
        ({"dataset": "cifar100"}, True),
        ({"dataset": "folder"}, False),
        ({"dataset": "folder", "mirroring": "allowed"}, True),
        ({"dataset": "cifar100", "mirroring": "never"}, False),
        ({"dataset": "inbox", "class-names": "a,b", "image-size": 8}, False),
        ({"dataset": "inbox", "class-names": "a,b", "image-size": 8, "mirroring": "allowed"}, True),
    ],
)
def test_only_images_that_may_be_mirrored_are(data: dict[str, Any], mirrored: bool) -> None:
    config = configured(Config.parse({"method": "fedframe", "data-dir": "anywhere", **data}))[1]
    expected = ("flip-shift", "mirrored") if mirrored else ("none", "none")
    assert (config.training.augment, config.answers.test_time_augmentation) == expected


def test_mirroring_alone_changes_nothing() -> None:
    config = configured(Config.parse({"dataset": "digits", "mirroring": "allowed"}))[1]
    assert (config.training.augment, config.answers.test_time_augmentation) == ("none", "none")


def test_what_has_no_room_for_a_frame_is_refused(small: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"width = 1: with output-layer = 'simplex' and 10 classes, must be at least 2"
    ):
        Experiment(small(output_layer="simplex", width=1))
    with pytest.raises(ConfigError, match=r"TFCL's sub-models .* must be 'learned'"):
        small(method="tfcl", output_layer="simplex")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_adjustment": 0.5}, "logit-adjustment = 0.5: method = 'fedframe' sets it to 1.0, so it would have no"),
        ({"predict-with": "local"}, "predict-with = 'local': method = 'fedframe' sets it to 'prequential'"),
        ({"augment": "flip-shift"}, "augment = 'flip-shift': method = 'fedframe' sets it to 'auto'"),  # not of digits
    ],
)
def test_values_that_the_method_would_replace_are_refused(small: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        configured(small(method="fedframe", **changes))


def test_values_that_the_method_itself_sets_may_be_given(small: Make) -> None:
    parts = {name.replace("-", "_"): value for name, value in METHODS["fedframe"].preset.items()}
    _, plain = configured(small(method="fedframe"))
    assert configured(small(method="fedframe", **parts))[1] == plain
    for data in ("digits", "cifar100"):
        _, once = configured(small(method="fedframe", dataset=data))
        assert configured(once)[1] == once, "as a stored configuration has them"
