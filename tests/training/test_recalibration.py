"""Batch-norm statistics taken anew."""

import torch
from support.made.networks import seeded_resnet18
from torch import nn

from fedkace_flwr.training.loop import Preprocess
from fedkace_flwr.training.recalibration import recalibrate

PLAIN = Preprocess(torch.full((1, 3, 1, 1), 1 / 255), torch.zeros(1, 3, 1, 1))


def drawn(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_the_first_layers_statistics_are_those_of_its_inputs() -> None:
    net, images = seeded_resnet18(4, 8, "cifar", 3), drawn(40)
    layers = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    recalibrate(net, images, PLAIN, generator())
    with torch.no_grad():
        inputs = net.stem[0](PLAIN(images))
    assert float(inputs.mean().abs()) > 0.01, "other than the zeros that a layer starts with"
    torch.testing.assert_close(layers[0].running_mean, inputs.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(layers[0].running_var, inputs.var(dim=(0, 2, 3)))
    assert not net.training and all(layer.momentum is not None for layer in layers)


def test_it_forgets_earlier_statistics_and_changes_no_parameter() -> None:
    net, other = seeded_resnet18(4, 8, "cifar", 3), seeded_resnet18(4, 8, "cifar", 3)
    recalibrate(other, drawn(30, seed=9), PLAIN, generator())  # statistics of other images
    parameters = [parameter.detach().clone() for parameter in net.parameters()]
    for each in (net, other):
        recalibrate(each, drawn(300), PLAIN, generator())
    for mine, its in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, its)
    assert all(torch.equal(a, b) for a, b in zip(parameters, net.parameters(), strict=True))


def test_with_its_own_statistics_a_network_answers_in_evaluation_as_in_training() -> None:
    net, images = seeded_resnet18(4, 8, "cifar", 3), drawn(256)
    recalibrate(net, images, PLAIN, generator())
    with torch.no_grad():
        found = net(PLAIN(images))
        net.train()
        wanted = net(PLAIN(images))
    # Variances with and without Bessel's correction: 1 / 256 in the last layers, whose maps are single pixels.
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)
