"""Updates that point against those of the other clients."""

import numpy as np
import pytest

from fedkace_flwr.algorithms.robust_aggregation import cosines_to_others
from fedkace_flwr.rounds.robustness.directions import Directions


def opposing(count: int, opposed: int, common: float = 0.3) -> np.ndarray:
    """Gram matrix of updates with something in common, the last ones of the opposite sign."""
    draws = np.random.default_rng(3)
    shared = draws.normal(size=2000)
    rows = np.stack([common * shared + draws.normal(size=2000) for _ in range(count)])
    rows[count - opposed :] *= -1
    return np.asarray(rows @ rows.T)


@pytest.mark.parametrize(("count", "hostile"), [(4, 1), (5, 2), (10, 1), (10, 3), (10, 4)])
def test_opposed_updates_are_rejected_and_no_others(count: int, hostile: int) -> None:
    rejected = Directions(-0.03).opposed(range(count), opposing(count, hostile))
    assert set(rejected) == set(range(count - hostile, count))


def test_more_than_half_are_always_kept() -> None:
    assert len(Directions(-0.03).opposed(range(10), opposing(10, 5))) <= 4
    for few in (2, 3):
        assert Directions(-0.03).opposed(range(few), opposing(few, 1)) == {}


def round_of(directions: Directions, gram: np.ndarray) -> set[int]:
    """Who is rejected in a round of four clients, which is then remembered."""
    directions.begin()
    rejected = directions.opposed(range(4), gram)
    directions.remember()
    return set(rejected)


def gram_of(cosines: np.ndarray) -> np.ndarray:
    """Gram matrix of four vectors of length one with these cosines between them, the upper triangle row by row."""
    gram = np.eye(4)
    gram[np.triu_indices(4, 1)] = cosines
    return np.asarray(gram + np.triu(gram, 1).T)


def test_updates_that_all_point_slightly_against_each_other_are_accepted() -> None:
    # Each client's classes exclude the others', as under a fixed simplex: no client is odder than the next.
    gram = gram_of(np.array([-0.021, -0.018, -0.024, -0.022, -0.019, -0.023]))
    assert np.all(cosines_to_others(gram) < -0.03)
    directions = Directions(-0.03)
    for _ in range(5):
        assert round_of(directions, gram) == set()


def test_the_usual_cosine_moves_the_bound_by_no_more_than_the_bound() -> None:
    for cosine, rejected in ((-0.03, set()), (-0.045, {3})):  # -0.053 and -0.079 to the mean of the other three
        odd = np.full(6, -0.018)
        odd[[2, 4, 5]] = cosine  # between the last client and each of the others
        assert round_of(Directions(-0.03), gram_of(odd)) == rejected
    assert len(round_of(Directions(-0.03), gram_of(np.full(6, -0.1)))) == 1  # -0.19 for each, as if most were hostile


def test_a_single_round_against_the_others_is_forgiven_and_a_habit_is_not() -> None:
    directions, together, against = Directions(-0.03), opposing(4, 0), opposing(4, 1)
    for _ in range(4):
        assert round_of(directions, together) == set()
    assert round_of(directions, against) == set()
    again = Directions(-0.03)
    again.restore(directions.state())
    for each in (directions, again):  # as after a resume
        assert [round_of(each, against) for _ in range(4)][-1] == {3}
    assert directions.state() == again.state()
    assert round_of(directions, together) == set()  # whoever behaves counts again at once


def test_attempts_at_the_same_round_count_once() -> None:
    directions, once, against = Directions(-0.03), Directions(-0.03), opposing(4, 1)
    for each in (directions, once):
        for _ in range(4):
            round_of(each, opposing(4, 0))
    for _ in range(5):
        directions.begin()
        assert directions.opposed(range(4), against) == {}
    directions.remember()
    round_of(once, against)
    assert directions.state() == once.state()
