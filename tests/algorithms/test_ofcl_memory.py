"""OFCL: Bregman information, and the buffer of the most certain samples."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.algorithms.ofcl_memory import bregman_information, most_certain

ALL = torch.ones(3, dtype=torch.bool)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_two_views_by_hand() -> None:
    views = torch.tensor([[[2.0, 0, 0]], [[0.0, 2, 0]]])
    assert float(bregman_information(views, ALL)) == pytest.approx(0.3775500, abs=1e-7)


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.floats(0.1, 100))
def test_it_is_never_negative_and_blind_to_a_constant_of_each_view(seed, views, classes, scale) -> None:
    logits = scale * torch.randn((views, 4, classes), generator=generator(seed), dtype=torch.float64)
    active = torch.ones(classes, dtype=torch.bool)
    information = bregman_information(logits, active)
    assert bool((information >= 0).all())
    moved = logits + 10 * torch.randn((views, 4, 1), generator=generator(seed + 1), dtype=torch.float64)
    torch.testing.assert_close(bregman_information(moved, active), information, rtol=1e-9, atol=1e-9)
    same = bregman_information(logits[:1].expand(views, 4, classes), active)
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-9)
    if views == 1 or classes == 1:
        torch.testing.assert_close(information, torch.zeros_like(information), rtol=0, atol=1e-9)


def test_small_noise_gives_half_its_variance_times_the_spread_of_the_prediction() -> None:
    logits, noise = torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64), 0.01
    views = logits + noise * torch.randn((4000, 1, 3), generator=generator(), dtype=torch.float64)
    p = logits.softmax(0)
    expected = 0.5 * noise**2 * float((p * (1 - p)).sum())
    assert float(bregman_information(views, ALL)) == pytest.approx(expected, rel=0.05)


def test_masked_classes_do_not_count_and_broken_logits_are_the_least_certain() -> None:
    logits = torch.randn((12, 5, 3), generator=generator())
    active = torch.tensor([True, False, True])
    information = bregman_information(logits, active)
    torch.testing.assert_close(information, bregman_information(logits[..., [0, 2]], ALL[:2]))
    masked = logits.masked_fill(~active, -math.inf)
    torch.testing.assert_close(information, bregman_information(masked, active))
    logits[3, 1, 0] = math.nan
    logits[3, 2, 1] = math.nan
    broken = bregman_information(logits, active)
    assert float(broken[1]) == math.inf and float(broken[2]) == float(information[2])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 50), st.integers(0, 10**6))
def test_the_lowest_of_each_class_are_kept_in_even_numbers(labels, capacity, seed) -> None:
    y = torch.tensor(labels)
    information = torch.rand(len(y), generator=generator(seed), dtype=torch.float64)
    kept = most_certain(information, y, capacity, generator(1))
    counts, available = Counter(y[kept].tolist()), Counter(labels)
    assert len(kept) == len(set(kept.tolist())) == min(capacity, len(y))
    cut = [label for label in available if counts[label] < available[label]]
    if cut:
        assert max(counts[label] for label in available) - min(counts[label] for label in cut) <= 1
    for label in available:
        members = (y == label).nonzero().squeeze(1)
        ranked = members[information[members].argsort()][: counts[label]]
        assert kept[y[kept] == label].tolist() == ranked.tolist()
    order = torch.randperm(len(y), generator=generator(seed + 1))
    again = order[most_certain(information[order] + 5, y[order], capacity, generator(1))]
    assert again.tolist() == kept.tolist()


def test_of_equal_scores_the_first_stay_and_places_that_remain_are_drawn() -> None:
    y = torch.tensor([0, 1, 2] * 5)
    same = torch.zeros(15, dtype=torch.float64)
    kept = most_certain(same, y, 9, generator())
    assert kept.tolist() == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    lucky = {
        max(Counter(y[most_certain(same, y, 10, generator(seed))].tolist()).items(), key=lambda x: x[1])[0]
        for seed in range(20)
    }
    assert lucky == {0, 1, 2}
