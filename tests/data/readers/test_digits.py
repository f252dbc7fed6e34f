"""The data sets that come with scikit-learn, where they are arrays."""

import numpy as np
import pytest

from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.sections import DataConfig


@pytest.mark.parametrize("seed", [0, 1])
def test_wines_are_split_by_the_seed(seed: int) -> None:
    wine = load_dataset(DataConfig(dataset="wine"), seed)
    assert wine.form.shape == (13,) and wine.images.dtype == np.float32 and wine.num_classes == 3
    assert [len(wine.test_ids(label)) for label in range(3)] == [12, 14, 10]
