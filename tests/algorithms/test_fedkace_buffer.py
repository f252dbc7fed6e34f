"""Holistic buffer maintenance (section 4.3) against loops straight from the equations, in float64 NumPy."""

import json
import math
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedkace_flwr.algorithms.fedkace_buffer import (
    Scores,
    kernel_beta,
    kernel_condition_number,
    sample_by_information,
    score_candidates,
    select,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text())
PRECISIONS = [pytest.param(torch.float32, 1e-6, id="float32"), pytest.param(torch.float64, 1e-12, id="float64")]
NAMES = ("diversity", "information", "consistency")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mask_of(classes: list[int], size: int) -> Tensor:
    return torch.tensor([label in classes for label in range(size)])


class Case:
    """Random candidates: m of old classes, then a chunk of old and new classes, and classes never met beside them."""

    def __init__(self, seed: int, m: int, chunk: int, active: int, spare: int = 2, spread: float = 2.0) -> None:
        rng = np.random.default_rng(seed)
        total = active + spare
        classes = rng.permutation(total)[:active]
        old = classes[: int(rng.integers(1, active + 1))] if m else classes[:0]
        self.m = m
        self.logits = rng.normal(size=(m + chunk, total)) * spread
        self.labels = np.concatenate([rng.choice(old, m) if m else np.empty(0, int), rng.choice(classes, chunk)])
        self.old_classes, self.active_classes = sorted(old.tolist()), sorted(classes.tolist())
        self.old, self.active = mask_of(self.old_classes, total), mask_of(self.active_classes, total)

    def tensors(self) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
        return torch.from_numpy(self.logits), torch.from_numpy(self.labels).long(), self.m, self.old, self.active


def naive_scores(
    case: Case, self_distance: str = "include", centres: list[int] | None = None
) -> dict[str, list[float]]:
    """Section 4.3, one candidate and one buffer sample at a time."""
    active, m = case.active_classes, case.m
    centres = list(range(m)) if centres is None else centres
    g, p = [], []
    for row in case.logits:
        x = [float(row[c]) for c in active]
        norm = math.sqrt(math.fsum(value * value for value in x))
        g.append([value / norm for value in x])
        total = math.fsum(math.exp(value) for value in x)
        p.append({c: math.exp(value) / total for c, value in zip(active, x, strict=True)})

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


def test_a_buffer_of_one_has_no_other_neighbour():
    case = Case(1, 1, 3, 3)
    assert score_candidates(*case.tensors(), self_distance="exclude").diversity[0] == 0


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


def test_landmarks_are_drawn_uniformly_and_repeat_with_the_generator():
    case = Case(0, 6, 1, 3)
    draws = [influential(case, 2, seed) for seed in range(300)]
    assert draws[:20] == [influential(case, 2, seed) for seed in range(20)]
    counts = Counter(held for draw in draws for held in draw)
    # 600 places over 6 samples; drawing without replacement only narrows the spread. chi-square(5) at 0.001.
    assert sum((counts[held] - 100) ** 2 / 100 for held in range(6)) < 20.52


def test_scores_of_nearly_all_landmarks_are_close_to_the_full_ones():
    case = Case(3, 80, 40, 5)
    full = score_candidates(*case.tensors())
    error = {}
    for landmarks in (10, 40, 79):
        drawn = [score_candidates(*case.tensors(), landmarks=landmarks, generator=generator(s)) for s in range(10)]
        assert all((scores.diversity >= full.diversity - 1e-12).all() for scores in drawn)
        error[landmarks] = float(
            torch.stack([(scores.information - full.information).abs().mean() for scores in drawn]).mean()
        )
    spread = float(full.information.std())
    assert error[79] < 0.02 * spread
    assert error[79] < error[40] < error[10]


def test_drawn_landmarks_default_to_a_fixed_stream():
    case = Case(4, 20, 5, 4)
    first, second = (score_candidates(*case.tensors(), landmarks=6) for _ in range(2))
    assert torch.equal(first.information, second.information)


# Extremes

EXTREMES = {
    "huge": lambda n, c: torch.randn(n, c, generator=generator()) * 1e4,
    "float32's limit": lambda n, c: torch.randn(n, c, generator=generator()).sign() * torch.finfo(torch.float32).max,
    "tiny": lambda n, c: torch.randn(n, c, generator=generator()) * 1e-42,
    "zeros": torch.zeros,
    "all equal": lambda n, c: torch.full((n, c), 3.7),
    "one row of zeros": lambda n, c: torch.cat([torch.zeros(1, c), torch.randn(n - 1, c, generator=generator())]),
    "duplicates": lambda n, c: torch.randn(1, c, generator=generator()).repeat(n, 1),
    "opposite": lambda n, c: torch.tensor([[1.0], [-1.0]]).repeat(n, c)[:n] * 100,
}


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


# Selection


def scores_of(information: list[float], consistency: list[float] | None = None) -> Scores:
    values = torch.tensor(information, dtype=torch.float64)
    other = torch.zeros_like(values) if consistency is None else torch.tensor(consistency, dtype=torch.float64)
    return Scores(torch.zeros_like(values), values, other)


def test_two_stages_differ_from_either_alone():
    scores = scores_of([5.0, 4.0, 3.0, 2.0, 1.0], [0.0, 1.0, 2.0, 9.0, 8.0])
    labels, one = torch.zeros(5, dtype=torch.int64), torch.tensor([True])
    # q = 1: the two most informative are 0 and 1, the more consistent of them 1. Alone: 0 or 3.
    assert select(scores, labels, 1, one, one, generator()).tolist() == [1]
    # q = 2: of 0 to 3 the two most consistent are 2 and 3. Alone: 0 and 1, or 3 and 4.
    assert select(scores, labels, 2, one, one, generator()).tolist() == [2, 3]


def test_ties_go_to_the_lower_position_in_both_stages():
    one = torch.tensor([True])
    labels = torch.zeros(6, dtype=torch.int64)
    assert select(scores_of([1.0] * 6), labels, 2, one, one, generator()).tolist() == [0, 1]
    # First stage keeps 1, 3 and of the three equals 0 and 2; second stage ties throughout.
    assert select(scores_of([1.0, 2.0, 1.0, 2.0, 1.0, 0.0]), labels, 2, one, one, generator()).tolist() == [0, 1]
    # More consistent 4 falls out in the first stage, where it ties with 0 and 2.
    scores = scores_of([1.0, 2.0, 1.0, 2.0, 1.0, 0.0], [0.0, -1.0, 5.0, 0.0, 9.0, 9.0])
    assert select(scores, labels, 2, one, one, generator()).tolist() == [0, 2]


def naive_old_class(positions: list[int], scores: Scores, quota: int) -> set[int]:
    if len(positions) <= quota:
        return set(positions)
    first = sorted(positions, key=lambda x: (-float(scores.information[x]), x))[: min(2 * quota, len(positions))]
    return set(sorted(first, key=lambda x: (-float(scores.consistency[x]), x))[:quota])


@given(
    seed=st.integers(0, 10**6),
    candidates=st.integers(1, 60),
    classes=st.integers(1, 7),
    capacity=st.integers(1, 50),
    levels=st.sampled_from([3, 10**6]),
)
def test_selection_keeps_quotas_capacity_order_and_the_two_stages(seed, candidates, classes, capacity, levels):
    rng = np.random.default_rng(seed)
    total = classes + 2
    active_classes = sorted(rng.permutation(total)[:classes].tolist())
    old_classes = [label for label in active_classes if rng.random() < 0.6]
    labels = rng.choice(active_classes, candidates)
    # Few levels make ties common.
    scores = scores_of(rng.integers(0, levels, candidates) / levels, rng.integers(0, levels, candidates) / levels)
    arguments = torch.from_numpy(labels), capacity, mask_of(old_classes, total), mask_of(active_classes, total)
    kept = select(scores, *arguments, generator(seed)).tolist()
    assert kept == sorted(set(kept))
    assert all(0 <= position < candidates for position in kept)
    assert len(kept) <= capacity
    quota = capacity // classes
    for label in active_classes:
        positions = np.flatnonzero(labels == label).tolist()
        mine = {position for position in kept if labels[position] == label}
        assert len(mine) == min(quota, len(positions))
        if label in old_classes:
            assert mine == naive_old_class(positions, scores, quota)
    assert kept == select(scores, *arguments, generator(seed)).tolist()


@given(
    seed=st.integers(0, 10**6),
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    capacity=st.integers(1, 60),
)
def test_fill_leaves_no_place_empty_that_a_candidate_could_take(seed, counts, capacity):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    scores = scores_of(rng.normal(size=len(labels)), rng.normal(size=len(labels)))
    old = torch.from_numpy(rng.random(len(counts)) < 0.5)
    every = torch.ones(len(counts), dtype=torch.bool)
    arguments = scores, torch.from_numpy(labels), capacity, old, every
    kept = select(*arguments, generator(), leftover="fill").tolist()
    assert kept == sorted(set(kept))
    assert len(kept) == min(capacity, len(labels))
    places = Counter(labels[kept].tolist())
    assert all(places[label] >= min(count, capacity // len(counts)) for label, count in enumerate(counts))
    dropping = select(*arguments, generator(), leftover="drop")
    assert len(dropping) == sum(min(count, capacity // len(counts)) for count in counts)


def test_fill_and_drop_worked_by_hand():
    labels = torch.tensor([0] * 2 + [1] * 6)
    both = torch.tensor([True, True])
    scores = scores_of([float(x) for x in range(8)], [float(-x) for x in range(8)])
    # Class 1: two places take the least informative of its four best, four places those of all six.
    assert select(scores, labels, 5, both, both, generator()).tolist() == [0, 1, 4, 5]
    assert select(scores, labels, 5, both, both, generator(), leftover="fill").tolist() == [0, 1, 2, 3, 4]


def test_fewer_places_than_classes_keep_nothing_by_the_literal_floor():
    every = torch.tensor([True, True, True])
    labels = torch.tensor([0, 1, 2, 2])
    for old in (every, ~every):
        assert select(scores_of([0.0] * 4), labels, 2, old, every, generator()).tolist() == []
        assert len(select(scores_of([0.0] * 4), labels, 2, old, every, generator(), leftover="fill")) == 2


def sequential_probability(weights: list[float], chosen: tuple[int, ...], order: list[tuple[int, ...]]) -> float:
    """Probability that drawing one after the other without replacement ends with the set ``chosen``."""
    total = 0.0
    for sequence in order:
        if set(sequence) == set(chosen):
            left, probability = sum(weights), 1.0
            for item in sequence:
                probability *= weights[item] / left
                left -= weights[item]
            total += probability
    return total


@pytest.mark.parametrize(
    ("quota", "bound"), [(1, 18.47), (2, 27.88)], ids=["one of five: chi2(4)", "two of five: chi2(9)"]
)
def test_new_classes_are_drawn_in_proportion_to_exp_information(quota, bound):
    """Chi-square against exact probabilities; each bound is exceeded by chance once in a thousand seeds."""
    information = [0.0, 1.0, -1.0, 0.5, 2.0]
    weights = [math.exp(value) for value in information]
    sets = list(combinations(range(5), quota))
    sequences = [s for s in product(range(5), repeat=quota) if len(set(s)) == quota]
    expected = {each: sequential_probability(weights, each, sequences) for each in sets}
    assert sum(expected.values()) == pytest.approx(1)
    one, draws, source = torch.tensor([True]), 4000, generator(1)
    labels = torch.zeros(5, dtype=torch.int64)
    counts = Counter(
        tuple(select(scores_of(information), labels, quota, ~one, one, source).tolist()) for _ in range(draws)
    )
    statistic = sum((counts[each] - draws * p) ** 2 / (draws * p) for each, p in expected.items())
    assert set(counts) <= set(sets)
    assert statistic < bound


def test_drawing_needs_no_exponential_of_the_scores():
    information = torch.tensor([0.0, 5e3, -5e3, 5.1e3], dtype=torch.float64)
    positions = torch.arange(4)
    assert sample_by_information(positions, information, 2, generator()).tolist() == [1, 3]


def test_drawing_ignores_a_common_offset_and_consistency():
    base = torch.tensor([0.3, 1.2, -0.4, 0.9, 2.0, 0.0], dtype=torch.float64)
    labels, one = torch.zeros(6, dtype=torch.int64), torch.tensor([True])
    plain = scores_of(base.tolist())
    moved = scores_of((base + 700).tolist(), [5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    for seed in range(20):
        kept = [select(scores, labels, 3, ~one, one, generator(seed)).tolist() for scores in (plain, moved)]
        assert kept[0] == kept[1]
        assert len(kept[0]) == 3


def test_drawing_differs_along_one_generator():
    labels, one = torch.zeros(30, dtype=torch.int64), torch.tensor([True])
    source = generator()
    kept = [select(scores_of([0.0] * 30), labels, 10, ~one, one, source).tolist() for _ in range(3)]
    assert kept[0] != kept[1] != kept[2]


# Kernel matrix


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_golden_condition_number(dtype, tolerance):
    golden = GOLDEN["condition_number"]
    logits = torch.tensor(golden["logits"], dtype=dtype)
    assert kernel_beta(4, 4) == golden["beta"]
    value = kernel_condition_number(logits, mask_of(golden["active"], 6), golden["beta"])
    assert value == pytest.approx(golden["value"], rel=0, abs=tolerance)


@given(seed=CASES["seed"], m=st.integers(1, 6), active=st.integers(3, 6), beta=st.floats(1, 20))
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
    seed=CASES["seed"],
    m=st.integers(1, 20),
    active=st.integers(1, 40),
    beta=st.sampled_from([1.0, 15.8, 1e3, 1e6]),
    stretch=st.sampled_from([1.0, 4.0]),
)
def test_condition_number_is_infinite_for_duplicates(seed, m, active, beta, stretch):
    logits = torch.randn(m, active, generator=generator(seed))
    logits = torch.cat([logits, stretch * logits[:1]])
    assert kernel_condition_number(logits, torch.ones(active, dtype=torch.bool), beta) == math.inf


def test_beta_by_hand():
    assert kernel_beta(0, 5) == 1.0
    assert kernel_beta(1, 5) == 1.0
    assert kernel_beta(1000, 5) == pytest.approx(15.848931924611133)
    assert kernel_beta(1000, 1) == pytest.approx(1e6)
    assert kernel_beta(1000, 100) == pytest.approx(1.148153621496883)
