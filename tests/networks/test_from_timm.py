"""Networks of timm: what they keep of their publishers' and what not."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.common import rounds_of
from support.tools import need_modules

from fedkace_flwr.config import Config
from fedkace_flwr.configured import check_network, configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.export.loading import load_model
from fedkace_flwr.networks.catalogue import facts_of, seeded
from fedkace_flwr.networks.network import Blueprint

Make = Callable[..., Config]


@pytest.fixture(autouse=True)
def _timm() -> None:
    need_modules("timm")


def test_what_a_published_model_drops_by_default_it_keeps() -> None:
    net = seeded("timm:ghostnet_050", Blueprint(3, 32, 2), 0)
    batch = torch.rand(4, 3, 32, 32)
    first, second = (copy.deepcopy(net).train()(batch) for _ in range(2))
    assert torch.equal(first, second)


def test_a_size_for_which_it_fails_is_refused_with_one_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"image-size = 8: network = 'timm:dla46x_c'.*; 224 would fit"):
        facts_of("timm:dla46x_c", Blueprint(3, 8, 2))


def test_pictures_are_normalised_as_published(small: Make) -> None:
    """Unless they are not to be normalised."""
    of = {"network": "timm:test_resnet", "image_size": 16}
    assert Experiment(small(**of)).normalisation == ((0.5,) * 3, (0.5,) * 3)
    assert Experiment(small(**of, normalise=False)).normalisation == ((0.0,) * 3, (1.0,) * 3)
    other = Experiment(small(network="timm:test_efficientnet", image_size=32))
    assert other.normalisation == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    own = Experiment(small())
    assert own.normalisation == (own.dataset.mean, own.dataset.std)


@pytest.mark.slow
def test_a_run_leaves_a_model_that_predicts(small: Make, tmp_path: Path) -> None:
    """With Re-Fed, which needs the gradient of each sample's loss."""
    run_inline(small(method="refed", network="timm:test_vit", image_size=16, rounds=2, clients=2))
    assert all(each["failures"] == [] for each in rounds_of(tmp_path / "run"))
    model = load_model(tmp_path / "run" / "model")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "timm:test" in card
    pictures = np.random.default_rng(0).integers(0, 256, (3, 3, 16, 16), np.uint8)
    assert model.predict(pictures).probabilities.sum(axis=1) == pytest.approx(1, abs=1e-5)


def test_keys_that_it_does_not_use_are_told(small: Make) -> None:
    assert small(network="timm:test_resnet", width=16).unread == {"width": 16}


def test_a_method_that_splits_networks_refuses_it(small: Make) -> None:
    """And what the method refuses besides is told as with any network."""
    method, config = configured(small(method="tfcl", network="timm:test_resnet"))
    with pytest.raises(ConfigError, match=r"network = 'timm:test_resnet' with method = 'tfcl'"):
        check_network(method, config)
    with pytest.raises(ConfigError, match="gate = 'hold' with method = 'tfcl'"):
        configured(small(method="tfcl", network="timm:test_resnet", gate="hold"))


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"network = 'timm:test_resnet': .* pip install 'fedkace-flwr\[timm\]'"):
        seeded("timm:test_resnet", Blueprint(3, 32, 2), 0)
