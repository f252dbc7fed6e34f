"""Norms of the samples' gradients from one backward pass, against a backward pass for each sample."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.made.networks import seeded_resnet18
from torch import Tensor, nn
from torch.func import functional_call

from fedkace_flwr.networks.resnet import PointwiseConv2d
from fedkace_flwr.training import sample_gradients
from fedkace_flwr.training.sample_gradients import squared_norms, squared_norms_of


def one_by_one(net: nn.Module, inputs: Tensor, weights: Tensor) -> list[float]:
    """Squared gradient norms of each sample's loss, a weighted sum of its outputs."""
    found = []
    for sample, weight in zip(inputs.split(1), weights.split(1), strict=True):
        loss = (net(sample) * weight).sum()
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        found.append(sum(float(gradient.double().square().sum()) for gradient in gradients))
    return found


def together(net: nn.Module, inputs: Tensor, weights: Tensor) -> list[float]:
    with squared_norms_of(net) as norms:
        torch.autograd.backward((net(inputs) * weights).sum())
    assert norms.total.dtype == torch.float64
    return norms.total.tolist()


def check(net: nn.Module, shape: tuple[int, ...], samples: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn((samples, *shape), generator=generator)
    weights = torch.randn(net(inputs).shape, generator=generator)
    assert together(net, inputs, weights) == pytest.approx(one_by_one(net, inputs, weights), rel=1e-4)


def test_a_linear_layer_by_hand() -> None:
    layer = nn.Linear(2, 1)
    taken, gradient = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[2.0], [1.0]])
    assert squared_norms(layer, taken, gradient).tolist() == [25 * 4 + 4, 1 + 1]  # weights, and the bias


def test_a_convolution_of_one_place_is_a_linear_layer() -> None:
    taken, gradient = torch.tensor([3.0, 4.0]).view(1, 2, 1, 1), torch.full((1, 1, 1, 1), 2.0)
    assert squared_norms(nn.Conv2d(2, 1, 1), taken, gradient).tolist() == [104]


@given(
    channels=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    size=st.tuples(st.integers(3, 7), st.integers(3, 7)),
    bias=st.booleans(),
    samples=st.integers(1, 5),
    unfolded=st.sampled_from([1, 300, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_any_convolution(channels, kernel, stride, padding, size, bias, samples, unfolded, seed) -> None:
    layer = nn.Conv2d(channels[0], channels[1], kernel, stride, padding, bias=bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_gradients, "_UNFOLDED", unfolded)  # samples one by one, a few or all at a time
        check(layer, (channels[0], *size), samples, seed)


@pytest.mark.parametrize(("inputs", "outputs", "size"), [(3, 4, 9), (32, 32, 2)])
def test_either_way_to_a_convolutions_norm(inputs: int, outputs: int, size: int) -> None:
    """Many places and few channels, by the product; few places and many channels, by inner products between places."""
    assert (size * size * (9 * inputs + outputs) < 9 * inputs * outputs) == (inputs == 32)
    check(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), (inputs, size, size), 4, 0)


def test_a_convolution_that_goes_around_the_librarys() -> None:
    check(PointwiseConv2d(4, 8, 2), (4, 48, 48), 3, 0)


def test_batch_normalisation_by_running_statistics() -> None:
    layer = nn.BatchNorm2d(3)
    for _ in range(3):
        layer(torch.randn(8, 3, 5, 5) * 3 + 2)
    nn.init.normal_(layer.weight)
    check(layer.eval(), (3, 5, 5), 6, 0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_a_whole_network_whose_activations_are_changed_in_place(stem: str, layout: torch.memory_format) -> None:
    net = seeded_resnet18(5, 4, stem, 0).to(memory_format=layout)  # type: ignore[call-overload]
    net.train()
    net(torch.randn(16, 3, 40, 40, generator=torch.Generator().manual_seed(1)))  # running statistics to normalise by
    check(net.eval(), (3, 40, 40), 3, 2)


def test_layers_whose_samples_cannot_be_told_apart_or_that_have_no_rule_are_refused() -> None:
    for layer, shape, complaint in [
        (nn.BatchNorm2d(2), (3, 2, 4, 4), "training mode"),
        (nn.Conv2d(2, 2, 1, groups=2), (3, 2, 4, 4), "no rule"),
        (nn.Conv2d(2, 2, 3, dilation=2), (3, 2, 8, 8), "no rule"),
        (nn.Conv2d(2, 2, 3, padding="same"), (3, 2, 4, 4), "no rule"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (3, 2, 4, 4), "no rule"),
        (nn.LayerNorm(4), (3, 4), "LayerNorm: no rule"),
    ]:
        with pytest.raises(TypeError, match=complaint), squared_norms_of(layer):
            torch.autograd.backward(layer(torch.randn(shape)).sum())


def test_nothing_is_left_on_the_network() -> None:
    net = seeded_resnet18(5, 2, "cifar", 0).eval()
    with pytest.raises(RuntimeError, match="on purpose"), squared_norms_of(net):
        raise RuntimeError("on purpose")
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
def test_recurrent_layers_which_vmap_cannot_take(layer: type[nn.GRU | nn.LSTM]) -> None:
    net = layer(2, 4, batch_first=True).double()
    parameters = {name: each.detach() for name, each in net.named_parameters()}
    series, weights = torch.randn(2, 3, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(given: dict[str, Tensor], sample: tuple[Tensor, ...]) -> Tensor:
        return (functional_call(net, given, (sample[0][None, :, :2],))[0] * sample[1]).sum()

    norms, total = sample_gradients.one_by_one(loss, parameters, (series, weights))
    own = [
        torch.autograd.grad(loss(dict(net.named_parameters()), each), list(net.parameters()))
        for each in zip(series, weights, strict=True)
    ]
    assert norms.tolist() == pytest.approx([sum(float(g.square().sum()) for g in each) for each in own])
    for mean, each in zip(total.values(), zip(*own, strict=True), strict=True):
        torch.testing.assert_close(mean, sum(each))
