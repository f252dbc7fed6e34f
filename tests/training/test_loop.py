"""Objectives, the training loop and the prediction loop, on tiny networks and 8x8 images."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from support.gradients import gradient_of
from support.made.networks import seeded_resnet18
from torch import Tensor, nn

from fedkace_flwr.algorithms.fedkace_loss import BalancedReplayLoss
from fedkace_flwr.algorithms.fedkace_replay import GradientBalance
from fedkace_flwr.errors import RunError
from fedkace_flwr.networks.resnet import ResNet18
from fedkace_flwr.networks.trainable import freeze
from fedkace_flwr.samples import Form
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.training import loop
from fedkace_flwr.training.batches import EPOCHS
from fedkace_flwr.training.loop import Preprocess, predict, train
from fedkace_flwr.training.losses import Batch, TaskLoss
from fedkace_flwr.training.optimisers import Adam

CLASSES = 5
CURRENT = torch.tensor([False, True, True, False, False])
OLD = torch.tensor([True, True, False, False, False])
PREPROCESS = Preprocess.by_statistics((0.4, 0.5, 0.6), (0.3, 0.25, 0.2), torch.device("cpu"))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int = 0) -> ResNet18:
    return seeded_resnet18(CLASSES, 2, "cifar", seed)


def without_norms(module: nn.Module) -> None:
    """Take batch normalisation out, so that a sample's features do not depend on its batch."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, nn.Identity())
        else:
            without_norms(child)


def samples(count: int, allowed: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=generator(seed), dtype=torch.uint8)
    classes = allowed.nonzero().squeeze(1)
    return images, classes[torch.randint(len(classes), (count,), generator=generator(seed + 1))]


def settings_of(**changes: Any) -> TrainingConfig:
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 4, **changes}
    return TrainingConfig(**settings)


@pytest.mark.parametrize("captured", [False, True])
def test_features_of_a_frozen_body_are_computed_once_with_equal_results(
    monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    found, passes = [], []
    for once in (True, False):
        net, seen = network(), list[int]()
        freeze(net, "output")
        net.blocks.register_forward_hook(lambda module, taken, given, seen=seen: seen.append(len(given)))
        if not once:
            monkeypatch.setattr(loop, "head_of", lambda net: None)
        chunk, buffer = samples(9, CURRENT, 1), samples(6, OLD, 3)
        objective, settings = BalancedReplayLoss(CURRENT, OLD, GradientBalance()), settings_of(epochs=3)
        train(net, chunk, buffer, objective, settings, PREPROCESS, generator(5), captured=captured)
        found.append(state_of(net))
        passes.append(sum(seen))
    assert passes == [15, 45]
    assert not torch.equal(found[0]["output.weight"], network().output.weight)
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-4, atol=1e-5)


def state_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def trained(
    chunk: tuple[Tensor, Tensor],
    buffer: tuple[Tensor, Tensor],
    objective: TaskLoss | None = None,
    *,
    seed: int = 0,
    net: ResNet18 | None = None,
    **changes: object,
) -> ResNet18:
    net = net or network()
    objective = objective or BalancedReplayLoss(CURRENT, OLD, GradientBalance())
    train(net, chunk, buffer, objective, settings_of(**changes), PREPROCESS, generator(seed))
    return net


@contextmanager
def recorded_steps() -> Iterator[list[dict[str, float]]]:
    """The hyperparameters that every optimiser step in the block is taken with."""
    steps: list[dict[str, float]] = []

    def recorded(optimiser: Adam) -> None:
        steps.append({"lr": float(optimiser.rate), "weight_decay": optimiser.weight_decay})
        step(optimiser)

    step = Adam.step
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Adam, "step", recorded)
        yield steps


# Objectives


def random_batch(seed: int, size: int) -> tuple[Tensor, Tensor, Batch]:
    """Float64 logits, features, and labels allowed by each side's mask."""
    rng = np.random.default_rng(seed)
    replayed = rng.random(size) < 0.4
    labels = np.where(replayed, rng.choice([0, 1], size), rng.choice([1, 2], size))
    batch = Batch(torch.empty(size, 0), torch.from_numpy(labels), torch.from_numpy(replayed), torch.arange(size))
    logits = torch.from_numpy(rng.normal(size=(size, CLASSES))).requires_grad_()
    return logits, torch.from_numpy(rng.normal(size=(size, 3))), batch


def naive_losses(logits: Tensor, batch: Batch) -> list[float]:
    losses = []
    for x, label, replayed in zip(logits.tolist(), batch.labels.tolist(), batch.replayed.tolist(), strict=True):
        allowed = (0, 1) if replayed else (1, 2)
        losses.append(math.log(math.fsum(math.exp(x[c]) for c in allowed)) - x[label])
    return losses


@pytest.mark.parametrize(("seed", "weight"), [(0, 0.0), (1, 1.0), (2, 3.75)])
def test_balanced_loss_is_the_weighted_sum_over_the_batchs_size(seed, weight):
    logits, features, batch = random_batch(seed, 11)
    balance = GradientBalance()
    balance.weight = weight
    objective = BalancedReplayLoss(CURRENT, OLD, balance)
    objective.begin_epoch(1.0, 1.0)
    weights = [weight if replayed else 1.0 for replayed in batch.replayed.tolist()]
    expected = math.fsum(w * loss for w, loss in zip(weights, naive_losses(logits, batch), strict=True)) / 11
    assert objective.loss(logits, features, batch).item() == pytest.approx(expected, abs=1e-12)


def test_task_loss_is_the_plain_mean_over_each_samples_own_classes():
    logits, features, batch = random_batch(3, 9)
    loss = TaskLoss(CURRENT, OLD).loss(logits, features, batch)
    assert loss.item() == pytest.approx(math.fsum(naive_losses(logits, batch)) / 9, abs=1e-12)


@pytest.mark.parametrize("kind", [TaskLoss, lambda now, old: BalancedReplayLoss(now, old, GradientBalance())])
def test_masked_logits_get_no_gradient(kind):
    logits, features, batch = random_batch(4, 12)
    objective = kind(CURRENT, OLD)
    objective.begin_epoch(1.0, 1.0)
    objective.loss(logits, features, batch).backward()
    allowed = torch.stack([OLD if replayed else CURRENT for replayed in batch.replayed.tolist()])
    assert (gradient_of(logits)[~allowed] == 0).all()
    assert (gradient_of(logits)[allowed] != 0).all()


def full_batch_ratio(losses: tuple[Tensor, Tensor], parameters: list[Tensor]) -> float:
    """||gradient of the replay sum||^2 / ||gradient of the task sum||^2, by autograd."""
    squares = []
    for total in losses:
        gradients = torch.autograd.grad(total, parameters, retain_graph=True)
        squares.append(sum(float(gradient.double().square().sum()) for gradient in gradients))
    return squares[1] / squares[0]


def summed_losses(net: ResNet18, chunk: tuple[Tensor, Tensor], buffer: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Task and replay loss of the equations, each side's classes cut out rather than masked."""
    logits = net(PREPROCESS(torch.cat([chunk[0], buffer[0]])))
    totals = []
    for part, labels, mask in (
        (logits[: len(chunk[1])], chunk[1], CURRENT),
        (logits[len(chunk[1]) :], buffer[1], OLD),
    ):
        places = mask.long().cumsum(0) - 1
        totals.append(nn.functional.cross_entropy(part[:, mask], places[labels], reduction="sum"))
    return totals[0], totals[1]


@pytest.mark.parametrize(
    ("new", "held", "batching", "gradient_bias"),
    [(12, 4, "paired", False), (4, 12, "union", True), (10, 10, "union", False), (4, 12, "paired", True)],
)
def test_weight_of_the_next_epoch_is_the_full_batchs_ratio_however_the_epoch_was_cut(
    new, held, batching, gradient_bias
):
    """The network stands still (no learning rate to speak of) and the shorter side is cycled a whole number of times."""
    net = network(3)
    without_norms(net)
    chunk, buffer = samples(new, CURRENT, 10), samples(held, OLD, 20)
    parameters = [net.output.weight, net.output.bias] if gradient_bias else [net.output.weight]
    expected = full_batch_ratio(summed_losses(net, chunk, buffer), parameters)
    objective = BalancedReplayLoss(CURRENT, OLD, GradientBalance(), gradient_bias=gradient_bias)
    trained(chunk, buffer, objective, net=net, batching=batching, learning_rate=1e-12, weight_decay=0.0, epochs=3)
    assert objective.weights[0] == 1.0
    assert objective.weights[1:] == pytest.approx([expected, expected], rel=1e-4)
    assert not 0.99 < expected < 1.01


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("sgd", {}),
        ("sgd:0.5", {"momentum": 0.5}),
        ("nesterov", {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_sgd_is_pytorchs_on_the_rounds_cosine(word: str, options: dict[str, Any]) -> None:
    """Steps of one full batch, with PyTorch's weight decay."""
    chunk, buffer, net, by_hand = samples(8, CURRENT, 1), samples(0, OLD, 2), network(1), network(1)
    seen = CURRENT | OLD
    common: dict[str, Any] = {"batch_size": 8, "epochs": 3, "learning_rate": 0.01, "weight_decay": 0.01}
    trained(chunk, buffer, TaskLoss(seen, seen), net=net, optimiser=word, **common)
    reference = torch.optim.SGD(by_hand.parameters(), lr=0.01, weight_decay=0.01, **options)
    allowed = torch.where(seen, 0.0, -torch.inf)
    for rate in (0.01, 0.0075, 0.0025):
        reference.param_groups[0]["lr"] = rate
        reference.zero_grad()
        nn.functional.cross_entropy(by_hand.train()(PREPROCESS(chunk[0])) + allowed, chunk[1]).backward()
        reference.step()
    for one, other in zip(net.parameters(), by_hand.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)


def test_weight_of_the_epoch_before_scales_the_replay_loss_of_the_next():
    """Two epochs of one full batch each: the second step equals AdamW on task + lambda * replay, by hand."""
    chunk, buffer = samples(8, CURRENT, 1), samples(6, OLD, 2)
    net, by_hand = network(1), network(1)
    objective = BalancedReplayLoss(CURRENT, OLD, GradientBalance())
    trained(chunk, buffer, objective, net=net, batch_size=14, epochs=2, learning_rate=0.01)
    optimiser = torch.optim.AdamW(by_hand.parameters(), lr=0.01, weight_decay=0.001)
    weight, weights = 1.0, []
    for rate in (0.01, 0.005):
        optimiser.param_groups[0]["lr"] = rate
        task, replay = summed_losses(by_hand, chunk, buffer)
        weights.append(weight)
        following = full_batch_ratio((task, replay), [by_hand.output.weight])
        optimiser.zero_grad()
        ((task + weight * replay) / 14).backward()
        optimiser.step()
        weight = following
    assert objective.weights == pytest.approx(weights, rel=1e-3)
    for one, other in zip(net.parameters(), by_hand.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)


def test_without_a_buffer_the_weight_stays_one():
    """Round 1 is task loss alone; there is no ratio to take, and GradientBalance leaves the weight as it was."""
    objective = BalancedReplayLoss(CURRENT, torch.zeros(CLASSES, dtype=torch.bool), GradientBalance())
    trained(samples(8, CURRENT, 1), samples(0, OLD, 2), objective, epochs=3)
    assert objective.weights == [1.0, 1.0, 1.0]


# Training


def test_training_is_deterministic_and_follows_the_generator():
    chunk, buffer = samples(14, CURRENT, 1), samples(7, OLD, 2)
    torch.manual_seed(1)
    first = state_of(trained(chunk, buffer))
    torch.manual_seed(2)
    second, other = state_of(trained(chunk, buffer)), state_of(trained(chunk, buffer, seed=1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])


@pytest.mark.matrix
@pytest.mark.parametrize("batching", sorted(EPOCHS))
@pytest.mark.parametrize(
    ("new", "held", "size"),
    [(2, 0, 32), (9, 0, 4), (5, 3, 4), (3, 5, 4), (1, 1, 2)],
)
def test_small_and_ragged_rounds_train(new, held, size, batching):
    """The last stage sees 1x1 pixels here, where batch normalisation refuses a batch of one sample."""
    before = state_of(network())
    after = state_of(trained(samples(new, CURRENT, 1), samples(held, OLD, 2), batching=batching, batch_size=size))
    assert all(bool(torch.isfinite(value).all()) for value in after.values())
    assert not torch.equal(before["stem.0.weight"], after["stem.0.weight"])


def test_learning_rate_falls_along_a_cosine_by_epoch_from_the_full_rate_in_each_round():
    with recorded_steps() as steps:
        for _ in range(2):
            trained(samples(8, CURRENT, 1), samples(4, OLD, 2), epochs=5, learning_rate=0.02)
    expected = [0.02 * (1 + math.cos(math.pi * epoch / 5)) / 2 for epoch in range(5) for _ in range(3)]
    assert [step["lr"] for step in steps] == pytest.approx(2 * expected, rel=1e-9)
    assert steps[0]["lr"] == 0.02


def test_weight_decay_shrinks_what_the_gradient_does_not_touch():
    """After one step two runs differ by rate * decay * weight; a class masked throughout moves by that alone."""
    chunk, buffer = samples(6, CURRENT, 1), samples(4, OLD, 2)
    start = state_of(network())
    plain, decayed = (
        state_of(trained(chunk, buffer, epochs=1, batch_size=10, learning_rate=0.01, weight_decay=decay))
        for decay in (0.0, 0.5)
    )
    for name, _ in network().named_parameters():
        difference = plain[name] - decayed[name]
        assert torch.allclose(difference, 0.01 * 0.5 * start[name], rtol=1e-3, atol=1e-6), name
    assert torch.equal(plain["output.weight"][3:], start["output.weight"][3:])
    assert torch.allclose(decayed["output.weight"][3:], 0.995 * start["output.weight"][3:], rtol=1e-6, atol=0)


def test_training_learns_what_can_be_learnt():
    images = torch.zeros(12, 3, 8, 8, dtype=torch.uint8)
    images[6:] = 200
    labels = torch.tensor([1] * 6 + [2] * 6)
    held = samples(0, OLD, 0)
    net = trained((images, labels), held, epochs=8, batch_size=6)
    logits = predict(net, lambda block: block, images, PREPROCESS)
    assert logits.masked_fill(~CURRENT, -math.inf).argmax(dim=1).tolist() == labels.tolist()


@pytest.mark.parametrize("rate", [1e30, 1e38])
def test_a_loss_that_is_no_number_is_an_error_naming_the_learning_rate(rate):
    with pytest.raises(RunError, match=f"not finite; try a learning-rate below {rate:g}".replace("+", r"\+")):
        trained(samples(12, CURRENT, 1), samples(4, OLD, 2), learning_rate=rate, epochs=4)


# Prediction and preprocessing


def test_predict_equals_a_direct_forward_in_evaluation_mode_and_changes_nothing():
    net = trained(samples(16, CURRENT, 1), samples(4, OLD, 2), epochs=1)
    images, _ = samples(300, CURRENT, 5)
    before = state_of(net)
    order = torch.randperm(300, generator=generator())
    net.train()
    logits = predict(net, lambda block: images[block], order, PREPROCESS)
    assert not logits.requires_grad
    assert logits.dtype == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with torch.no_grad():
        direct = net.eval()(PREPROCESS(images))
        by_batch_statistics = network().train()(PREPROCESS(images))
    assert torch.allclose(logits, direct[order], rtol=0, atol=1e-5)
    assert not torch.allclose(logits, by_batch_statistics[order], atol=1e-2)


@pytest.mark.parametrize("count", [0, 1, 128, 129])
def test_predict_gives_one_row_per_image_and_each_by_itself(count):
    net = trained(samples(16, CURRENT, 1), samples(4, OLD, 2), epochs=1)
    images, _ = samples(count, CURRENT, 5)
    logits = predict(net, lambda block: block, images, PREPROCESS)
    assert logits.shape == (count, CLASSES)
    if count:
        alone = predict(net, lambda block: block, images[-1:], PREPROCESS)
        assert torch.allclose(logits[-1:], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("size", "count", "parts"), [(32, 130, 5), (64, 40, 2), (64, 33, 2), (28, 41, 1), (96, 15, 1)])
def test_parts_that_a_cache_holds_change_no_logit(size, count, parts):
    net = network().eval()
    images = torch.randint(0, 256, (count, 3, size, size), generator=generator(), dtype=torch.uint8)
    passed = []
    remove = net.register_forward_hook(lambda net, inputs, logits: passed.append(len(logits))).remove
    logits = predict(net, lambda block: block, images, PREPROCESS)
    remove()
    assert sum(passed) == count and len(passed) == parts and min(passed) >= min(count % 128, 16)
    with torch.no_grad():
        at_once = torch.cat([net(PREPROCESS(block)) for block in torch.split(images, 128)])
    assert torch.equal(logits, at_once)


def test_preprocess_is_scale_subtract_divide_and_channels_last():
    images = torch.randint(0, 256, (4, 3, 5, 6), generator=generator(), dtype=torch.uint8)
    mean, std = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
    kept = images.clone()
    result = Preprocess.by_statistics(mean, std, torch.device("cpu"))(images)
    x = images.numpy().astype(np.float64)
    for channel in range(3):
        expected = (x[:, channel] / 255 - mean[channel]) / std[channel]
        np.testing.assert_allclose(result[:, channel].numpy(), expected, rtol=0, atol=2e-6)
    assert torch.equal(images, kept)
    assert result.dtype == torch.float32
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_preprocess_of_arrays_goes_by_their_first_dimension_and_leaves_them_as_they_are():
    for shape in ((3,), (3, 4), (3, 4, 5)):
        values = torch.rand((6, *shape), generator=generator())
        kept, mean, std = values.clone(), (1.0, 20.0, -3.0), (0.5, 4.0, 1.0)
        result = Preprocess.by_statistics(mean, std, torch.device("cpu"), Form.array(*shape))(values)
        for channel in range(3):
            torch.testing.assert_close(result[:, channel], (values[:, channel] - mean[channel]) / std[channel])
        assert torch.equal(values, kept) and result.shape == values.shape


def test_preprocess_of_a_constant_channel_is_finite():
    preprocess = Preprocess.by_statistics((0.5, 0.0, 1.0), (0.0, 0.0, 0.0), torch.device("cpu"))
    assert torch.isfinite(preprocess(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8))).all()
