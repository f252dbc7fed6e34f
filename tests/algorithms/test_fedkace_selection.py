"""Selection of the buffer (section 4.3) against a naive one, and against exact probabilities."""

import math
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.made.candidates import generator, mask_of

from fedkace_flwr.algorithms.fedkace_buffer import (
    Scores,
    select,
)


def scores_of(information: list[float] | np.ndarray, consistency: list[float] | np.ndarray | None = None) -> Scores:
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


@pytest.mark.parametrize(
    ("quota", "kept"),
    [
        ("met", [0, 1, 2, 3, 6, 7, 8, 9]),  # 9 places for two classes: 4 each
        ("all", [0, 1, 6, 7]),  # for four classes: 2 each, of the 4 first, as all are equally informative
    ],
)
def test_places_are_shared_by_the_classes_met_or_by_all(quota, kept):
    labels = torch.tensor([0] * 4 + [2] * 6)
    met = torch.tensor([True, False, True, False])
    scores = scores_of([0.0] * 10, [3.0, 2.0, 1.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert select(scores, labels, 9, met, met, generator(), quota=quota).tolist() == kept


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


def test_drawing_ignores_a_common_offset_and_consistency():
    base = torch.tensor([0.3, 1.2, -0.4, 0.9, 2.0, 0.0], dtype=torch.float64)
    labels, one = torch.zeros(6, dtype=torch.int64), torch.tensor([True])
    plain = scores_of(base.tolist())
    moved = scores_of((base + 700).tolist(), [5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    for seed in range(20):
        kept = [select(scores, labels, 3, ~one, one, generator(seed)).tolist() for scores in (plain, moved)]
        assert kept[0] == kept[1]
        assert len(kept[0]) == 3
