"""The cache of prepared data sets: shared, made once, never trusted when damaged."""

import json
import logging
import pwd
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.made.datasets import assert_consistent, cache_folder, start_python

from fedkace_flwr.data import datasets
from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.data.readers import Content, Origin, Source
from fedkace_flwr.data.readers import digits as digits_reader
from fedkace_flwr.data.readers.catalogue import DATASETS
from fedkace_flwr.errors import ConfigError, DataError
from fedkace_flwr.sections import DataConfig


def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def _edit_meta(folder: Path, **changes: object) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES = {
    "images cut": lambda folder: _truncate(folder / "images.npy", 100_000),
    "images of another type": lambda folder: np.save(folder / "images.npy", np.zeros((1797, 3, 8, 8), np.int8)),
    "header garbled": lambda folder: (folder / "images.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': (((\n  "),
    "labels cut": lambda folder: _truncate(folder / "labels.npy", 500),
    "labels out of range": lambda folder: np.save(folder / "labels.npy", np.full(1797, 10)),
    "labels missing": lambda folder: (folder / "labels.npy").unlink(),
    "meta cut": lambda folder: _truncate(folder / "meta.json", 20),
    "other version": lambda folder: _edit_meta(folder, format=0),
    "other shape": lambda folder: _edit_meta(folder, shape=[1797, 3, 9, 9]),
}


@pytest.mark.matrix
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_rebuilt(
    damage: str, digits: DataConfig, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = load_dataset(digits)
    images = np.array(good.images)
    folder = cache_folder(cache)
    del good
    DAMAGES[damage](folder)
    with caplog.at_level(logging.WARNING):
        again = load_dataset(digits)
    assert "damaged" in caplog.text and str(folder) in caplog.text
    np.testing.assert_array_equal(again.images, images)
    caplog.clear()
    load_dataset(digits)
    assert "damaged" not in caplog.text


def test_second_load_reads_no_source(digits: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    load_dataset(digits)
    monkeypatch.setattr(digits_reader, "_read_digits", lambda size: pytest.fail("read the source again"))
    load_dataset(digits)


def test_open_map_outlives_a_rebuild(digits: DataConfig, cache: Path) -> None:
    held = load_dataset(digits)
    before = np.array(held.images)
    (cache_folder(cache) / "labels.npy").unlink()
    load_dataset(digits)
    np.testing.assert_array_equal(held.images, before)


def test_failed_preparation_leaves_nothing(digits: DataConfig, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks() -> Iterator[np.ndarray]:
        yield np.zeros((2, 3, 8, 8), np.uint8)
        raise DataError("second block is damaged")

    content = Content(("0", "1"), np.array([0, 1, 0, 1]), 2, blocks())
    monkeypatch.setitem(DATASETS, "digits", Source(2, 8, lambda config, size: Origin("x", lambda: content)))
    with pytest.raises(DataError, match="second block"):
        load_dataset(digits)
    assert not [path for path in cache.iterdir() if path.is_dir()]


KILLED = """
import os, sys
from dataclasses import replace
from fedkace_flwr.data import datasets
from fedkace_flwr.data.readers import digits as digits_reader
from fedkace_flwr.sections import DataConfig
read = digits_reader._read_digits
def half(size):
    content = read(size)
    def blocks():
        yield next(content.blocks)
        os._exit(9)
    return replace(content, blocks=blocks())
digits_reader._read_digits = half
datasets.load_dataset(DataConfig(dataset="digits"))
"""


@pytest.mark.slow
def test_killed_preparation_is_not_trusted(digits: DataConfig, cache: Path) -> None:
    process = start_python(KILLED)
    _, errors = process.communicate()
    assert process.returncode == 9, errors
    assert cache_folder(cache).name.endswith(".partial")
    assert_consistent(load_dataset(digits))
    assert not cache_folder(cache).name.endswith(".partial")


TOGETHER = """
import logging, sys, time
from pathlib import Path
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.data.readers import image_folders
image_folders.BLOCK = 1
decode = image_folders._decode
def slowly(*args, **kwargs):
    time.sleep(0.05)
    return decode(*args, **kwargs)
image_folders._decode = slowly
logging.basicConfig(level=logging.INFO)
data, mine = sys.argv[1:]
Path(mine).touch()
while len(list(Path(mine).parent.glob("ready-*"))) < 2:
    time.sleep(0.01)
dataset = load_dataset(DataConfig(dataset="folder", data_dir=data, image_size=12))
print(int(dataset.images.sum()))
"""


@pytest.mark.slow
def test_two_processes_prepare_once(folder: DataConfig, tmp_path: Path) -> None:
    both = [start_python(TOGETHER, folder.data_dir, str(tmp_path / f"ready-{i}")) for i in range(2)]
    told = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    expected = str(int(load_dataset(folder).images.sum()))
    assert [out.strip() for out, _ in told] == [expected, expected]
    assert sum(errors.count("prepared folder") for _, errors in told) == 1
    assert "damaged" not in told[0][1] + told[1][1]


OPEN = """
import sys
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.data.datasets import load_dataset
import torch
dataset = load_dataset(DataConfig(dataset=sys.argv[1], data_dir=sys.argv[2], image_size=16))
dataset.fetch(torch.tensor(dataset.train_ids(0)[:2]))
print(sorted({name.split(".")[0] for name in sys.modules} & {"torchvision", "sklearn", "rich", "PIL"}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "folder"])
def test_opening_a_prepared_cache_imports_no_reader(name: str, folder: DataConfig) -> None:
    load_dataset(replace(folder, dataset=name, image_size=16))
    process = start_python(OPEN, name, folder.data_dir)
    out, errors = process.communicate()
    assert out.strip() == "[]", errors


def test_unwritable_cache_names_folder_and_variable(cache: Path) -> None:
    cache.touch()
    with pytest.raises(DataError, match=f"^FEDKACE_CACHE_DIR = {cache}: "):
        load_dataset(DataConfig(dataset="digits"))


def test_full_disk_names_the_cache(digits: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datasets, "_write_samples", full)
    with pytest.raises(DataError, match=r"^FEDKACE_CACHE_DIR = .*No space left"):
        load_dataset(digits)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a user that /etc/passwd does not list."""
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    for name in ("HOME", "FEDKACE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ConfigError, match=r"cache/fedkace_flwr: .* no such home folder; set the variable FEDKACE_CACHE_DIR, or HOME$"
    ):
        load_dataset(DataConfig())
    with pytest.raises(ConfigError, match=r"^~/x: .* set data-dir, or HOME$"):
        load_dataset(DataConfig(dataset="cifar10", data_dir="~/x"))
