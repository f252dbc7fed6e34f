"""Means of models, and the distance of the models from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.rounds.aggregation import client_drift, weighted_mean


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
