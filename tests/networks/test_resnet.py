"""ResNet-18 as the paper counts it (section A.3)."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from support.gradients import gradient_of
from support.made.networks import seeded_resnet18
from torch import nn
from torch.nn import functional

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.networks.network import choose_stem, load_weights
from fedkace_flwr.networks.resnet import PointwiseConv2d, resnet18


@pytest.mark.parametrize(
    ("width", "stem", "parameters"), [(16, "cifar", 713_076), (64, "imagenet", 11_227_812)], ids=["cifar", "imagenet"]
)
def test_parameter_counts(width, stem, parameters):
    net = resnet18(100, width, stem)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert net.output.weight.numel() == 100 * 8 * width


def test_multiply_adds_of_the_cifar_network():
    """35.06 M in convolutions and output layer, counted from the shapes that pass through."""
    net = resnet18(100, 16, "cifar").eval()
    total = 0

    def count(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal total
        assert isinstance(module, nn.Conv2d | nn.Linear)
        total += output[0].numel() * module.weight[0].numel()

    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    with torch.inference_mode():
        net(torch.zeros(1, 3, 32, 32))
    assert total / 1e6 == pytest.approx(35.06, abs=0.005)


@pytest.mark.parametrize(
    ("stem", "size", "cells", "width"), [("cifar", 32, 4, 2), ("cifar", 8, 1, 5), ("imagenet", 112, 4, 2)]
)
def test_logits_are_the_output_layer_of_eight_times_width_features(width, stem, size, cells):
    net = seeded_resnet18(7, width, stem, 0).eval()
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features = net.features(images)
        logits = net(images)
        maps = net.blocks(net.stem(images))
    assert features.shape == (3, 8 * width)
    assert maps.shape == (3, 8 * width, cells, cells)
    assert torch.allclose(features, maps.sum(dim=(2, 3)) / cells**2, atol=1e-6)
    assert logits.shape == (3, 7)
    assert torch.allclose(logits, features @ net.output.weight.T + net.output.bias, atol=1e-6)


def test_the_stem_follows_the_size_unless_it_is_named():
    assert [choose_stem("auto", size) for size in (8, 111, 112, 224)] == ["cifar", "cifar", "imagenet", "imagenet"]
    assert (choose_stem("cifar", 224), choose_stem("imagenet", 32)) == ("cifar", "imagenet")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((10, 16, "auto"), "stem = 'auto'"), ((0, 16, "cifar"), "num-classes = 0"), ((10, 0, "imagenet"), "width = 0")],
)
def test_bad_arguments_are_refused_by_name(arguments, named):
    with pytest.raises(ConfigError, match=named):
        resnet18(*arguments)


def test_load_weights_copies_all_and_refuses_a_missing_name():
    source, target = seeded_resnet18(4, 2, "cifar", 0), seeded_resnet18(4, 2, "cifar", 1)
    weights = {name: value.clone() for name, value in source.state_dict().items()}
    load_weights(target, weights)
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in weights.items())
    weights["output.bias"].add_(1)
    assert torch.equal(target.output.bias, source.output.bias)
    del weights["output.bias"]
    with pytest.raises(RuntimeError, match=r"output\.bias"):
        load_weights(target, weights)


def test_bf16_leaves_parameters_statistics_and_gradients_in_float32():
    net = seeded_resnet18(7, 8, "cifar", 0)
    net.precision = torch.bfloat16
    net(torch.rand(4, 3, 32, 32)).sum().backward()
    tensors = [*net.state_dict().values(), *(parameter.grad for parameter in net.parameters())]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}


# oneDNN's backward pass of a strided 1x1 convolution of few channels writes past its buffers; see `PointwiseConv2d`.
_SEVERAL_STEPS = """
import torch
from fedkace_flwr.networks.resnet import resnet18
torch.set_num_threads(1)
torch.manual_seed(0)
for width, stem, size in ((4, "cifar", 8), (2, "cifar", 32), (4, "cifar", 64), (8, "cifar", 112), (4, "imagenet", 448)):
    for precision in (torch.float32, torch.bfloat16):
        net = resnet18(5, width, stem).to(memory_format=torch.channels_last).train()
        net.precision = precision
        for _ in range(8):
            images = torch.randn(3, 3, size, size).to(memory_format=torch.channels_last)
            torch.autograd.backward(net(images).square().mean())
            others = [torch.randn(count) for count in (3, 10, 100, 1000)]
"""


@pytest.mark.slow
def test_narrow_networks_keep_to_their_memory():
    done = subprocess.run([sys.executable, "-c", _SEVERAL_STEPS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("channels", "size"), [(4, 8), (4, 33), (8, 64), (8, 65), (16, 64)])
def test_a_strided_shortcut_is_the_convolution_that_it_is_by_definition(channels, size):
    """PyTorch's float64 kernels are no oneDNN's."""
    torch.manual_seed(0)
    shortcut = PointwiseConv2d(channels, 2 * channels, 2)
    images = torch.randn(2, channels, size, size).to(memory_format=torch.channels_last).requires_grad_()
    found = shortcut(images)
    torch.autograd.backward(found.square().sum())
    exact, weight = (value.detach().double().requires_grad_() for value in (images, shortcut.weight))
    wanted = nn.functional.conv2d(exact, weight, stride=2)
    torch.autograd.backward(wanted.square().sum())
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    assert torch.allclose(gradient_of(images).double(), gradient_of(exact), rtol=1e-4, atol=1e-4)
    assert torch.allclose(gradient_of(shortcut.weight).double(), gradient_of(weight), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_residual_sums_in_place_are_the_sums_to_the_last_bit(precision):
    def out_of_place(block, x):
        y = functional.relu(block.norm1(block.conv1(x)))
        return functional.relu(block.norm2(block.conv2(y)) + block.shortcut(x))

    nets = [seeded_resnet18(5, 4, "cifar", 0) for _ in range(2)]
    for block in nets[1].blocks:
        block.forward = partial(out_of_place, block)
    for net in nets:
        net.precision = precision
        images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        torch.autograd.backward(net(images).square().sum())
    for (name, one), other in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(gradient_of(one), gradient_of(other)), name
    assert all(torch.equal(one, other) for one, other in zip(nets[0].buffers(), nets[1].buffers(), strict=True))
