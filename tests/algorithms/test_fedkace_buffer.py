"""Scores of candidates (section 4.3) against loops straight from the equations, in float64 NumPy."""

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.made.candidates import Case, generator, mask_of
from torch import Tensor

from fedkace_flwr.algorithms.fedkace_buffer import (
    Scores,
    score_candidates,
    select,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text())
PRECISIONS = [pytest.param(torch.float32, 1e-6, id="float32"), pytest.param(torch.float64, 1e-12, id="float64")]
NAMES = ("diversity", "information", "consistency")


def naive_scores(
    case: Case, self_distance: str = "include", centres: list[int] | None = None
) -> dict[str, list[float]]:
    """Section 4.3, one candidate and one buffer sample at a time."""
    active, m = case.active_classes, case.m
    centres = list(range(m)) if centres is None else centres
    g, p = [], []
    for row in case.logits:
        own = [float(row[c]) for c in active]
        norm = math.sqrt(math.fsum(value * value for value in own))
        g.append([value / norm for value in own])
        total = math.fsum(math.exp(value) for value in own)
        p.append({c: math.exp(value) / total for c, value in zip(active, own, strict=True)})

    def squared_distance(a: int, b: int) -> float:
        return math.fsum((u - v) ** 2 for u, v in zip(g[a], g[b], strict=True))

    d = len(active)
    beta = m ** (2 / d) if m else 1.0
    weight_1 = math.log(m) / math.sqrt(m) if m else 0.0
    weight_2 = 1 / math.sqrt(m) if m else 0.0
    result: dict[str, list[float]] = {name: [] for name in NAMES}
    for x in range(len(case.logits)):
        y = int(case.labels[x])
        others = [i for i in centres if self_distance == "include" or i != x]
        diversity = min((squared_distance(x, i) for i in others), default=0.0)
        information, consistency = -math.log(p[x][y]) + weight_1 * diversity, 0.0
        if m and y in case.old_classes:
            kernel = {i: math.exp(-beta * squared_distance(x, i)) for i in centres}
            a = math.fsum(kernel[i] * p[i][y] for i in centres)
            b = math.fsum(kernel.values())
            information = -math.log(a / b) + weight_1 * diversity
            consistency = math.log(p[x][y] / ((a + p[x][y]) / (b + 1))) + weight_2 * diversity
        for name, value in zip(NAMES, (diversity, information, consistency), strict=True):
            result[name].append(value)
    return result


def assert_scores(scores: Scores, expected: dict[str, list[float]], tolerance: float = 1e-9) -> None:
    for name in NAMES:
        np.testing.assert_allclose(getattr(scores, name).numpy(), expected[name], rtol=tolerance, atol=tolerance)


CASES = {
    "seed": st.integers(0, 10**6),
    "m": st.integers(0, 12),
    "chunk": st.integers(1, 8),
    "active": st.integers(1, 6),
}


# Scores


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_golden_scores(dtype, tolerance):
    golden = GOLDEN["scores"]
    scores = score_candidates(
        torch.tensor(golden["logits"], dtype=dtype),
        torch.tensor(golden["labels"]),
        golden["buffer_size"],
        mask_of(golden["old"], 6),
        mask_of(golden["active"], 6),
    )
    for name in NAMES:
        values = getattr(scores, name)
        assert values.dtype == torch.float64
        np.testing.assert_allclose(values.numpy(), golden[name], rtol=0, atol=tolerance)


def test_scores_worked_by_hand():
    """Two classes, logits (3, 4) and (5, 0) held, (0, 2) new: directions (.6, .8), (1, 0) and (0, 1)."""
    logits = torch.tensor([[3.0, 4.0], [5.0, 0.0], [0.0, 2.0]])
    both = torch.tensor([True, True])
    scores = score_candidates(logits, torch.tensor([1, 0, 1]), 2, both, both)
    # m = d = 2: beta = 2. Squared distances: 0.8 between the held ones; 0.4 and 2 from the new one.
    k12, k31, k32 = math.exp(-1.6), math.exp(-0.8), math.exp(-4)
    p11, p20, p31 = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-5)), 1 / (1 + math.exp(-2))
    weight_1, weight_2 = math.log(2) / math.sqrt(2), 1 / math.sqrt(2)
    before = [
        (p11 + k12 * (1 - p20)) / (1 + k12),
        (k12 * (1 - p11) + p20) / (1 + k12),
        (k31 * p11 + k32 * (1 - p20)) / (k31 + k32),
    ]
    after = [
        (p11 + k12 * (1 - p20) + p11) / (2 + k12),
        (k12 * (1 - p11) + p20 + p20) / (2 + k12),
        (k31 * p11 + k32 * (1 - p20) + p31) / (k31 + k32 + 1),
    ]
    diversity = [0.0, 0.0, 0.4]
    expected = {
        "diversity": diversity,
        "information": [-math.log(b) + weight_1 * ds for b, ds in zip(before, diversity, strict=True)],
        "consistency": [
            math.log(own / a) + weight_2 * ds for own, a, ds in zip((p11, p20, p31), after, diversity, strict=True)
        ],
    }
    assert_scores(scores, expected, 1e-12)


@pytest.mark.parametrize("self_distance", ["include", "exclude"])
@given(**CASES)
def test_scores_equal_the_naive_ones(self_distance, seed, m, chunk, active):
    case = Case(seed, m, chunk, active)
    assert_scores(score_candidates(*case.tensors(), self_distance=self_distance), naive_scores(case, self_distance))


def test_including_itself_a_held_sample_has_no_diversity_and_excluding_itself_it_has():
    case = Case(0, 10, 5, 4)
    included, excluded = (
        score_candidates(*case.tensors(), self_distance=reading).diversity for reading in ("include", "exclude")
    )
    assert torch.equal(included[:10], torch.zeros(10, dtype=torch.float64))
    assert (excluded[:10] > 1e-4).all()
    assert torch.equal(included[10:], excluded[10:])


def test_inactive_logits_do_not_matter():
    case = Case(2, 6, 6, 3, spare=3)
    before = score_candidates(*case.tensors())
    case.logits[:, ~case.active.numpy()] = 1e6
    after = score_candidates(*case.tensors())
    assert all(torch.equal(getattr(before, name), getattr(after, name)) for name in NAMES)


@given(**CASES, block=st.integers(1, 40), self_distance=st.sampled_from(["include", "exclude"]))
def test_blocks_do_not_change_scores(seed, m, chunk, active, block, self_distance):
    case = Case(seed, m, chunk, active)
    whole = score_candidates(*case.tensors(), self_distance=self_distance)
    for size in (1, block):
        blocked = score_candidates(*case.tensors(), self_distance=self_distance, block_elements=size)
        assert_scores(blocked, {name: getattr(whole, name).tolist() for name in NAMES}, 1e-11)


@given(
    seed=CASES["seed"], m=st.integers(2, 12), chunk=st.integers(2, 8), active=st.integers(2, 6), quota=st.integers(1, 3)
)
def test_order_within_buffer_and_within_chunk_changes_neither_scores_nor_old_classes_places(
    seed, m, chunk, active, quota
):
    # From two held samples on: beside a single one every candidate of a class has the same information, a tie.
    case = Case(seed, m, chunk, active)
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(m), m + rng.permutation(chunk)])
    shuffled = Case(seed, m, chunk, active)
    shuffled.logits, shuffled.labels = case.logits[order], case.labels[order]
    scores, moved = (score_candidates(*each.tensors(), self_distance="exclude") for each in (case, shuffled))
    assert_scores(moved, {name: getattr(scores, name).numpy()[order] for name in NAMES}, 1e-10)
    capacity = quota * active
    kept = select(scores, torch.from_numpy(case.labels), capacity, case.old, case.active, generator())
    kept_moved = select(moved, torch.from_numpy(shuffled.labels), capacity, case.old, case.active, generator())

    def of_old_classes(positions: np.ndarray) -> set[int]:
        return {int(position) for position in positions if case.labels[position] in case.old_classes}

    assert of_old_classes(kept.numpy()) == of_old_classes(order[kept_moved.numpy()])


# Landmarks


@given(**CASES, extra=st.integers(0, 5))
def test_landmarks_as_many_as_the_buffer_holds_change_nothing(seed, m, chunk, active, extra):
    case = Case(seed, m, chunk, active)
    full, landmarks = score_candidates(*case.tensors()), score_candidates(*case.tensors(), landmarks=m + extra)
    assert all(torch.equal(getattr(full, name), getattr(landmarks, name)) for name in NAMES)


def influential(case: Case, landmarks: int, seed: int) -> list[int]:
    """Buffer samples whose own logits change another candidate's score."""
    before = score_candidates(*case.tensors(), landmarks=landmarks, generator=generator(seed))
    found = []
    for held in range(case.m):
        kept = case.logits[held].copy()
        case.logits[held] = -kept
        after = score_candidates(*case.tensors(), landmarks=landmarks, generator=generator(seed))
        case.logits[held] = kept
        others = torch.arange(len(case.logits)) != held
        if not torch.equal(before.information[others], after.information[others]):
            found.append(held)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("self_distance", ["include", "exclude"])
def test_landmark_scores_come_from_so_many_centres_alone(seed, self_distance):
    case = Case(seed, 14, 6, 4)
    centres = influential(case, 5, seed)
    assert len(centres) == 5
    scores = score_candidates(*case.tensors(), landmarks=5, generator=generator(seed), self_distance=self_distance)
    assert_scores(scores, naive_scores(case, self_distance, centres))


@pytest.mark.slow
def test_landmarks_are_drawn_uniformly_and_repeat_with_the_generator():
    case = Case(0, 6, 1, 3)
    draws = [influential(case, 2, seed) for seed in range(300)]
    assert draws[:20] == [influential(case, 2, seed) for seed in range(20)]
    counts = Counter(held for draw in draws for held in draw)
    # 600 places over 6 samples; drawing without replacement only narrows the spread. chi-square(5) at 0.001.
    assert sum((counts[held] - 100) ** 2 / 100 for held in range(6)) < 20.52


# Extremes

EXTREMES: dict[str, Callable[[int, int], Tensor]] = {
    "huge": lambda n, c: torch.randn(n, c, generator=generator()) * 1e4,
    "float32's limit": lambda n, c: torch.randn(n, c, generator=generator()).sign() * torch.finfo(torch.float32).max,
    "tiny": lambda n, c: torch.randn(n, c, generator=generator()) * 1e-42,
    "zeros": torch.zeros,
    "all equal": lambda n, c: torch.full((n, c), 3.7),
    "one row of zeros": lambda n, c: torch.cat([torch.zeros(1, c), torch.randn(n - 1, c, generator=generator())]),
    "duplicates": lambda n, c: torch.randn(1, c, generator=generator()).repeat(n, 1),
    "opposite": lambda n, c: torch.tensor([[1.0], [-1.0]]).repeat(n, c)[:n] * 100,
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize(
    ("m", "chunk", "active"), [(0, 1, 1), (0, 7, 3), (1, 1, 1), (1, 5, 2), (3, 4, 1), (1000, 5, 2)]
)
def test_no_score_is_ever_infinite_or_not_a_number(kind, m, chunk, active):
    logits = EXTREMES[kind](m + chunk, 4)
    labels = torch.arange(m + chunk) % active
    old = torch.arange(4) < (max(1, active - 1) if m else 0)
    labels[:m] = 0
    for self_distance, landmarks in product(("include", "exclude"), (0, 1, 7)):
        scores = score_candidates(
            logits, labels, m, old, torch.arange(4) < active, self_distance=self_distance, landmarks=landmarks
        )
        for name in NAMES:
            assert torch.isfinite(getattr(scores, name)).all(), (name, self_distance, landmarks)
        assert (scores.diversity >= 0).all()
        assert (scores.diversity <= 4 + 1e-12).all()
        kept = select(scores, labels, 10, old, torch.arange(4) < active, generator())
        assert len(kept) == sum(min(10 // active, int((labels == label).sum())) for label in range(active))


@given(
    **CASES,
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=12),
)
def test_no_finite_logits_whatever_give_an_infinite_score(seed, m, chunk, active, values):
    case = Case(seed, m, chunk, active)
    case.logits = np.random.default_rng(seed).choice(np.array(values), size=case.logits.shape)
    scores = score_candidates(*case.tensors())
    assert all(torch.isfinite(getattr(scores, name)).all() for name in NAMES)


def test_where_kernels_underflow_the_nearest_neighbour_speaks():
    """m = 1000, d = 2: beta = 1000, and exp(-1000 * 1.4) is 0 in float64."""
    rng = np.random.default_rng(0)
    angle = np.concatenate([rng.uniform(-0.6, 0.2, 999), [0.5]])
    length = rng.uniform(0.5, 3, 1000)
    held = np.stack([length * np.cos(angle), length * np.sin(angle)], axis=1)
    far = np.array([2 * math.cos(0.5 + math.pi / 2), 2 * math.sin(0.5 + math.pi / 2)])
    squared = 2 - 2 * np.cos(0.5 + math.pi / 2 - angle)
    assert np.exp(-1000 * squared).sum() == 0
    assert squared[:999].min() > squared[999] + 0.5
    both = torch.tensor([True, True])
    labels = torch.tensor([0, 1] * 500 + [1])
    scores = score_candidates(torch.from_numpy(np.vstack([held, far])), labels, 1000, both, both)
    p_nearest = 1 / (1 + math.exp(held[999, 0] - held[999, 1]))
    assert float(scores.diversity[-1]) == pytest.approx(2.0, abs=1e-12)
    expected = -math.log(p_nearest) + math.log(1000) / math.sqrt(1000) * 2
    assert float(scores.information[-1]) == pytest.approx(expected, abs=1e-9)
    # B = 0 beside 1: after = p, so that consistency is diversity alone.
    assert float(scores.consistency[-1]) == pytest.approx(2 / math.sqrt(1000), abs=1e-12)
