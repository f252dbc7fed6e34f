"""FedKACE's ablations: presets of its own options (paper, section 5.3)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.common import SMALL
from support.systems.runs import ran

from fedkace_flwr.algorithms.fedkace_buffer import Scores, select
from fedkace_flwr.algorithms.fedkace_loss import FullGradientReplayLoss
from fedkace_flwr.algorithms.fedkace_replay import GradientBalance
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured, find_method
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.registry import METHODS
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.training.losses import Batch

Make = Callable[..., Config]
ABLATIONS = ("as1", "as2", "as3", "as4", "as5", "as6", "as7", "as8", "lkc")


def test_every_ablation_is_a_preset_of_keys_that_exist(small: Make) -> None:
    for name in set(ABLATIONS) - {"lkc"}:  # a server of its own
        method, config = configured(small(method=name))
        assert method.preset and all(config.flat()[key] == value for key, value in method.preset.items())
        assert method.preset != {key: Config().flat()[key] for key in method.preset}
    assert not METHODS["fedkace"].preset
    with pytest.raises(ConfigError, match=r"method = 'as9': must be one of .*as1.*fedkace"):
        find_method("as9")


SHAPE = {"rounds": 5, "epochs": 3, "capacity": 12, "evaluate": "both"}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ran(Config.parse({**SMALL, **SHAPE, "results-dir": str(tmp_path_factory.mktemp("usual")), "run-name": "x"}))


@pytest.mark.slow
@pytest.mark.xdist_group("ablations")
@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_runs_and_differs_from_fedkace(small: Make, usual: list[dict[str, Any]], name: str) -> None:
    ablated = ran(small(run_name=name, method=name, **SHAPE))
    assert usual != ablated
    last = ablated[-1]
    if name == "as2":
        assert ablated[0]["switched_at"] == [1, 1, 1] and last["client_accuracy"] == last["global_accuracy"]
    if name == "as3":
        assert last["switched_at"] == [None] * 3 and last["client_accuracy"] == last["local_accuracy"]
    if name in ("as4", "as8"):
        assert all(weights == [1.0, 1.0, 1.0] for record in ablated for weights in record["replay_weights"])
    if name == "as5":
        assert usual[0]["client_accuracy"] == ablated[0]["client_accuracy"]  # no replay yet
        assert usual[1]["replay_weights"] != ablated[1]["replay_weights"]


@pytest.mark.slow
def test_without_aggregation_a_client_gets_its_own_model_back(small: Make) -> None:
    records = ran(small(method="lkc", evaluate="both", rounds=4))
    for record in records:
        assert record["global_accuracy"] == pytest.approx(record["local_accuracy"])


def test_the_full_gradient_of_a_linear_model_is_the_output_layers() -> None:
    """Where the output layer is all there is, AS5's ratio is the default's."""
    generator = generator_for(0, "test")
    weight = torch.randn(4, 5, generator=generator, requires_grad=True)
    features = torch.randn(6, 5, generator=generator)
    labels = torch.tensor([0, 1, 0, 2, 3, 2])
    replayed = torch.tensor([False, False, False, True, True, True])
    current, old = torch.tensor([True, True, False, False]), torch.tensor([False, False, True, True])
    balance, unused = GradientBalance(), torch.ones(3, requires_grad=True)
    objective = FullGradientReplayLoss(current, old, balance, [weight, unused])
    objective.begin_epoch(1.0, 1.0)
    objective.loss(features @ weight.T, features, Batch(features, labels, replayed, torch.arange(6)))
    objective.end_epoch()

    def squared_norm(rows: torch.Tensor, mask: torch.Tensor) -> float:
        logits = (features[rows] @ weight.T)[:, mask]
        own = labels[rows] - int(mask.nonzero()[0])
        loss = torch.nn.functional.cross_entropy(logits, own, reduction="sum")
        return float(torch.autograd.grad(loss, weight)[0].square().sum())

    expected = squared_norm(replayed, old) / squared_norm(~replayed, current)
    assert balance.weight == pytest.approx(expected, rel=1e-5)


def test_random_and_information_rules_keep_quotas_and_draw_anew() -> None:
    labels = torch.arange(40) % 4
    old = torch.tensor([True, True, True, False])
    active = torch.ones(4, dtype=torch.bool)
    scores = Scores(torch.zeros(40), torch.linspace(0, 9, 40, dtype=torch.float64), torch.zeros(40))
    for rule in ("random", "information"):
        draws = {
            tuple(select(scores, labels, 12, old, active, generator_for(s, "t"), rule=rule).tolist()) for s in range(9)
        }
        assert len(draws) > 3
        assert all(torch.bincount(labels[list(draw)]).tolist() == [3, 3, 3, 3] for draw in draws)
    two_stage = {tuple(select(scores, labels % 3, 12, old, old, generator_for(s, "t")).tolist()) for s in range(5)}
    assert len(two_stage) == 1
