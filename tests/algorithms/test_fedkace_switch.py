"""The inference switch against its definition (section 4.1)."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.algorithms.fedkace_switch import gap_of, has_shrunk

GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["switch"]

# Few distinct values, so that equal gaps and zero gaps are common.
OBSERVATIONS = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.sampled_from([0.0, 0.25, 0.5])))


def first(observations: list[tuple[float, float]], patience: int) -> int | None:
    """The round of the switch."""
    gaps = [gap_of(accuracy, probability) for accuracy, probability in observations]
    return next((t for t in range(1, len(gaps) + 1) if has_shrunk(gaps[:t], patience)), None)


def definition(observations: list[tuple[float, float]], patience: int) -> int | None:
    """min{t : GAP_t < GAP_{t-1} < ... over `patience` differences}, by looking at every round."""
    gap = {t: max(0.0, acc - prob) for t, (acc, prob) in enumerate(observations, start=1)}
    for t in range(patience + 1, len(observations) + 1):
        if all(gap[t - back] < gap[t - back - 1] for back in range(patience)):
            return t
    return None


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_switch(case):
    assert first(list(zip(case["accuracy"], case["probability"], strict=True)), 2) == case["round"]


@given(OBSERVATIONS, st.integers(1, 4))
def test_switches_at_the_first_round_of_the_definition(observations, patience):
    assert first(observations, patience) == definition(observations, patience)
