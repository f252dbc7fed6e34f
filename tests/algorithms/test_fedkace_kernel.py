"""Condition number and decay rate of the buffer's kernel matrix (Table 3)."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.made.candidates import Case, generator, mask_of

from fedkace_flwr.algorithms.fedkace_buffer import (
    class_condition_number,
    kernel_beta,
    kernel_condition_number,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text())
PRECISIONS = [pytest.param(torch.float32, 1e-6, id="float32"), pytest.param(torch.float64, 1e-12, id="float64")]


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_golden_condition_number(dtype, tolerance):
    golden = GOLDEN["condition_number"]
    logits = torch.tensor(golden["logits"], dtype=dtype)
    assert kernel_beta(4, 4) == golden["beta"]
    value = kernel_condition_number(logits, mask_of(golden["active"], 6), golden["beta"])
    assert value == pytest.approx(golden["value"], rel=0, abs=tolerance)


@given(seed=st.integers(0, 10**6), m=st.integers(1, 6), active=st.integers(3, 6), beta=st.floats(1, 20))
def test_condition_number_equals_the_ratio_of_singular_values(seed, m, active, beta):
    case = Case(seed, 0, m, active)
    rows = case.logits[:, case.active.numpy()]
    rows = rows / np.sqrt((rows**2).sum(axis=1, keepdims=True))
    kernel = np.array([[math.exp(-beta * ((a - b) ** 2).sum()) for b in rows] for a in rows])
    expected = float(np.linalg.cond(kernel))
    value = kernel_condition_number(torch.from_numpy(case.logits), case.active, beta)
    assert value == pytest.approx(expected, rel=1e-13 * expected + 1e-10)


def test_condition_number_of_two_samples_worked_by_hand():
    # Orthogonal directions: eigenvalues 1 + exp(-2 beta) and 1 - exp(-2 beta).
    k = math.exp(-1.0)
    value = kernel_condition_number(torch.tensor([[7.0, 0.0], [0.0, 0.5]]), torch.tensor([True, True]), 0.5)
    assert value == pytest.approx((1 + k) / (1 - k), rel=1e-12)


def test_condition_number_is_one_for_far_apart_points_and_for_a_single_one():
    every = torch.ones(6, dtype=torch.bool)
    assert kernel_condition_number(torch.eye(6) * 3, every, 1000.0) == 1.0
    assert kernel_condition_number(torch.randn(1, 6, generator=generator()), every, 1.0) == 1.0


@given(
    seed=st.integers(0, 10**6),
    m=st.integers(1, 20),
    active=st.integers(1, 40),
    beta=st.sampled_from([1.0, 15.8, 1e3, 1e6]),
    stretch=st.sampled_from([1.0, 4.0]),
)
def test_condition_number_is_infinite_for_duplicates(seed, m, active, beta, stretch):
    logits = torch.randn(m, active, generator=generator(seed))
    logits = torch.cat([logits, stretch * logits[:1]])
    assert kernel_condition_number(logits, torch.ones(active, dtype=torch.bool), beta) == math.inf


def test_class_condition_number_by_hand():
    # Class 0: orthogonal directions; class 1: a single sample, which counts as 1.
    k = math.exp(-1.0)
    logits = torch.tensor([[7.0, 0.0], [3.0, 3.0], [0.0, 0.5]])
    both = torch.tensor([True, True])
    value = class_condition_number(logits, torch.tensor([0, 1, 0]), both, 0.5)
    assert value == pytest.approx(((1 + k) / (1 - k) + 1) / 2, rel=1e-12)


def test_class_condition_number_is_infinite_if_one_class_holds_a_duplicate():
    logits = torch.tensor([[7.0, 0.0], [14.0, 0.0], [0.0, 0.5], [1.0, 1.0]])
    both = torch.tensor([True, True])
    assert class_condition_number(logits, torch.tensor([0, 0, 1, 1]), both, 1.0) == math.inf
    assert math.isfinite(class_condition_number(logits, torch.tensor([0, 1, 0, 1]), both, 1.0))


def test_beta_by_hand():
    assert kernel_beta(0, 5) == 1.0
    assert kernel_beta(1, 5) == 1.0
    assert kernel_beta(1000, 5) == pytest.approx(15.848931924611133)
    assert kernel_beta(1000, 1) == pytest.approx(1e6)
    assert kernel_beta(1000, 100) == pytest.approx(1.148153621496883)
