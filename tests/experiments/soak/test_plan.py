"""What is drawn for a simulated year."""

from collections import Counter

import pytest

from fedkace_flwr.experiments.soak.plan import BACK, FEWEST_ROUNDS, KINDS, ROLLBACK, SWAP, WEEK, Event, draw

UNSETTLING = {"join", "leave", "absence", "new-class", "quiet"}
"""What changes how well devices predict, or whether they do, apart from labels."""


@pytest.mark.parametrize("rounds", [FEWEST_ROUNDS, 200])
def test_everything_happens_in_every_year_and_to_nodes_that_are_there(rounds: int) -> None:
    for seed in range(20):
        check(draw(rounds, seed), rounds)


def check(events: list[Event], rounds: int) -> None:
    counts = Counter(event.kind for event in events)
    assert all(counts[kind.name] == max(1, round(kind.per_year * rounds / 200)) for kind in KINDS)
    assert counts[BACK] == counts["absence"]
    assert all(1 < event.round < rounds for event in events)
    weeks = [event.round for event in events if event.kind == SWAP]
    assert len(weeks) == (2 if rounds == 200 else 1) and weeks[0] > 10
    assert [event.round for event in events if event.kind == ROLLBACK] == [week + WEEK for week in weeks]
    present, away, ever = {1, 2, 3}, set[int](), {1, 2, 3}
    for event in events:
        assert not event.node or (event.node in present) != (event.kind == "join")
        assert event.kind != "join" or event.node not in ever, "federation.sh gives no number again"
        ever.add(event.node)
        assert not any(week <= event.round <= week + WEEK for week in weeks if event.kind in UNSETTLING)
        assert (event.node in away) == (event.kind == BACK)
        present, away = after(event, present, away)
        assert len(present - away) >= 2
        assert event.kind != SWAP or (not away and event.node)
    assert not away, "the last part of the year is undisturbed"


def after(event: Event, present: set[int], away: set[int]) -> tuple[set[int], set[int]]:
    node = {event.node}
    present = {"join": present | node, "leave": present - node}.get(event.kind, present)
    away = {"absence": away | node, BACK: away - node}.get(event.kind, away)
    return present, away


def test_a_year_is_drawn_from_its_seed() -> None:
    assert draw(200, 1) == draw(200, 1) != draw(200, 2)
