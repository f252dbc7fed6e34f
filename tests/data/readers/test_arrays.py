"""Tables and series from a file in NumPy's format."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.made.arrays import CLASSES, SERIES, TABLE, arrays, write_arrays

from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.errors import ConfigError, FedkaceError
from fedkace_flwr.samples import Form
from fedkace_flwr.sections import DataConfig


def loaded(folder: Path, shape: tuple[int, ...], **changes: Any) -> Any:
    return load_dataset(DataConfig("arrays", str(write_arrays(folder, shape, **changes))))


@pytest.mark.parametrize("shape", [TABLE, SERIES, (2, 3, 4)])
def test_samples_labels_and_statistics_of_the_training_part(tmp_path: Path, shape: tuple[int, ...]) -> None:
    content, dataset = arrays(shape), loaded(tmp_path, shape)
    assert dataset.form == Form.array(*shape) and dataset.class_names == ("0", "1", "2", "3")
    assert dataset.train_size == len(content["y_train"])
    np.testing.assert_array_equal(dataset.images, np.concatenate([content["x_train"], content["x_test"]]))
    np.testing.assert_array_equal(dataset.labels, np.concatenate([content["y_train"], content["y_test"]]))
    rows = np.moveaxis(content["x_train"].astype(np.float64), 1, 0).reshape(shape[0], -1)
    np.testing.assert_allclose(dataset.mean, rows.mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(dataset.std, rows.std(axis=1), rtol=1e-12)


def test_what_never_changes_is_not_divided_by_nothing(tmp_path: Path) -> None:
    x_train = arrays(TABLE)["x_train"].copy()
    x_train[:, 2] = 0.1
    assert loaded(tmp_path, TABLE, x_train=x_train).std[2] == 1.0


def test_many_blocks_have_the_statistics_of_one(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(1e4, 0.5, (9001, 5)).astype(np.float32)
    y = np.arange(9001) % CLASSES
    dataset = loaded(tmp_path, TABLE, x_train=x, y_train=y)
    np.testing.assert_allclose(dataset.std, x.astype(np.float64).std(axis=0), rtol=1e-9)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    before = loaded(tmp_path, TABLE)
    after = loaded(tmp_path, TABLE, x_train=arrays(TABLE)["x_train"] + 1)
    assert before.digest != after.digest


def with_nan() -> np.ndarray:
    values = arrays(TABLE)["x_test"].copy()
    values[7, 1] = np.nan
    return values


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"x_train": arrays(TABLE)["x_train"].astype(np.float64)}, r"x_train is float64; must be float32"),
        ({"x_test": (arrays(TABLE)["x_test"]).astype(np.uint8)}, r"x_test is uint8; must be float32"),
        ({"x_train": arrays(TABLE)["x_train"][:, 0]}, r"x_train has shape \(240,\); must be \(n, features\)"),
        ({"x_test": arrays(TABLE)["x_test"][:, :4]}, r"samples of x_test have shape \(4,\), those of x_train \(5,\)"),
        ({"y_test": arrays(TABLE)["y_test"][:-1]}, r"y_test has shape \(59,\); must be \(60,\)"),
        ({"y_train": arrays(TABLE)["y_train"].astype(np.float32)}, r"y_train is float32; must be whole numbers"),
        ({"y_train": arrays(TABLE)["y_train"] - 1}, r"y_train holds label -1; .* from 0"),
        (
            {"y_train": arrays(TABLE)["y_train"] * 2, "y_test": arrays(TABLE)["y_test"] * 2},
            r"y_train holds label 2, and no sample has label 1; .* without gaps",
        ),
        ({"x_test": with_nan()}, r"x_test holds a value that is not finite in row 7"),
        ({"y_test": None}, r"holds no array 'y_test' but x_test, x_train, y_train; must hold the arrays x_train"),
        ({"x_train": np.array([{}] * 3)}, r"x_train is object; must be float32"),
    ],
    ids=range(11),
)
def test_what_is_wrong_is_told_by_file_and_array(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(FedkaceError, match=rf"^{tmp_path}/data\.npz: {fault}") as told:
        loaded(tmp_path, TABLE, **changes)
    assert "\n" not in str(told.value)


def test_a_file_is_found_by_its_folder_or_its_path(tmp_path: Path) -> None:
    with pytest.raises(FedkaceError, match=r"^data-dir = .*: holds no \.npz file"):
        load_dataset(DataConfig("arrays", str(tmp_path)))
    with pytest.raises(FedkaceError, match=r"^data-dir = .*/data\.npz: does not exist; "):
        load_dataset(DataConfig("arrays", str(tmp_path / "data.npz")))
    write_arrays(tmp_path, TABLE)
    assert load_dataset(DataConfig("arrays", str(tmp_path / "data.npz"))).form.shape == TABLE
    (tmp_path / "other.npz").write_bytes(b"nothing")
    with pytest.raises(FedkaceError, match=r"^data-dir = .*: holds 2 \.npz files, as data\.npz, other\.npz"):
        load_dataset(DataConfig("arrays", str(tmp_path)))
    with pytest.raises(FedkaceError, match=r"other\.npz: damaged, or no \.npz file"):
        load_dataset(DataConfig("arrays", str(tmp_path / "other.npz")))
    with pytest.raises(ConfigError, match=r"^dataset = 'arrays:data': must be 'arrays'"):
        load_dataset(DataConfig("arrays:data", str(tmp_path)))


def test_samples_for_training_alone_are_split(tmp_path: Path) -> None:
    dataset = loaded(tmp_path, SERIES, x_test=None, y_test=None)
    whole = arrays(SERIES)
    np.testing.assert_array_equal(dataset.images, whole["x_train"])
    assert dataset.train_size == round(0.8 * len(whole["y_train"]))
