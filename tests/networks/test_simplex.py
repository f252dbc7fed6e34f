"""The fixed output layer."""

import pytest
import torch
from support.made.networks import seeded_resnet18
from torch.nn import functional

from fedkace_flwr.networks.network import load_weights
from fedkace_flwr.networks.output import simplex
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.training.loop import optimiser_of


@pytest.mark.parametrize(("classes", "features"), [(2, 2), (10, 64), (100, 128), (8, 8)])
def test_every_two_classes_have_the_same_angle(classes: int, features: int) -> None:
    frame = simplex(classes, features, torch.Generator().manual_seed(0)).double()
    expected = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1)
    torch.testing.assert_close(frame @ frame.T, expected, atol=1e-6, rtol=0)


def test_the_generator_draws_its_orientation() -> None:
    one, same, other = (simplex(5, 16, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.allclose(one, other)


def test_a_fixed_output_layer_stays_through_training_and_keeps_its_names() -> None:
    learned, fixed = seeded_resnet18(5, 4, "cifar", 3), seeded_resnet18(5, 4, "cifar", 3)
    frame = simplex(5, 32, torch.Generator().manual_seed(0))
    fixed.fix_output(frame)
    assert fixed.state_dict().keys() == learned.state_dict().keys()
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    before = fixed.features(images).detach()
    optimiser = optimiser_of(fixed, TrainingConfig())
    for _ in range(3):
        functional.cross_entropy(fixed(images), torch.arange(6) % 5).backward()
        optimiser.step()
        optimiser.zero_grad()
    assert torch.equal(fixed.output.weight, frame) and not fixed.output.bias.any()
    assert not torch.allclose(fixed.features(images), before), "the features are learned"
    load_weights(learned, fixed.state_dict())
    torch.testing.assert_close(learned.eval()(images), fixed.eval()(images))
