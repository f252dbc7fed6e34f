"""Places per class: water filling against every possible allocation."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.algorithms.class_balance import water_filling_quotas


def fairest(available: list[int], capacity: int) -> tuple[int, ...]:
    """Max-min fair by brute force: of all full allocations the one whose poorest, second poorest, ... have most.

    Of equally fair ones, the one that gives to earlier classes.
    """
    total = min(capacity, sum(available))
    allocations = [a for a in product(*(range(count + 1) for count in available)) if sum(a) == total]
    return max(allocations, key=lambda allocation: (sorted(allocation), allocation))


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 22))
def test_water_filling_is_max_min_fair(available, capacity):
    assert tuple(water_filling_quotas(available, capacity)) == fairest(available, capacity)


@given(st.lists(st.integers(0, 600), max_size=100), st.integers(0, 2000))
def test_water_filling_fills_and_never_overfills(available, capacity):
    quotas = water_filling_quotas(available, capacity)
    assert sum(quotas) == min(capacity, sum(available))
    assert all(0 <= quota <= count for quota, count in zip(quotas, available, strict=True))
    # Classes that still have candidates left stand within one place of each other, and nobody has more than they.
    open_quotas = [quota for quota, count in zip(quotas, available, strict=True) if quota < count]
    if open_quotas:
        assert max(quotas) - min(open_quotas) <= 1


def test_water_filling_worked_by_hand():
    assert water_filling_quotas([1, 10, 10], 12) == [1, 6, 5]
    assert water_filling_quotas([10, 0, 2, 10], 9) == [4, 0, 2, 3]
    assert water_filling_quotas([3, 3], 100) == [3, 3]


def test_water_filling_of_no_class_is_empty():
    assert water_filling_quotas([], 5) == []
