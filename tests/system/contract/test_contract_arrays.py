"""Every method on a table and on a series."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.common import rounds_of
from support.doubles.faults import FaultyGrid
from support.made.arrays import NETWORK, SERIES, TABLE, write_arrays
from support.systems.contract import (
    ALL_METHODS,
    DISTINCT_METHODS,
    SHAPE,
    assert_a_run_in_pieces_equals,
    run_over,
)

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.running.inline import run_inline

Make = Callable[..., Config]


def made(small: Make, folder: Path, shape: tuple[int, ...], **keys: Any) -> Config:
    data = {"dataset": "arrays", "data_dir": str(write_arrays(folder / "data", shape)), "network": NETWORK[shape]}
    return small(**SHAPE, **data, window=2, overlap=1, **keys)


@pytest.mark.parametrize("shape", [TABLE, SERIES], ids=["table", "series"])
@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_method_learns_from_arrays(small: Make, tmp_path: Path, method: str, shape: tuple[int, ...]) -> None:
    config = made(small, tmp_path, shape, method=method, keep_models="always", width=8)
    records = rounds_of(run_over(FaultyGrid(config), config))
    assert [record["round"] for record in records] == [1, 2, 3]
    assert all(record["failures"] == [] for record in records)
    assert all(value is not None and 0 <= value <= 1 for record in records for value in record["client_accuracy"])


@pytest.mark.parametrize("method", DISTINCT_METHODS)
def test_a_run_on_a_series_that_is_cut_off_equals_an_undisturbed_one(small: Make, tmp_path: Path, method: str) -> None:
    whole = made(small, tmp_path, SERIES, method=method, run_name="whole")
    pieces = made(small, tmp_path, SERIES, method=method, run_name="pieces", resume=True)
    assert_a_run_in_pieces_equals(run_over(FaultyGrid(whole), whole), pieces)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"image_size": 8}, "image-size = 8: with dataset = 'arrays', .*must be 0"),
        ({"mirroring": "allowed"}, "mirroring = 'allowed': with dataset = 'arrays'.*no pictures"),
        ({"augment": "flip-shift"}, "augment = 'flip-shift': .*must be 'none'"),
        ({"test_time_augmentation": "mirrored"}, "test-time-augmentation = 'mirrored': .*must be 'none'"),
        ({"network": "resnet18"}, r"network = 'resnet18': takes pictures, .*shape \(5,\); must be mlp"),
        ({"network": "cnn1d"}, r"network = 'cnn1d': takes series, \(channels, length\), .*\(5,\); must be mlp"),
        ({"num_classes": 9}, "num-classes = 9: data set arrays has 4 classes"),
    ],
)
def test_what_does_not_fit_arrays_is_refused_before_any_work(
    small: Make, tmp_path: Path, keys: dict[str, Any], fault: str
) -> None:
    config = made(small, tmp_path, TABLE)
    with pytest.raises(ConfigError, match=f"^{fault}"):
        run_inline(config.replaced({key.replace("_", "-"): value for key, value in keys.items()}))
    assert not (tmp_path / "run" / "rounds.jsonl").exists()
