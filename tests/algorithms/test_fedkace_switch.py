"""The inference switch against its definition (section 4.1)."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.algorithms.fedkace_switch import InferenceSwitch

GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["switch"]

# Few distinct values, so that equal gaps and zero gaps are common.
OBSERVATIONS = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.sampled_from([0.0, 0.25, 0.5])))


def definition(observations: list[tuple[float, float]], patience: int) -> int | None:
    """min{t : GAP_t < GAP_{t-1} < ... over `patience` differences}, by looking at every round."""
    gap = {t: max(0.0, acc - prob) for t, (acc, prob) in enumerate(observations, start=1)}
    for t in range(patience + 1, len(observations) + 1):
        if all(gap[t - back] < gap[t - back - 1] for back in range(patience)):
            return t
    return None


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_switch(case):
    switch = InferenceSwitch()
    answers = [switch.observe(a, p) for a, p in zip(case["accuracy"], case["probability"], strict=True)]
    assert switch.switched_at == case["round"]
    first = case["round"] or len(answers) + 1
    assert answers == [t >= first for t in range(1, len(answers) + 1)]


@given(OBSERVATIONS, st.integers(1, 4))
def test_switches_at_the_first_round_of_the_definition(observations, patience):
    switch = InferenceSwitch(patience)
    for accuracy, probability in observations:
        switch.observe(accuracy, probability)
    assert switch.switched_at == definition(observations, patience)
    assert switch.switched_at is None or switch.switched_at > patience


@given(OBSERVATIONS, st.integers(1, 3), st.data())
def test_going_on_from_stored_gaps_is_the_same_wherever_the_run_was_cut(observations, patience, data):
    cut = data.draw(st.integers(0, len(observations)))
    whole, first = InferenceSwitch(patience), InferenceSwitch(patience)
    for accuracy, probability in observations[:cut]:
        first.observe(accuracy, probability)
    second = InferenceSwitch(patience, gaps=tuple(first.gaps), switched_at=first.switched_at)
    for index, (accuracy, probability) in enumerate(observations):
        here = whole.observe(accuracy, probability)
        if index >= cut:
            assert second.observe(accuracy, probability) == here
    assert (second.gaps, second.switched_at) == (whole.gaps, whole.switched_at)


def test_stays_switched_and_stops_recording():
    switch = InferenceSwitch()
    for probability in (0.1, 0.2, 0.3):
        switch.observe(0.9, probability)
    assert switch.switched_at == 3
    assert switch.gaps == pytest.approx([0.8, 0.7, 0.6])
    for probability in (0.0, 0.8):
        assert switch.observe(0.9, probability) is True
    assert switch.switched_at == 3
    assert len(switch.gaps) == 3


def test_the_round_is_the_callers_where_rounds_were_missed():
    switch = InferenceSwitch()
    for number, gap in ((4, 0.75), (5, 0.5), (9, 0.25)):
        switch.observe(gap, 0.0, round_number=number)
    assert switch.switched_at == 9
