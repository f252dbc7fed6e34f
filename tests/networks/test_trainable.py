"""What is frozen of a network stays, computes as in evaluation, and is no parameter."""

import pytest
import torch
from torch import nn

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.networks.catalogue import NETWORKS, seeded
from fedkace_flwr.networks.lora import merged
from fedkace_flwr.networks.network import Blueprint, Network, load_weights
from fedkace_flwr.networks.trainable import NORMS, freeze
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.training.loop import optimiser_of

PICTURES = sorted(set(NETWORKS) - {"cnn1d"})


def trained(net: Network) -> set[str]:
    """Names of the arrays that two steps change."""
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    optimiser = optimiser_of(net, TrainingConfig())
    net.train()
    for _ in range(2):
        loss = net(torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("network", PICTURES)
def test_the_output_layer_alone_trains(network: str) -> None:
    whole, net = (seeded(network, Blueprint(3, 16, 4), 1) for _ in range(2))
    freeze(net, "output")
    assert {name for name, _ in net.named_parameters()} == {"output.weight", "output.bias"} == trained(net)
    assert net.frozen == net.state_dict().keys() - {"output.weight", "output.bias"}
    samples = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(net.train().features(samples), whole.eval().features(samples))


@pytest.mark.parametrize("network", ["resnet18", "vit"])
def test_normalisation_trains_with_its_statistics(network: str) -> None:
    net = seeded(network, Blueprint(3, 16, 4), 1)
    freeze(net, "norm")
    norms = [path for path, module in net.named_modules() if isinstance(module, NORMS)]
    wanted = {name for name in net.state_dict() if name.rpartition(".")[0] in {*norms, "output"}}
    assert trained(net) == wanted == net.state_dict().keys() - net.frozen


@pytest.mark.parametrize("network", PICTURES)
def test_adapters_train_and_a_merged_network_without_them_computes_the_same(network: str) -> None:
    whole, net = (seeded(network, Blueprint(3, 16, 4), 1).eval() for _ in range(2))
    freeze(net, "lora", 2, torch.Generator().manual_seed(3))
    samples = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(net(samples), whole(samples), atol=1e-5), "adapters start from 0"
    changed = trained(net)
    assert changed == {name for name, _ in net.named_parameters()} == net.state_dict().keys() - net.frozen
    plain = merged({name: tensor.numpy() for name, tensor in net.state_dict().items()})
    load_weights(whole, {name: torch.from_numpy(array) for name, array in plain.items()})
    torch.testing.assert_close(whole(samples), net.eval()(samples))


def test_without_normalisation_there_is_nothing_more_to_train() -> None:
    with pytest.raises(ConfigError, match=r"trainable = 'norm'.*'output'"):
        freeze(seeded("cnn", Blueprint(3, 16, 4), 1), "norm")


class Recurrent(Network):
    """Convolutions, or nothing, and a recurrent layer."""

    def __init__(self, *, convolutional: bool) -> None:
        super().__init__()
        self.maps = nn.Conv1d(1, 4, 3) if convolutional else nn.Identity()
        self.rnn = nn.GRU(4 if convolutional else 1, 8, batch_first=True)
        self.output = nn.Linear(8, 3)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.rnn(self.maps(x).transpose(1, 2))[0][:, -1]
        return features


def test_gradients_pass_through_a_frozen_recurrent_layer_in_training() -> None:
    """In evaluation cuDNN computes none."""
    net = Recurrent(convolutional=True)
    freeze(net, "lora", 2, torch.Generator())
    net.train()(torch.rand(2, 1, 8)).sum().backward()
    assert net.rnn.training and net.maps.get_parameter("weight_lora_up").grad is not None


def test_where_nothing_can_be_adapted_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainable = 'lora': .* must be 'all', 'output' or 'norm'"):
        freeze(Recurrent(convolutional=False), "lora", 2, torch.Generator())


def test_a_fixed_output_layer_is_frozen_too() -> None:
    net = seeded("resnet18", Blueprint(3, 16, 4), 1)
    net.fix_output(torch.ones(3, 32))
    freeze(net, "norm")
    assert {"output.weight", "output.bias"} <= net.frozen
    assert isinstance(net.output, nn.Linear) and not list(net.output.parameters())
