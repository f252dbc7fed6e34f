"""A step, a prediction and a scoring on a GPU: no tensors of two devices meet, and a step reads nothing back."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support.doubles.fake_gpu import CUDA, GPU, fake_tensors, placed
from torch import Tensor

from fedkace_flwr.algorithms import fedkace_buffer
from fedkace_flwr.algorithms.fedcbdr_loss import TemperatureLoss
from fedkace_flwr.algorithms.fedkace_loss import BalancedReplayLoss, FullGradientReplayLoss
from fedkace_flwr.algorithms.fedkace_replay import GradientBalance
from fedkace_flwr.algorithms.ofcl_views import VIEWS
from fedkace_flwr.clients.fedprox import ProximalLoss
from fedkace_flwr.compute.memory import at_home, images_at_once
from fedkace_flwr.networks.network import load_weights
from fedkace_flwr.networks.resnet import ResNet18, resnet18
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.training.augmentation import FlipShift
from fedkace_flwr.training.distillation import DistilledLoss
from fedkace_flwr.training.loop import Preprocess, features_of, optimiser_of, predict
from fedkace_flwr.training.losses import Objective, TaskLoss
from fedkace_flwr.training.sample_gradients import squared_norms_of
from fedkace_flwr.training.steps import Pool, take_step
from fedkace_flwr.training.stored_logits import StoredLogits, StoredLogitsLoss

CLASSES, WIDTH, SIDE, SAMPLES, BATCH = 5, 4, 16, 20, 8


def masks(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.ones(CLASSES, dtype=torch.bool, device=device), torch.ones(CLASSES, dtype=torch.bool, device=device)


def stored(device: torch.device) -> StoredLogits:
    known = torch.ones((6, CLASSES), dtype=torch.bool, device=device)
    return StoredLogits(
        torch.zeros(6, dtype=torch.int64, device=device), torch.zeros((6, CLASSES), device=device), known
    )


TEMPERATURES: dict[str, Any] = {"tau_old": 0.9, "tau_new": 1.1, "weight_old": 1.1, "weight_new": 0.9}
LOSSES: dict[str, Callable[[ResNet18, torch.device], Objective]] = {
    "task": lambda net, device: TaskLoss(*masks(device)),
    "balanced": lambda net, device: BalancedReplayLoss(*masks(device), GradientBalance()),
    "with bias": lambda net, device: BalancedReplayLoss(*masks(device), GradientBalance(), gradient_bias=True),
    "full gradient": lambda net, device: FullGradientReplayLoss(
        *masks(device), GradientBalance(), list(net.parameters())
    ),
    "temperature": lambda net, device: TemperatureLoss(*masks(device), **TEMPERATURES),
    "proximal": lambda net, device: ProximalLoss(masks(device)[0], list(net.parameters()), 0.1),
    "stored logits": lambda net, device: StoredLogitsLoss(TaskLoss(*masks(device)), stored(device), 0.1, 14),
    "distilled": lambda net, device: DistilledLoss(
        torch.ones((SAMPLES, CLASSES), dtype=torch.bool, device=device),
        torch.zeros((SAMPLES, CLASSES), device=device),
        weight=0.5,
        temperature=2.0,
    ),
}


def network(device: torch.device) -> ResNet18:
    return cast(ResNet18, placed(resnet18(CLASSES, WIDTH, "cifar"), device))


def preprocess(device: torch.device) -> Preprocess:
    return Preprocess(torch.ones((1, 3, 1, 1), device=device), torch.zeros((1, 3, 1, 1), device=device))


def pool(device: torch.device) -> Pool:
    images = torch.zeros((SAMPLES, SIDE, SIDE, 3), dtype=torch.uint8, device=device)
    labels = torch.zeros(SAMPLES, dtype=torch.int64, device=device)
    replayed = torch.zeros(SAMPLES, dtype=torch.bool, device=device)
    changes = FlipShift(SAMPLES, SIDE, SIDE, device, torch.Generator())
    return Pool(images, labels, replayed, preprocess(device), changes, torch.zeros(CLASSES, device=device))


def step(name: str, *, of: torch.device = GPU, **changes: Any) -> Tensor:
    net = network(GPU).train()
    objective = LOSSES[name](net, of)
    if isinstance(objective, BalancedReplayLoss):
        objective._replays = True
    optimiser = optimiser_of(net, TrainingConfig())
    positions = torch.zeros(BATCH, dtype=torch.int64, device=GPU)
    return take_step(net, pool(GPU), objective, optimiser, positions)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_stays_on_its_device_and_reads_nothing_back(
    name: str, precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if precision is torch.bfloat16 and GPU != CUDA:
        pytest.skip("without a GPU, PyTorch has no autocast for the device that stands for one")
    monkeypatch.setattr(ResNet18, "precision", precision)
    with fake_tensors():
        assert step(name).device == GPU


@pytest.mark.parametrize("word", ["adamw", "sgd"])
def test_on_cuda_the_learning_rate_is_on_the_device(word: str) -> None:
    """Plain steps too, so that they round as recorded ones do."""
    with fake_tensors():
        net = network(CUDA)
        optimiser = optimiser_of(net, TrainingConfig(optimiser=word))
        assert isinstance(optimiser.rate, Tensor)
        assert (optimiser.rate.device, optimiser.rate.dtype) == (CUDA, torch.float32)


def test_scores_and_condition_numbers_are_computed_where_the_logits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, until they are copied home together; masks of classes are found on the CPU."""
    found: list[torch.device] = []
    watched = noted(found, lambda x, centres: x.device, fedkace_buffer._squared_distances)
    monkeypatch.setattr(fedkace_buffer, "_squared_distances", watched)
    with fake_tensors():
        logits = torch.zeros((12, CLASSES), device=GPU)
        labels, seen = torch.zeros(12, dtype=torch.int64), [2, 3]
        monkeypatch.setattr(fedkace_buffer, "_chosen", lambda active: torch.tensor(seen))
        scores = fedkace_buffer.score_candidates(logits, labels, 8, *masks(torch.device("cpu")))
    assert set(found) == {GPU}
    assert all(each.device.type == "cpu" and each.dtype == torch.float64 for each in vars(scores).values())


def noted(notes: list[Any], note: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that also notes something of its arguments."""

    def call(*arguments: Any) -> Any:
        notes.append(note(*arguments))
        return function(*arguments)

    return call


@pytest.mark.parametrize("count", [0, 1, 300, 5000])
def test_passes_of_a_prediction_have_one_size_and_come_home_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(ResNet18, "features", noted(sizes, lambda net, x: len(x), ResNet18.features))
    moved: list[torch.Size] = []
    monkeypatch.setattr(Tensor, "cpu", noted(moved, lambda tensor: tensor.shape, Tensor.cpu))
    with fake_tensors():
        net = network(GPU)
        at_once = images_at_once(*net.largest_map(3, SIDE, SIDE))
        content = torch.zeros((count, 3, SIDE, SIDE), dtype=torch.uint8)
        images_of = Tensor.clone
        found = predict(net, images_of, content, preprocess(GPU), mirrored=True)
        assert found.shape == (count, CLASSES) and found.device.type == "cpu"
        assert sizes == [at_once] * -(-count // at_once)
        assert moved == [found.shape]
        assert predict(net, images_of, content, preprocess(GPU), home=False).device == GPU
        assert features_of(net, images_of, content, preprocess(GPU)).shape == (count, 8 * WIDTH)


def test_the_size_of_a_pass_follows_from_the_network_alone() -> None:
    """By hand: 32 maps of 32 x 32 x 16 floats take 2 MiB, and 1 GiB holds 512 of them."""
    assert images_at_once(32, 32, 16) == 512
    assert images_at_once(64, 64, 16) == 128
    assert images_at_once(56, 56, 16) == 128  # 6.125 MiB each: 167, and 128 is the power of two below
    assert images_at_once(8, 8, 4) == 512 and images_at_once(112, 112, 64) == 16  # neither more nor fewer
    assert resnet18(5, 16, "cifar").largest_map(3, 32, 32) == (32, 32, 16)
    assert resnet18(5, 64, "imagenet").largest_map(3, 224, 224) == (112, 112, 64)


def test_many_tensors_come_home_in_one_copy_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_tensors():
        net = network(GPU)
        moved: list[torch.dtype] = []
        monkeypatch.setattr(Tensor, "to", noted(moved, lambda tensor, *_: tensor.dtype, Tensor.to))
        found = at_home(net.state_dict())
        assert sorted(map(str, moved)) == ["torch.float32", "torch.int64"]
        assert {tensor.device.type for tensor in found.values()} == {"cpu"}
        assert {name: tensor.shape for name, tensor in found.items()} == {
            name: tensor.shape for name, tensor in net.state_dict().items()
        }
    mine = {"a": torch.arange(3), "b": torch.ones(2, 2)}
    assert all(
        found[name] is mine[name] or torch.equal(found[name], mine[name]) for found in [at_home(mine)] for name in mine
    )


def test_weights_go_to_the_device_in_one_copy_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_tensors():
        weights, net = network(torch.device("cpu")).state_dict(), network(GPU)
        moved: list[tuple[str, str]] = []
        monkeypatch.setattr(
            Tensor, "to", noted(moved, lambda tensor, *_: (tensor.device.type, str(tensor.dtype)), Tensor.to)
        )
        load_weights(net, weights)
        assert sorted(moved) == [("cpu", "torch.float32"), ("cpu", "torch.int64")]


@pytest.mark.parametrize("name", VIEWS)
def test_ofcls_views_stay_on_the_device(name: str) -> None:
    with fake_tensors():
        images, numbers = torch.zeros((4, 3, SIDE, SIDE), device=GPU), torch.zeros((4, 64), device=GPU)
        assert VIEWS[name](images, numbers).device == GPU


def test_the_norms_of_samples_gradients_stay_on_the_device() -> None:
    with fake_tensors():
        net = network(GPU).eval()
        with squared_norms_of(net) as norms:
            net(torch.zeros((BATCH, 3, SIDE, SIDE), device=GPU)).sum().backward()
        assert norms.total.shape == (BATCH,) and norms.total.device == GPU and norms.total.dtype == torch.float64
