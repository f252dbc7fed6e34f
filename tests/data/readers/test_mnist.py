"""MNIST and EMNIST: read from idx files in every place where they may be, and refused when damaged."""

import gzip
import os
import string
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.made.datasets import assert_consistent, idx

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.config import Config
from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.data.readers import idx as idx_reader
from fedkace_flwr.errors import ConfigError, DataError, MissingDataError
from fedkace_flwr.sections import DataConfig

MNIST = {
    "train-images-idx3-ubyte": "train images",
    "train-labels-idx1-ubyte": "train labels",
    "t10k-images-idx3-ubyte": "test images",
    "t10k-labels-idx1-ubyte": "test labels",
}


def emnist(split: str) -> list[str]:
    return [
        f"emnist-{split}-{part}-{kind}"
        for part in ("train", "test")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]


def scribbles(classes: int, *, first: int = 0, side: int = 28) -> list[np.ndarray]:
    """Training images and labels, three of each class, then test images and labels, one of each."""
    rng, arrays = np.random.default_rng(0), []
    for each in (3, 1):
        labels = rng.permutation(np.repeat(np.arange(first, first + classes), each))
        arrays += [rng.integers(0, 256, (len(labels), side, side), np.uint8), labels.astype(np.uint8)]
    return arrays


def write(folder: Path, names: list[str], arrays: list[np.ndarray], suffix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(names, arrays, strict=True):
        content = idx(array)
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(content) if suffix else content)


@pytest.fixture
def mnist(tmp_path: Path) -> DataConfig:
    write(tmp_path / "data", list(MNIST), scribbles(10))
    return DataConfig("mnist", str(tmp_path / "data"))


def test_mnist_is_read_as_torchvision_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "data" / "MNIST" / "raw", list(MNIST), scribbles(10))
    dataset = load_dataset(DataConfig("mnist", str(tmp_path / "data")))
    assert_consistent(dataset)
    assert dataset.class_names == tuple(string.digits) and dataset.image_size == 28
    theirs = [import_torchvision().datasets.MNIST(tmp_path / "data", train=train) for train in (True, False)]
    images, labels = (np.concatenate([getattr(each, part) for each in theirs]) for part in ("data", "targets"))
    for channel in range(3):
        np.testing.assert_array_equal(dataset.images[:, channel], images)
    np.testing.assert_array_equal(dataset.labels, labels)
    assert dataset.train_size == 30


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("place", ["", "MNIST/raw"])
def test_mnist_is_found_plain_or_packed_in_both_places(place: str, suffix: str, tmp_path: Path) -> None:
    arrays = scribbles(10)
    write(tmp_path / "data" / place, list(MNIST), arrays, suffix)
    dataset = load_dataset(DataConfig("mnist", str(tmp_path / "data")))
    np.testing.assert_array_equal(dataset.images[:30, 1], arrays[0])
    np.testing.assert_array_equal(dataset.images[30:, 2], arrays[2])


def test_mnist_is_scaled_on_request(mnist: DataConfig) -> None:
    dataset = load_dataset(replace(mnist, image_size=14))
    assert_consistent(dataset)
    assert dataset.image_size == 14


@pytest.mark.parametrize(
    ("split", "place", "classes", "first"),
    [
        ("balanced", "gzip", string.digits + string.ascii_uppercase + "abdefghnqrt", 0),
        ("bymerge", "", string.digits + string.ascii_uppercase + "abdefghnqrt", 0),
        ("byclass", "EMNIST/raw", string.digits + string.ascii_uppercase + string.ascii_lowercase, 0),
        ("letters", "EMNIST/raw", string.ascii_lowercase, 1),
        ("digits", "gzip", string.digits, 0),
        ("mnist", "gzip", string.digits, 0),
    ],
)
def test_emnist_splits_have_their_own_classes_and_stand_upright(
    split: str, place: str, classes: str, first: int, tmp_path: Path
) -> None:
    arrays = scribbles(len(classes), first=first)
    write(tmp_path / "data" / place, emnist(split), arrays, ".gz")
    places = {"data-dir": str(tmp_path / "data")}
    config = Config.parse({"dataset": f"emnist-{split}", **places}).data
    dataset = load_dataset(config)
    assert_consistent(dataset)
    assert "".join(dataset.class_names) == classes
    np.testing.assert_array_equal(dataset.labels, np.concatenate([arrays[1], arrays[3]]).astype(int) - first)
    np.testing.assert_array_equal(dataset.images[5, 0], arrays[0][5].T)  # the files hold columns before rows
    with pytest.raises(ConfigError, match=f"^num-classes = 63: data set emnist-{split} has {len(classes)} classes$"):
        load_dataset(replace(config, num_classes=63))


def test_changed_files_are_prepared_anew(mnist: DataConfig) -> None:
    before = np.array(load_dataset(mnist).images)
    arrays = scribbles(10)
    write(Path(mnist.data_dir), list(MNIST), [255 - arrays[0], *arrays[1:]], ".gz")
    for name in MNIST:
        (Path(mnist.data_dir) / name).unlink()
    np.testing.assert_array_equal(load_dataset(mnist).images[:30], 255 - before[:30])


def test_missing_files_are_named_with_the_folder_that_was_searched(mnist: DataConfig, tmp_path: Path) -> None:
    empty = replace(mnist, data_dir=str(tmp_path / "nothing"))
    with pytest.raises(MissingDataError) as caught:
        load_dataset(empty)
    assert str(caught.value).startswith(f"{tmp_path}/nothing: holds none of MNIST's files")
    assert all(name in str(caught.value) for name in (*MNIST, ".gz", "MNIST/raw"))
    (Path(mnist.data_dir) / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(MissingDataError, match=rf"^{mnist.data_dir}: lacks t10k-labels-idx1-ubyte of MNIST's files"):
        load_dataset(mnist)
    with pytest.raises(MissingDataError, match=r"emnist-letters-train-images-idx3-ubyte.*EMNIST/raw or gzip"):
        load_dataset(replace(mnist, dataset="emnist-letters"))


HEADER = bytes([0, 0, 8, 3])
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "floats": ("train images", lambda content: bytes([0, 0, 13, 3]) + content[4:], "begins with 00 00 0d 03"),
    "labels for images": ("train images", lambda content: idx(np.zeros(9)), "begins with 00 00 08 01; .* 00 00 08 03$"),
    "cut": ("train images", lambda content: content[:-1], r"names 23520 values, it holds 23519; it is damaged$"),
    "longer": ("test labels", lambda content: content + b"\0", r"names 10 values, it holds more"),
    "huge": (
        "train images",
        lambda content: HEADER + struct.pack(">III", 2**32 - 1, 2**32 - 1, 1),
        r"names 18446744065119617025 values; at most 1073741824 are read$",
    ),
    "huge, but no pixels": (
        "train images",
        lambda content: HEADER + struct.pack(">III", 2**32 - 1, 2**32 - 1, 0),
        "an array of 4294967295 x 4294967295 x 0, which holds nothing$",
    ),
    "not square": ("train images", lambda content: idx(np.zeros((30, 28, 27))), "30 images of 28 x 27 pixels"),
    "fewer labels": ("train labels", lambda content: idx(np.zeros(29)), "holds 29 labels for 30 images"),
    "other labels": ("test labels", lambda content: idx(np.full(10, 10)), r"labels 10 to 10; must be 0 to 9$"),
    "other size": ("test images", lambda content: idx(np.zeros((10, 8, 8))), "28 x 28 and 8 x 8 pixels"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(damage: str, mnist: DataConfig) -> None:
    part, change, message = DAMAGES[damage]
    path = Path(mnist.data_dir) / next(name for name, each in MNIST.items() if each == part)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        load_dataset(mnist)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", ["no gzip", "cut", "crc"])
def test_damaged_packed_files_are_named(damage: str, tmp_path: Path) -> None:
    write(tmp_path, list(MNIST), scribbles(10), ".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    content = path.read_bytes()
    changed = {"no gzip": b"abc" + content, "cut": content[:-200], "crc": content[:-8] + bytes(4) + content[-4:]}
    path.write_bytes(changed[damage])
    with pytest.raises(DataError, match=f"^{path}: cannot be read"):
        load_dataset(DataConfig("mnist", str(tmp_path)))


def test_what_unpacks_to_more_than_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx_reader, "LARGEST", 99)
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(idx(np.zeros(100))))
    with pytest.raises(DataError, match="100 values; at most 99 are read"):
        idx_reader.read_idx(path, 1)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe: cannot be read .*regular file"):
        idx_reader.read_idx(tmp_path / "pipe", 1)
