"""The data sets that come with scikit-learn, where they are arrays."""

import numpy as np
import pytest

from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.sections import DataConfig


def test_digit_lines_are_the_digits_line_by_line() -> None:
    pictures, lines = (load_dataset(DataConfig(dataset=name)) for name in ("digits", "digit-lines"))
    assert lines.form.shape == (8, 8) and not lines.form.is_picture
    assert np.array_equal(lines.labels, pictures.labels) and np.array_equal(lines.held_out, pictures.held_out)
    assert np.array_equal(np.rint(lines.images * (255 / 16)).astype(np.uint8).transpose(0, 2, 1), pictures.images[:, 0])


@pytest.mark.parametrize("seed", [0, 1])
def test_wines_are_split_by_the_seed(seed: int) -> None:
    wine = load_dataset(DataConfig(dataset="wine"), seed)
    assert wine.form.shape == (13,) and wine.images.dtype == np.float32 and wine.num_classes == 3
    assert [len(wine.test_ids(label)) for label in range(3)] == [12, 14, 10]
