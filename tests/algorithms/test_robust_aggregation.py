"""Aggregation rules: worked by hand, and what a single model can do to them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.algorithms import robust_aggregation as robust

Rows = list[list[float]]


def gram(rows: Rows) -> np.ndarray:
    points = np.array(rows, dtype=np.float64)
    return np.asarray(points @ points.T)


def many(least: int = 3, most: int = 7) -> st.SearchStrategy[Rows]:
    """Models of three numbers."""
    return st.lists(st.lists(st.integers(-50, 50), min_size=3, max_size=3), min_size=least, max_size=most)


def test_coordinate_rules_worked_by_hand() -> None:
    values = np.array([[1.0, 10.0], [2.0, -7.0], [4.0, 11.0], [99.0, 12.0]])
    assert robust.coordinate_median(values).tolist() == [3.0, 10.5]
    assert robust.trimmed_mean(values, 1).tolist() == [3.0, 10.5]
    assert robust.trimmed_mean(values, 0).tolist() == [26.5, 6.5]
    assert robust.coordinate_median(values[:3]).tolist() == [2.0, 10.0]


def test_multi_krum_worked_by_hand() -> None:
    # Neighbours: m - f - 2 = 5 - 1 - 2 = 2. Scores on the line: 1+4, 1+1, 1+4, 16+25 (to 2 and 1), 100+... for 12.
    rows = [[0.0], [1.0], [2.0], [6.0], [12.0]]
    assert robust.multi_krum(gram(rows), 1) == [0, 1, 2, 3]
    assert robust.multi_krum(gram(rows), 2) == [0, 1, 2]
    assert robust.multi_krum(gram([[5.0]]), 0) == [0]


def test_of_two_models_that_are_alike_multi_krum_takes_the_first() -> None:
    assert robust.multi_krum(gram([[1.0], [1.0], [1.0]]), 1) == [0, 1]


def test_the_geometric_median_worked_by_hand() -> None:
    """On a line it is the median; in a triangle without obtuse angles it sees all sides at 120 degrees."""
    weights = robust.geometric_median(gram([[0.0], [1.0], [10.0]]), [1, 1, 1])
    assert weights @ np.array([0.0, 1.0, 10.0]) == pytest.approx(1.0, abs=1e-2)
    height = np.sqrt(3) / 2
    corners = [[0.0, 0.0], [1.0, 0.0], [0.5, height]]
    assert robust.geometric_median(gram(corners), [1, 1, 1]) == pytest.approx([1 / 3] * 3)
    assert robust.geometric_median(gram([[2.0], [2.0]]), [1, 3]) == pytest.approx([0.25, 0.75])  # no distances at all


@given(many())
def test_no_other_point_near_the_geometric_median_has_a_smaller_sum_of_distances(rows: Rows) -> None:
    points = np.array(rows, dtype=np.float64)
    middle = robust.geometric_median(gram(rows), [1.0] * len(rows)) @ points
    total = np.linalg.norm(points - middle, axis=1).sum()
    for step in np.vstack([np.eye(3), -np.eye(3), points - middle]):
        assert np.linalg.norm(points - (middle + 0.05 * step), axis=1).sum() >= total - 2e-2 * max(1.0, total) * 0.1


@given(many(4, 7), st.integers(0, 6), st.lists(st.floats(-1e9, 1e9), min_size=3, max_size=3))
def test_one_model_cannot_move_a_robust_rule_beyond_the_others(rows: Rows, place: int, forged: list[float]) -> None:
    """Whatever it sends: coordinate rules stay within the others' range, and multi-krum leaves the farthest out."""
    place %= len(rows)
    honest = np.delete(np.array(rows, dtype=np.float64), place, axis=0)
    attacked = np.array(rows, dtype=np.float64)
    attacked[place] = forged
    for merged in (robust.coordinate_median(attacked), robust.trimmed_mean(attacked, 1)):
        assert (merged >= honest.min(axis=0) - 1e-9).all() and (merged <= honest.max(axis=0) + 1e-9).all()


@given(many(3, 7), st.floats(1e4, 1e8))
def test_one_far_model_gets_hardly_any_weight_in_the_geometric_median(rows: Rows, far: float) -> None:
    weights = robust.geometric_median(gram([*rows, [far, far, far]]), [1.0] * (len(rows) + 1))
    honest = np.array(rows, dtype=np.float64)
    middle = weights @ np.vstack([honest, [far] * 3])
    # Known bound: the median stays within 2 / (1 - 2 / m) times the largest honest distance from any honest centre.
    spread = max(np.linalg.norm(honest - honest.mean(axis=0), axis=1).max(), 1e-3)
    count = len(rows) + 1
    bound = 2 * (count - 1) / (count - 2) * spread
    assert np.linalg.norm(middle - honest.mean(axis=0)) <= bound + 1e-2 * far * 1e-4 + 1


def test_cosines_to_others_worked_by_hand() -> None:
    # Two alike, one perpendicular, one opposed; lengths do not matter.
    rows = [[1.0, 0.0], [5.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]
    cosines = robust.cosines_to_others(gram(rows))
    # For the first, the others' unit vectors add up to (0, 1); for the third to (1, 0); for the last to (2, 1).
    assert cosines == pytest.approx([0.0, 0.0, 0.0, -2 / np.sqrt(5)])


def test_the_cosine_of_a_zero_update_and_to_others_that_cancel_out_is_zero() -> None:
    assert robust.cosines_to_others(gram([[0.0], [1.0], [1.0]])).tolist() == [0.0, 1.0, 1.0]
    assert robust.cosines_to_others(gram([[1.0], [1.0], [-1.0]]))[0] == 0.0


@given(many(2, 6))
def test_cosines_are_those_of_the_vectors(rows: Rows) -> None:
    points = np.array(rows, dtype=np.float64)
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    units = np.divide(points, lengths, out=np.zeros_like(points), where=lengths > 0)
    for place, cosine in enumerate(robust.cosines_to_others(gram(rows))):
        others = np.delete(units, place, axis=0).sum(axis=0)
        length = np.linalg.norm(others)
        if length > 1e-3:
            assert cosine == pytest.approx(units[place] @ others / length, abs=1e-6)


def test_gram_matrices_of_models_and_of_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "_COLUMNS", 5)
    rng = np.random.default_rng(0)

    def model() -> dict[str, np.ndarray]:
        return {
            "a": rng.normal(size=(3, 4)).astype(np.float32),
            "b": rng.normal(size=7).astype(np.float32),
            "counter": np.array(rng.integers(100)),
        }

    trained, sent = [model() for _ in range(3)], [model() for _ in range(3)]

    def flat(models: list[dict[str, np.ndarray]]) -> np.ndarray:
        return np.stack([np.concatenate([m["a"].ravel(), m["b"].ravel()]) for m in models]).astype(np.float64)

    updates = flat(trained) - flat(sent)
    np.testing.assert_allclose(robust.gram_matrix(trained, ["a", "b"]), flat(trained) @ flat(trained).T, atol=1e-12)
    np.testing.assert_allclose(robust.gram_matrix(trained, ["b", "a"], sent), updates @ updates.T, atol=1e-12)
