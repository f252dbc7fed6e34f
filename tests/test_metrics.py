"""Accuracy, confidence and regret, against loops and worked cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.metrics import accuracy, average_accuracy, average_regret, class_accuracies, true_class_probability


def test_accuracy_worked_by_hand_looks_only_at_allowed_classes():
    logits = torch.tensor([[9.0, 1.0, 2.0], [9.0, 3.0, 2.0], [0.0, 1.0, 5.0], [-1.0, -7.0, -8.0]])
    labels = torch.tensor([2, 2, 2, 1])
    everything = torch.tensor([True, True, True])
    without_first = torch.tensor([False, True, True])
    assert accuracy(logits, labels, everything) == accuracy(logits, labels) == 0.25
    assert accuracy(logits, labels, without_first) == 0.75


def test_accuracy_by_class_worked_by_hand():
    logits = torch.tensor([[9.0, 1.0, 2.0], [9.0, 3.0, 2.0], [0.0, 1.0, 5.0], [-1.0, -7.0, -8.0]])
    labels = torch.tensor([2, 2, 2, 1])
    nothing, everything, without_first = torch.zeros(0), torch.tensor([True] * 3), torch.tensor([False, True, True])
    assert class_accuracies(logits, labels, everything).isnan().tolist() == [True, False, False]
    assert class_accuracies(logits, labels, everything)[1:].tolist() == pytest.approx([0, 1 / 3])
    assert class_accuracies(logits, labels, without_first)[1:].tolist() == pytest.approx([1, 2 / 3])
    assert class_accuracies(nothing.view(0, 3), nothing.long(), everything).isnan().all()


def test_probability_worked_by_hand():
    logits = torch.tensor([[math.log(3.0), 0.0, 50.0], [0.0, math.log(4.0), 50.0]])
    mask = torch.tensor([True, True, False])
    assert true_class_probability(logits, torch.tensor([0, 0]), mask) == pytest.approx((3 / 4 + 1 / 5) / 2, abs=1e-7)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 7))
def test_both_equal_naive_loops(seed, samples, classes):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(samples, classes)) * 3
    mask = rng.random(classes) < 0.6
    mask[rng.integers(classes)] = True
    allowed = np.flatnonzero(mask)
    labels = rng.choice(allowed, samples)
    right, confidence = 0, 0.0
    for row, label in zip(logits, labels, strict=True):
        right += max(allowed, key=lambda c: row[c]) == label
        confidence += math.exp(row[label]) / math.fsum(math.exp(row[c]) for c in allowed)
    arguments = torch.from_numpy(logits), torch.from_numpy(labels), torch.from_numpy(mask)
    assert accuracy(*arguments) == pytest.approx(right / samples, abs=1e-12)
    assert true_class_probability(*arguments) == pytest.approx(confidence / samples, abs=1e-12)


def test_large_logits_give_a_probability():
    logits = torch.tensor([[1e4, -1e4], [-3e38, 3e38]])
    mask = torch.tensor([True, True])
    assert true_class_probability(logits, torch.tensor([0, 0]), mask) == 0.5
    assert true_class_probability(logits, torch.tensor([1, 1]), mask) == 0.5


def test_average_accuracy_and_regret_worked_by_hand():
    assert average_accuracy([0.5, 0.75, 1.0]) == 0.75
    # Below the reference by 0.25 and by 0.5, above it by 0.25: regret may be negative in a round.
    assert average_regret([0.75, 1.0, 0.5], [0.5, 0.5, 0.75]) == pytest.approx(0.5 / 3, abs=1e-15)


def test_average_regret_is_the_difference_of_average_accuracies():
    rng = np.random.default_rng(0)
    upper, own = rng.random(20).tolist(), rng.random(20).tolist()
    assert average_regret(upper, own) == pytest.approx(average_accuracy(upper) - average_accuracy(own), abs=1e-12)


def test_averages_of_nothing_and_of_unequal_runs_are_refused():
    with pytest.raises(ValueError, match="at least one round"):
        average_accuracy([])
    with pytest.raises(ValueError, match="at least one round"):
        average_regret([], [])
    with pytest.raises(ValueError, match="not 2 and 1"):
        average_regret([0.5, 0.5], [0.5])
