"""Configurations of small data sets, each with a cache of its own."""

from pathlib import Path

import pytest
from support.made.datasets import write_picture, write_tree

from fedkace_flwr.data.datasets import CACHE
from fedkace_flwr.sections import DataConfig


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("data") / "cache"
    monkeypatch.setenv(CACHE, str(folder))
    return folder


@pytest.fixture
def digits() -> DataConfig:
    return DataConfig(dataset="digits")


@pytest.fixture
def imagenet(tmp_path: Path) -> DataConfig:
    """Three synsets of 13 small JPEGs, one of them greyscale and one CMYK."""
    train = tmp_path / "data" / "train"
    write_tree(train, ("n01", "n02", "n10"), 13)
    write_picture(train / "n01" / "n01_03.JPEG", mode="L")
    write_picture(train / "n02" / "n02_04.JPEG", mode="CMYK")
    return DataConfig(
        dataset="imagenet100",
        data_dir=str(tmp_path / "data"),
        num_classes=3,
        image_size=16,
    )


@pytest.fixture
def folder(tmp_path: Path) -> DataConfig:
    write_tree(tmp_path / "data" / "train", ("cat", "dog"), 5)
    write_tree(tmp_path / "data" / "val", ("cat", "dog"), 2, seed=1000)
    return DataConfig(dataset="folder", data_dir=str(tmp_path / "data"), image_size=12)
