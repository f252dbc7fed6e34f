"""Means of models, and the distance of the models from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.sections import AggregationConfig
from fedkace_flwr.strategies.base import Aggregator, client_drift, weighted_mean


def test_client_drift_worked_by_hand() -> None:
    models = [{"w": np.array([1.0, 2.0]), "n": np.array(5)}, {"w": np.array([3.0, 2.0]), "n": np.array(7)}]
    mean = weighted_mean(models, [1, 1])
    assert mean["w"].tolist() == [2.0, 2.0] and mean["n"] == 6 and mean["n"].dtype == np.array(5).dtype
    assert client_drift(models, mean, ["w"]) == pytest.approx(1.0)
    assert weighted_mean(models, [3, 1])["w"].tolist() == [1.5, 2.0]


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=1, max_size=5),
    st.data(),
)
def test_the_mean_lies_between_the_extremes_and_keeps_its_type(rows: list[list[float]], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(rows), max_size=len(rows)))
    mean = weighted_mean([{"w": np.array(row, dtype=np.float32)} for row in rows], weights)["w"]
    columns = np.array(rows, dtype=np.float32)
    assert mean.dtype == np.float32
    assert (mean >= columns.min(0) - 1e-3).all() and (mean <= columns.max(0) + 1e-3).all()


def aggregated(
    rule: str, rows: list[dict[str, list[float]]], weights: list[float], byzantine: int = 0
) -> dict[str, list[float]]:
    """Aggregate models given as lists; ``w`` is a parameter and ``mean`` a statistic."""
    settings = AggregationConfig(aggregation=f"{rule}:{byzantine}" if byzantine else rule)
    models = [{name: np.array(row, dtype=np.float32) for name, row in model.items()} for model in rows]
    merged = Aggregator(settings, frozenset({"w"}))(models, weights)
    assert list(merged) == list(rows[0]) and all(array.dtype == np.float32 for array in merged.values())
    return {name: array.tolist() for name, array in merged.items()}


FIVE: list[dict[str, list[float]]] = [
    {"w": [0.0, 1.0], "mean": [10.0]},
    {"w": [1.0, 1.0], "mean": [11.0]},
    {"w": [2.0, 1.0], "mean": [900.0]},
    {"w": [3.0, 1.0], "mean": [12.0]},
    {"w": [500.0, -9.0], "mean": [13.0]},
]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("median", {"w": [2.0, 1.0], "mean": [12.0]}),
        ("trimmed-mean", {"w": [2.0, 1.0], "mean": [12.0]}),
        ("multi-krum", {"w": [1.5, 1.0], "mean": [11.5]}),  # hostile in one part: left out of that part alone
    ],
)
def test_rules_worked_by_hand(rule: str, expected: dict[str, list[float]]) -> None:
    assert aggregated(rule, FIVE, [1, 1, 1, 1, 99], byzantine=1) == expected


def test_the_geometric_median_stays_with_the_many_and_uses_weights() -> None:
    merged = aggregated("geometric-median", FIVE, [1] * 5)
    assert 1.0 < merged["w"][0] < 3.5 and 10.5 < merged["mean"][0] < 13.5
    heavy = aggregated("geometric-median", FIVE, [1, 1, 1, 1, 99])
    assert heavy["w"][0] == pytest.approx(500, rel=1e-2)


def test_a_single_model_and_the_plain_mean_are_as_ever() -> None:
    assert aggregated("multi-krum", FIVE[:1], [3]) == FIVE[0]
    assert aggregated("mean", FIVE[:2], [3, 1]) == {"w": [0.25, 1.0], "mean": [10.25]}


@pytest.mark.parametrize(("models", "hostile"), [(1, 0), (2, 0), (3, 0), (4, 1), (7, 1), (8, 2), (10, 2), (100, 25)])
def test_by_default_a_quarter_of_the_models_may_be_hostile(models: int, hostile: int) -> None:
    assert Aggregator(AggregationConfig(), frozenset()).hostile(models) == hostile
    assert Aggregator(AggregationConfig(aggregation="multi-krum:3"), frozenset()).hostile(models) <= max(
        0, (models - 1) // 2
    )


def test_counters_are_aggregated_and_keep_their_type() -> None:
    models = [{"w": np.array([float(n)]), "n": np.array(n)} for n in (1, 2, 3, 60)]
    for rule in ("median", "trimmed-mean", "multi-krum", "geometric-median"):
        merged = Aggregator(AggregationConfig(aggregation=rule), frozenset({"w"}))(models, [1] * 4)
        assert merged["n"].dtype == models[0]["n"].dtype
