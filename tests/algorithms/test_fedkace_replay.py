"""Gradient-balanced replay (section 4.2) against autograd, loops and cases worked by hand."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gradients import gradient_of
from torch import Tensor

from fedkace_flwr.algorithms.fedkace_replay import GradientBalance, output_layer_gradient, with_bias_column
from fedkace_flwr.training.losses import masked_cross_entropy

GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["output_gradient"]

CASES = {
    "seed": st.integers(0, 10**6),
    "samples": st.integers(1, 9),
    "classes": st.integers(1, 7),
    "features": st.integers(1, 5),
    "per_row": st.booleans(),
}


def random_case(seed: int, samples: int, classes: int, features: int, per_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Features (B, F), labels (B,) and a mask (C,) or (B, C) that allows them."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    mask = rng.random((samples, classes)) < 0.5
    mask[np.arange(samples), labels] = True
    if not per_row:
        mask = np.asarray(mask.any(axis=0))
    return torch.from_numpy(rng.normal(size=(samples, features))), torch.from_numpy(labels), torch.from_numpy(mask)


def autograd_gradient(layer: torch.nn.Linear, features: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the layer's weight and bias, each sample's loss taken over its allowed logits alone."""
    layer.zero_grad()
    logits = layer(features)
    rows = mask.expand_as(logits)
    for x, row, label in zip(logits, rows, labels, strict=True):
        allowed = row.nonzero().squeeze(1)
        (x[allowed].logsumexp(dim=0) - x[label]).backward(retain_graph=True)
    return gradient_of(layer.weight), gradient_of(layer.bias)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_golden_output_gradient(dtype, tolerance):
    gradient = output_layer_gradient(
        torch.tensor(GOLDEN["logits"], dtype=dtype),
        torch.tensor(GOLDEN["features"], dtype=dtype),
        torch.tensor(GOLDEN["labels"]),
        torch.tensor([label in GOLDEN["mask"] for label in range(6)]),
    )
    np.testing.assert_allclose(gradient.numpy(), GOLDEN["gradient"], rtol=0, atol=tolerance)


@given(**CASES)
def test_output_layer_gradient_is_autograds(seed, samples, classes, features, per_row):
    known, labels, mask = random_case(seed, samples, classes, features, per_row)
    torch.manual_seed(seed)
    layer = torch.nn.Linear(features, classes, dtype=torch.float64)
    weight, bias = autograd_gradient(layer, known, labels, mask)
    logits = layer(known)
    gradient = output_layer_gradient(logits, known, labels, mask)
    assert torch.allclose(gradient, weight, rtol=0, atol=1e-12)
    assert not gradient.requires_grad
    with_bias = output_layer_gradient(logits, with_bias_column(known), labels, mask)
    assert with_bias.shape == (classes, features + 1)
    assert torch.allclose(with_bias[:, :-1], weight, rtol=0, atol=1e-12)
    assert torch.allclose(with_bias[:, -1], bias, rtol=0, atol=1e-12)
    masked_everywhere = ~mask.reshape(-1, classes).any(dim=0)
    assert (with_bias[masked_everywhere] == 0).all()


@given(**CASES)
def test_masked_cross_entropy_equals_naive_loops_and_masked_logits_feel_nothing(
    seed, samples, classes, features, per_row
):
    _, labels, mask = random_case(seed, samples, classes, features, per_row)
    logits = torch.from_numpy(np.random.default_rng(seed + 1).normal(size=(samples, classes)) * 3).requires_grad_()
    losses, residual = masked_cross_entropy(logits, labels, mask)
    rows = mask.expand_as(logits)
    for index in range(samples):
        exponentials = {c: math.exp(logits[index, c].item()) for c in range(classes) if rows[index, c]}
        own = exponentials[int(labels[index])] / math.fsum(exponentials.values())
        assert losses[index].item() == pytest.approx(-math.log(own), abs=1e-12)
    losses.sum().backward()
    assert torch.allclose(gradient_of(logits), residual, rtol=0, atol=1e-12)
    assert (gradient_of(logits)[~rows] == 0).all()
    assert (residual[~rows] == 0).all()


def test_masked_logits_may_be_of_any_size():
    logits = torch.tensor([[0.0, math.log(3.0), 3e38, -3e38]])
    losses, residual = masked_cross_entropy(logits, torch.tensor([1]), torch.tensor([True, True, False, False]))
    assert float(losses[0]) == pytest.approx(math.log(4 / 3), abs=1e-6)
    assert residual.tolist() == [[pytest.approx(0.25), pytest.approx(-0.25), 0.0, 0.0]]


# The weight


def test_the_weight_is_one_until_an_epoch_ends():
    balance = GradientBalance()
    balance.observe(task=torch.ones(2, 2), replay=torch.full((2, 2), 3.0))
    assert balance.weight == 1.0
    assert balance.next_weight() == balance.weight == 9.0


def test_average_comes_first_and_norm_after():
    balance = GradientBalance()
    # Replay gradients cancel but for (0, 1): averaging norms would give about 200 / 2.
    balance.observe(task=torch.tensor([1.0, 0.0]), replay=torch.tensor([10.0, 1.0]))
    balance.observe(task=torch.tensor([1.0, 0.0]), replay=torch.tensor([-10.0, 0.0]))
    assert balance.next_weight() == pytest.approx(1 / 4)
    # And the other way round.
    balance.observe(task=torch.tensor([10.0, 1.0]), replay=torch.tensor([1.0, 0.0]))
    balance.observe(task=torch.tensor([-10.0, 0.0]), replay=torch.tensor([1.0, 0.0]))
    assert balance.next_weight() == pytest.approx(4.0)


@given(
    seed=st.integers(0, 10**6),
    batches=st.integers(1, 6),
    chunk=st.integers(1, 50),
    buffer=st.integers(1, 50),
    norm=st.sampled_from(["sum", "mean"]),
)
def test_several_batches_equal_the_running_average_of_the_equations(seed, batches, chunk, buffer, norm):
    rng = np.random.default_rng(seed)
    sides = rng.normal(size=(2, batches, 3, 4))
    balance = GradientBalance(norm, 1e12, task_size=chunk, replay_size=buffer)
    average = np.zeros((2, 3, 4))
    for index in range(batches):
        balance.observe(task=torch.from_numpy(sides[0, index]), replay=torch.from_numpy(sides[1, index]))
        average += (sides[:, index] - average) / (index + 1)
    task, replay = (average**2).sum(axis=(1, 2))
    if norm == "mean":
        task, replay = task / chunk**2, replay / buffer**2
    assert balance.next_weight() == pytest.approx(replay / task, rel=1e-9)


def test_a_batch_without_one_side_adds_nothing_to_it():
    balance = GradientBalance()
    balance.observe(task=torch.tensor([2.0]), replay=None)
    balance.observe(task=None, replay=torch.tensor([3.0]))
    balance.observe(task=torch.tensor([1.0]), replay=torch.tensor([3.0]))
    balance.observe()
    assert balance.next_weight() == pytest.approx(36 / 9)


@pytest.mark.parametrize("side", ["task", "replay", "neither"])
def test_an_epoch_without_one_side_leaves_the_weight(side):
    balance = GradientBalance()
    balance.observe(task=torch.tensor([1.0]), replay=torch.tensor([2.0]))
    assert balance.next_weight() == 4.0
    balance.observe(**{} if side == "neither" else {side: torch.tensor([5.0])})
    assert balance.next_weight() == 4.0
    assert balance.skipped == 0


def test_epochs_do_not_run_into_one_another():
    balance = GradientBalance()
    balance.observe(task=torch.tensor([1.0]), replay=torch.tensor([100.0]))
    balance.next_weight()
    # What one side left behind in an epoch without the other is forgotten too.
    balance.observe(task=torch.tensor([1000.0]))
    balance.next_weight()
    balance.observe(task=torch.tensor([2.0]), replay=torch.tensor([3.0]))
    assert balance.next_weight() == pytest.approx(9 / 4)


def test_the_ratio_is_clipped_and_clipping_is_not_skipping():
    balance = GradientBalance(lambda_max=50.0)
    balance.observe(task=torch.tensor([1.0]), replay=torch.tensor([100.0]))
    assert balance.next_weight() == 50.0
    balance.observe(task=torch.tensor([1.0]), replay=torch.tensor([0.0]))
    assert balance.next_weight() == 0.0
    assert balance.skipped == 0
    assert GradientBalance().lambda_max == 1e4


@pytest.mark.parametrize(
    ("task", "replay"),
    [(0.0, 2.0), (0.0, 0.0), (math.nan, 1.0), (1.0, math.nan), (1.0, math.inf), (math.inf, math.inf)],
)
def test_a_ratio_that_is_no_number_leaves_the_weight_and_is_counted(task, replay):
    balance = GradientBalance()
    balance.observe(task=torch.tensor([1.0]), replay=torch.tensor([2.0]))
    balance.next_weight()
    balance.observe(task=torch.tensor([task]), replay=torch.tensor([replay]))
    assert balance.next_weight() == 4.0
    assert balance.skipped == 1
    balance.observe(task=torch.tensor([2.0]), replay=torch.tensor([1.0]))
    assert balance.next_weight() == 0.25
    assert balance.skipped == 1


def test_float32_gradients_whose_squares_overflow_still_compare():
    balance = GradientBalance()
    balance.observe(task=torch.tensor([2e30]), replay=torch.tensor([6e30]))
    assert balance.next_weight() == pytest.approx(9.0)
    balance.observe(task=torch.tensor([2e-30]), replay=torch.tensor([4e-30]))
    assert balance.next_weight() == pytest.approx(4.0)
    assert balance.skipped == 0


def test_observing_changes_no_gradient_of_the_callers_and_keeps_no_history():
    task = torch.tensor([1.0, 2.0], requires_grad=True)
    replay = torch.tensor([2.0, 4.0])
    balance = GradientBalance()
    for _ in range(3):
        balance.observe(task=task * 1, replay=replay)
    assert replay.tolist() == [2.0, 4.0]
    replay.zero_()
    assert balance.next_weight() == pytest.approx(4.0)
