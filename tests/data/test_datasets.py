"""Data sets: what is read, how it is split, and what happens to damaged files and damaged caches.

Set ``FEDKACE_DATA_DIR`` to a folder with ``cifar-100-python/``, ``tiny-imagenet-100.tar.xz`` and
``imagenet100-samples/`` to test on those as well.
"""

import hashlib
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedkace_flwr.data import datasets
from fedkace_flwr.data import readers as image_sources
from fedkace_flwr.data.datasets import DATASETS, Dataset, known_classes, load_dataset
from fedkace_flwr.data.readers import Content, Origin, Source
from fedkace_flwr.data.torchvision_compat import import_torchvision
from fedkace_flwr.errors import ConfigError, DataError
from fedkace_flwr.sections import DataConfig

DATA_DIR = Path(os.environ.get("FEDKACE_DATA_DIR", ""))
ROOT = Path(__file__).resolve().parents[2]


def _needs(name: str) -> pytest.MarkDecorator:
    there = "FEDKACE_DATA_DIR" in os.environ and (DATA_DIR / name).exists()
    return pytest.mark.skipif(not there, reason=f"FEDKACE_DATA_DIR does not name a folder with {name}")


def _picture(path: Path, shape: tuple[int, int] = (40, 30), mode: str = "RGB", seed: int = 0) -> None:
    """Write a smooth random picture of width x height ``shape``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(shape, Image.Resampling.BICUBIC).convert(mode).save(path)


def _tree(root: Path, classes: tuple[str, ...], count: int, seed: int = 0) -> None:
    for label, name in enumerate(classes):
        for i in range(count):
            _picture(root / name / f"{name}_{i:02d}.JPEG", seed=seed + 100 * label + i)


def _check_consistent(dataset: Dataset) -> None:
    """Everything that holds for a data set loaded with all its classes."""
    count = len(dataset.labels)
    assert isinstance(dataset.images, np.memmap)
    assert dataset.images.dtype == np.uint8 and dataset.labels.dtype == np.int64
    assert dataset.images.shape == (count, 3, dataset.image_size, dataset.image_size)
    train = [dataset.train_ids(label) for label in range(dataset.num_classes)]
    test = [dataset.test_ids(label) for label in range(dataset.num_classes)]
    for label, ids in [*enumerate(train), *enumerate(test)]:
        assert ids.dtype == np.int64 and len(ids) > 0
        assert (np.diff(ids) > 0).all()
        assert (dataset.labels[ids] == label).all()
    assert sorted(np.concatenate(train)) == list(range(dataset.train_size))
    assert sorted(np.concatenate(test)) == list(range(dataset.train_size, count))
    for channel in range(3):
        scaled = dataset.images[: dataset.train_size, channel] / 255
        assert dataset.mean[channel] == pytest.approx(scaled.mean(), abs=1e-9)
        assert dataset.std[channel] == pytest.approx(scaled.std(), abs=1e-9)


def _cache_folder(cache: Path) -> Path:
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return folder


@pytest.fixture
def digits(tmp_path: Path) -> DataConfig:
    return DataConfig(dataset="digits", cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def imagenet(tmp_path: Path) -> DataConfig:
    """Three synsets of 13 small JPEGs, one of them greyscale and one CMYK."""
    train = tmp_path / "data" / "train"
    _tree(train, ("n01", "n02", "n10"), 13)
    _picture(train / "n01" / "n01_03.JPEG", mode="L")
    _picture(train / "n02" / "n02_04.JPEG", mode="CMYK")
    return DataConfig(
        dataset="imagenet100",
        data_dir=str(tmp_path / "data"),
        cache_dir=str(tmp_path / "cache"),
        num_classes=3,
        image_size=16,
    )


@pytest.fixture
def folder(tmp_path: Path) -> DataConfig:
    _tree(tmp_path / "data" / "train", ("cat", "dog"), 5)
    _tree(tmp_path / "data" / "val", ("cat", "dog"), 2, seed=1000)
    return DataConfig(
        dataset="folder", data_dir=str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"), image_size=12
    )


# --- digits, and what all data sets share ------------------------------------------------------------------------


def test_digits_are_the_scanned_digits(digits: DataConfig) -> None:
    from sklearn.datasets import load_digits

    dataset = load_dataset(digits)
    _check_consistent(dataset)
    assert dataset.images.shape == (1797, 3, 8, 8)
    assert dataset.class_names == tuple("0123456789")
    raw = load_digits()
    for label in range(10):
        of_class = np.flatnonzero(raw.target == label)
        test = np.arange(len(of_class)) % 5 == 4
        for ids, rows in ((dataset.train_ids(label), of_class[~test]), (dataset.test_ids(label), of_class[test])):
            for channel in range(3):
                back = dataset.images[ids][:, channel] * (16 / 255)
                np.testing.assert_allclose(back, raw.images[rows], atol=0.5 * 16 / 255 + 1e-9)
    assert dataset.images.max() == 255 and dataset.images.min() == 0


def test_images_are_a_shared_map_that_cannot_be_written(digits: DataConfig) -> None:
    first, second = load_dataset(digits), load_dataset(digits)
    assert isinstance(first.images, np.memmap) and isinstance(second.images, np.memmap)
    assert first.images.filename == second.images.filename
    with pytest.raises(ValueError, match="read-only"):
        first.images[0] = 0


def test_fetch_copies_the_rows_asked_for(digits: DataConfig) -> None:
    dataset = load_dataset(digits)
    ids = torch.tensor([1796, 0, 5, 5])
    fetched = dataset.fetch(ids)
    assert fetched.dtype == torch.uint8 and fetched.shape == (4, 3, 8, 8)
    np.testing.assert_array_equal(fetched.numpy(), dataset.images[ids.numpy()])
    before = dataset.images[5].copy()
    fetched.zero_()
    np.testing.assert_array_equal(dataset.images[5], before)
    assert dataset.fetch(torch.empty(0, dtype=torch.int64)).shape == (0, 3, 8, 8)


def test_returned_ids_are_the_callers_own(digits: DataConfig) -> None:
    dataset = load_dataset(digits)
    expected = dataset.train_ids(3).copy()
    dataset.train_ids(3)[:] = -1
    np.testing.assert_array_equal(dataset.train_ids(3), expected)


def test_num_classes_keeps_ids_and_hides_the_other_classes(digits: DataConfig) -> None:
    whole, part = load_dataset(digits), load_dataset(replace(digits, num_classes=4))
    assert part.class_names == ("0", "1", "2", "3") and part.num_classes == 4
    assert part.images.shape == whole.images.shape
    for label in range(4):
        np.testing.assert_array_equal(part.train_ids(label), whole.train_ids(label))
        np.testing.assert_array_equal(part.test_ids(label), whole.test_ids(label))
    for label in (4, -1):
        with pytest.raises(IndexError, match="classes 0 to 3"):
            part.train_ids(label)


@pytest.mark.parametrize(("name", "classes"), [("digits", 10), ("cifar100", 100), ("imagenet100", 100)])
def test_more_classes_than_there_are(name: str, classes: int, tmp_path: Path) -> None:
    config = DataConfig(dataset=name, data_dir=str(tmp_path), cache_dir=str(tmp_path), num_classes=200)
    with pytest.raises(ConfigError, match=f"^num-classes = 200: data set {name} has {classes} classes$"):
        load_dataset(config)


def test_other_image_size_is_antialiased_bilinear(digits: DataConfig) -> None:
    native = load_dataset(digits)
    for size in (4, 20):
        resized = load_dataset(replace(digits, image_size=size))
        _check_consistent(resized)
        assert resized.image_size == size
        np.testing.assert_array_equal(resized.labels, native.labels)
        for row in (0, 700, 1796):  # Pillow's bilinear filter is antialiased as well
            expected = np.asarray(
                Image.fromarray(native.images[row, 0]).resize((size, size), Image.Resampling.BILINEAR)
            )
            assert np.abs(resized.images[row, 1].astype(int) - expected).max() <= 1


def test_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    for call in (lambda: known_classes("mnist"), lambda: load_dataset(DataConfig(dataset="mnist"))):
        with pytest.raises(ConfigError, match=r"'mnist'.*digits, cifar100, imagenet100, folder"):
            call()
    assert [known_classes(name) for name in DATASETS] == [10, 100, 100, None]


def test_cache_dir_falls_back_to_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKACE_CACHE_DIR", str(tmp_path / "from-environment"))
    load_dataset(DataConfig(dataset="digits"))
    assert (_cache_folder(tmp_path / "from-environment") / "images.npy").is_file()
    monkeypatch.delenv("FEDKACE_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    load_dataset(DataConfig(dataset="digits"))
    assert (_cache_folder(tmp_path / ".cache" / "fedkace_flwr") / "images.npy").is_file()


def test_progress_bar_is_shown_on_request(digits: DataConfig, capsys: pytest.CaptureFixture[str]) -> None:
    load_dataset(digits, progress=True)
    assert "preparing digits" in capsys.readouterr().out


# --- the cache ---------------------------------------------------------------------------------------------------


def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def _edit_meta(folder: Path, **changes: object) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES = {
    "images cut": lambda folder: _truncate(folder / "images.npy", 100_000),
    "images empty": lambda folder: _truncate(folder / "images.npy", 0),
    "images of another type": lambda folder: np.save(folder / "images.npy", np.zeros((1797, 3, 8, 8), np.int8)),
    "header garbled": lambda folder: (folder / "images.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': (((\n  "),
    "labels cut": lambda folder: _truncate(folder / "labels.npy", 500),
    "labels too few": lambda folder: np.save(folder / "labels.npy", np.zeros(5, np.int64)),
    "labels out of range": lambda folder: np.save(folder / "labels.npy", np.full(1797, 10)),
    "labels missing": lambda folder: (folder / "labels.npy").unlink(),
    "meta cut": lambda folder: _truncate(folder / "meta.json", 20),
    "meta missing": lambda folder: (folder / "meta.json").unlink(),
    "meta no object": lambda folder: (folder / "meta.json").write_text("[]"),
    "meta not text": lambda folder: (folder / "meta.json").write_bytes(b"\xff\xfe\x00"),
    "other version": lambda folder: _edit_meta(folder, format=0),
    "other shape": lambda folder: _edit_meta(folder, shape=[1797, 3, 9, 9]),
    "mean short": lambda folder: _edit_meta(folder, mean=[0.5]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_rebuilt(damage: str, digits: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    good = load_dataset(digits)
    images = np.array(good.images)
    folder = _cache_folder(Path(digits.cache_dir))
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
    monkeypatch.setattr(image_sources, "_read_digits", lambda size: pytest.fail("read the source again"))
    load_dataset(digits)


def test_open_map_outlives_a_rebuild(digits: DataConfig) -> None:
    held = load_dataset(digits)
    before = np.array(held.images)
    (_cache_folder(Path(digits.cache_dir)) / "labels.npy").unlink()
    load_dataset(digits)
    np.testing.assert_array_equal(held.images, before)


def test_failed_preparation_leaves_nothing(digits: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks() -> Iterator[np.ndarray]:
        yield np.zeros((2, 3, 8, 8), np.uint8)
        raise DataError("second block is damaged")

    content = Content(("0", "1"), np.array([0, 1, 0, 1]), 2, blocks())
    monkeypatch.setitem(DATASETS, "digits", Source(2, 8, lambda config, size: Origin("x", lambda: content)))
    with pytest.raises(DataError, match="second block"):
        load_dataset(digits)
    assert not [path for path in Path(digits.cache_dir).iterdir() if path.is_dir()]


KILLED = """
import os, sys
from dataclasses import replace
from fedkace_flwr.data import datasets
from fedkace_flwr.data import readers as image_sources
from fedkace_flwr.sections import DataConfig
read = image_sources._read_digits
def half(size):
    content = read(size)
    def blocks():
        yield next(content.blocks)
        os._exit(9)
    return replace(content, blocks=blocks())
image_sources._read_digits = half
datasets.load_dataset(DataConfig(dataset="digits", cache_dir=sys.argv[1]))
"""


def _python(script: str, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_killed_preparation_is_not_trusted(digits: DataConfig) -> None:
    process = _python(KILLED, digits.cache_dir)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 9, errors
    assert _cache_folder(Path(digits.cache_dir)).name.endswith(".partial")
    _check_consistent(load_dataset(digits))
    assert not _cache_folder(Path(digits.cache_dir)).name.endswith(".partial")


TOGETHER = """
import logging, sys, time
from pathlib import Path
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.data import readers as image_sources
image_sources._BLOCK = 1
decode = image_sources._decode
def slowly(*args, **kwargs):
    time.sleep(0.05)
    return decode(*args, **kwargs)
image_sources._decode = slowly
logging.basicConfig(level=logging.INFO)
data, cache, mine = sys.argv[1:]
Path(mine).touch()
while len(list(Path(mine).parent.glob("ready-*"))) < 2:
    time.sleep(0.01)
dataset = load_dataset(DataConfig(dataset="folder", data_dir=data, cache_dir=cache, image_size=12))
print(int(dataset.images.sum()))
"""


def test_two_processes_prepare_once(folder: DataConfig, tmp_path: Path) -> None:
    both = [_python(TOGETHER, folder.data_dir, folder.cache_dir, str(tmp_path / f"ready-{i}")) for i in range(2)]
    told = [process.communicate(timeout=60) for process in both]
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
dataset = load_dataset(DataConfig(dataset=sys.argv[1], data_dir=sys.argv[2], cache_dir=sys.argv[3], image_size=16))
dataset.fetch(torch.tensor(dataset.train_ids(0)[:2]))
print(sorted({name.split(".")[0] for name in sys.modules} & {"torchvision", "sklearn", "rich", "PIL"}))
"""


@pytest.mark.parametrize("name", ["digits", "folder"])
def test_opening_a_prepared_cache_imports_no_reader(name: str, folder: DataConfig) -> None:
    load_dataset(replace(folder, dataset=name, image_size=16))
    process = _python(OPEN, name, folder.data_dir, folder.cache_dir)
    out, errors = process.communicate(timeout=60)
    assert out.strip() == "[]", errors


def test_unwritable_cache_names_folder_and_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    with pytest.raises(DataError, match=f"^cache-dir = {cache}: "):
        load_dataset(DataConfig(dataset="digits", cache_dir=str(cache)))


def test_full_disk_names_the_cache(digits: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datasets, "_write_images", full)
    with pytest.raises(DataError, match=r"^cache-dir = .*No space left"):
        load_dataset(digits)


# --- imagenet100 -------------------------------------------------------------------------------------------------


def test_imagenet_classes_and_proportional_split(imagenet: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        dataset = load_dataset(imagenet)
    _check_consistent(dataset)
    assert dataset.class_names == ("n01", "n02", "n10")
    assert dataset.train_size == 30 and len(dataset.labels) == 39
    assert caplog.text.count("n10 (13)") == 1
    grey, coloured = dataset.images[dataset.train_ids(0)[3]], dataset.images[dataset.train_ids(0)[2]]
    assert (grey == grey[:1]).all() and not (coloured == coloured[:1]).all()


def test_imagenet_images_are_resized_and_cropped_like_torchvision(imagenet: DataConfig) -> None:
    transforms = import_torchvision().transforms
    for shape in ((40, 30), (31, 57), (18, 18), (100, 9)):
        _picture(Path(imagenet.data_dir) / "train" / "n01" / "n01_00.JPEG", shape)
        dataset = load_dataset(imagenet)
        prepare = transforms.Compose([transforms.Resize(round(16 * 256 / 224)), transforms.CenterCrop(16)])
        for label, name, row in ((0, "n01_00", 0), (1, "n02_04", 4), (2, "n10_09", 9)):
            path = Path(imagenet.data_dir) / "train" / dataset.class_names[label] / f"{name}.JPEG"
            expected = np.asarray(prepare(Image.open(path).convert("RGB"))).transpose(2, 0, 1)
            np.testing.assert_array_equal(dataset.images[dataset.train_ids(label)[row]], expected)


def test_imagenet_takes_the_first_1300_of_a_synset(imagenet: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    train = Path(imagenet.data_dir) / "train"
    for i in range(1310):
        os.link(train / "n02" / "n02_00.JPEG", train / "n01" / f"n01_{100 + i:04d}.JPEG")
    dataset = load_dataset(replace(imagenet, num_classes=1))
    assert len(dataset.train_ids(0)) == 1000 and len(dataset.test_ids(0)) == 300
    assert "fewer than 1300" not in caplog.text


def test_imagenet_without_a_train_folder(imagenet: DataConfig) -> None:
    direct = load_dataset(replace(imagenet, data_dir=str(Path(imagenet.data_dir) / "train")))
    assert direct.class_names == ("n01", "n02", "n10")


def test_imagenet_needs_its_synsets(imagenet: DataConfig) -> None:
    (Path(imagenet.data_dir) / "train" / "not-a-synset").mkdir()
    with pytest.raises(DataError, match="3 synset folders, expected 100"):
        load_dataset(replace(imagenet, num_classes=0))
    assert load_dataset(replace(imagenet, num_classes=2)).class_names == ("n01", "n02")


def test_imagenet_class_with_a_single_image(imagenet: DataConfig) -> None:
    synset = Path(imagenet.data_dir) / "train" / "n02"
    for path in sorted(synset.iterdir())[2:]:
        path.unlink()
    dataset = load_dataset(imagenet)
    assert (len(dataset.train_ids(1)), len(dataset.test_ids(1))) == (1, 1)
    (synset / "n02_00.JPEG").unlink()
    with pytest.raises(DataError, match=f"{synset}: 1 images .*at least 2"):
        load_dataset(imagenet)


@pytest.mark.parametrize("damage", ["truncated", "not an image", "empty"])
def test_damaged_jpeg_is_named(damage: str, imagenet: DataConfig) -> None:
    path = Path(imagenet.data_dir) / "train" / "n02" / "n02_07.JPEG"
    path.write_bytes({"truncated": path.read_bytes()[:400], "not an image": b"<html>", "empty": b""}[damage])
    with pytest.raises(DataError, match=f"^{path}: damaged"):
        load_dataset(imagenet)


def test_changed_files_are_prepared_anew(imagenet: DataConfig) -> None:
    before = load_dataset(imagenet)
    path = Path(imagenet.data_dir) / "train" / "n01" / "n01_00.JPEG"
    _picture(path, seed=77)
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 1))
    after = load_dataset(imagenet)
    assert not np.array_equal(before.images[0], after.images[0])
    np.testing.assert_array_equal(before.images[1:], after.images[1:])


@_needs("imagenet100-samples")
def test_real_imagenet_files(tmp_path: Path) -> None:
    samples = sorted((DATA_DIR / "imagenet100-samples" / "train").glob("*/*.JPEG"))
    grey = [path for path in samples if Image.open(path).mode == "L"]
    assert grey, "the samples should hold a greyscale file"
    chosen = sorted({path.parent.name: path for path in [*samples[:4], grey[0]]}.items())
    for synset, path in chosen:
        (tmp_path / "train" / synset).mkdir(parents=True)
        for i in range(3):
            shutil.copy(path, tmp_path / "train" / synset / f"{i}.JPEG")
    config = DataConfig("imagenet100", str(tmp_path), str(tmp_path / "cache"), num_classes=len(chosen))
    dataset = load_dataset(config)
    _check_consistent(dataset)
    assert dataset.image_size == 224 and dataset.class_names == tuple(synset for synset, _ in chosen)
    prepared = dataset.images[dataset.test_ids(dataset.class_names.index(grey[0].parent.name))[0]]
    assert (prepared == prepared[:1]).all() and prepared.std() > 5


# --- folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_folder_split_and_order(held_out: str, folder: DataConfig) -> None:
    root = Path(folder.data_dir)
    (root / "val").rename(root / held_out)
    (root / "train" / "dog" / "notes.txt").write_text("not an image")
    dataset = load_dataset(folder)
    _check_consistent(dataset)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.train_size == 10 and len(dataset.labels) == 14
    path = root / held_out / "dog" / "dog_01.JPEG"
    picture = Image.open(path).resize((16, 12), Image.Resampling.BILINEAR).crop((2, 0, 14, 12))
    np.testing.assert_array_equal(dataset.images[13], np.asarray(picture).transpose(2, 0, 1))


def test_folder_classes_are_counted(folder: DataConfig) -> None:
    assert load_dataset(replace(folder, num_classes=1)).class_names == ("cat",)
    with pytest.raises(ConfigError, match=r"^num-classes = 3: data set folder has 2 classes$"):
        load_dataset(replace(folder, num_classes=3))


def test_folder_splits_with_different_classes(folder: DataConfig) -> None:
    root = Path(folder.data_dir)
    (root / "val" / "dog").rename(root / "val" / "wolf")
    with pytest.raises(DataError, match=f"{root}/val lacks dog; {root}/train lacks wolf"):
        load_dataset(folder)


def test_folder_without_images_or_splits(folder: DataConfig, tmp_path: Path) -> None:
    root = Path(folder.data_dir)
    shutil.rmtree(root / "train" / "dog")
    (root / "train" / "dog").mkdir()
    with pytest.raises(DataError, match=f"{root}/train/dog: 0 images"):
        load_dataset(folder)
    shutil.rmtree(root / "val")
    with pytest.raises(DataError, match=f"{root}/test: cannot be read .*data-dir"):
        load_dataset(folder)
    with pytest.raises(DataError, match=f"{tmp_path}/nowhere/train: cannot be read .*data-dir"):
        load_dataset(replace(folder, data_dir=str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match=f"{tmp_path}/nowhere: cannot be read .*data-dir"):
        load_dataset(replace(folder, dataset="imagenet100", data_dir=str(tmp_path / "nowhere")))


@_needs("tiny-imagenet-100.tar.xz")
def test_real_image_folder(tmp_path: Path) -> None:
    with tarfile.open(DATA_DIR / "tiny-imagenet-100.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # early releases of Python 3.11 have none
        archive.extractall(tmp_path)
    dataset = load_dataset(DataConfig("folder", str(tmp_path / "tiny-imagenet-100"), str(tmp_path / "cache")))
    _check_consistent(dataset)
    assert dataset.images.shape == (15_000, 3, 64, 64) and dataset.train_size == 10_000
    assert {len(dataset.test_ids(label)) for label in range(100)} == {50}
    path = sorted((tmp_path / "tiny-imagenet-100" / "train" / dataset.class_names[7]).iterdir())[3]
    expected = np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1)  # native size: not resampled
    np.testing.assert_array_equal(dataset.images[dataset.train_ids(7)[3]], expected)


# --- cifar100 ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cifar_config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return DataConfig("cifar100", str(DATA_DIR), str(tmp_path_factory.mktemp("cifar-cache")))


@_needs("cifar-100-python")
def test_real_cifar100(cifar_config: DataConfig) -> None:
    dataset = load_dataset(cifar_config)
    assert dataset.images.shape == (60_000, 3, 32, 32) and dataset.train_size == 50_000
    assert dataset.class_names[0] == "apple" and dataset.class_names[99] == "worm"
    assert {(len(dataset.train_ids(c)), len(dataset.test_ids(c))) for c in range(100)} == {(500, 100)}
    np.testing.assert_allclose(dataset.mean, (0.5071, 0.4865, 0.4409), atol=1e-4)  # as commonly published
    np.testing.assert_allclose(dataset.std, (0.2673, 0.2564, 0.2762), atol=1e-4)
    with (DATA_DIR / "cifar-100-python" / "test").open("rb") as file:
        raw = pickle.load(file, encoding="latin1")
    np.testing.assert_array_equal(dataset.images[50_000:].reshape(10_000, -1), raw["data"])
    np.testing.assert_array_equal(dataset.labels[50_000:], raw["fine_labels"])
    assert load_dataset(replace(cifar_config, num_classes=20)).num_classes == 20


@_needs("cifar-100-python")
@pytest.mark.parametrize("damage", ["train cut", "train garbled", "meta missing"])
def test_damaged_cifar_files_are_reported(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar-100-python"
    folder.mkdir(parents=True)
    for name in ("train", "test", "meta"):
        (folder / name).symlink_to(DATA_DIR / "cifar-100-python" / name)
    if damage == "meta missing":
        (folder / "meta").unlink()
    else:
        content = bytearray((folder / "train").read_bytes()[:1_000_000])
        content[5000] ^= 255
        (folder / "train").unlink()
        (folder / "train").write_bytes(content if damage == "train garbled" else content[:400_000])
    before = sorted((tmp_path / "data").iterdir())
    with pytest.raises(DataError, match=f"^{folder}: .*train, test and meta"):
        load_dataset(DataConfig("cifar100", str(tmp_path / "data"), str(tmp_path / "cache")))
    assert sorted((tmp_path / "data").iterdir()) == before


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have torchvision download a tiny archive of CIFAR-100's layout, from this machine."""
    inside = tmp_path / "offer" / "cifar-100-python"
    inside.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, rows in (("train", 200), ("test", 100)):
        entry = {"data": rng.integers(0, 256, (rows, 3072), np.uint8), "fine_labels": [i % 100 for i in range(rows)]}
        (inside / name).write_bytes(pickle.dumps(entry))
    (inside / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"c{i:02d}" for i in range(100)]}))
    archive = tmp_path / "offer" / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(inside, inside.name)
    md5 = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in (*inside.iterdir(), archive)}

    cifar100 = import_torchvision().datasets.CIFAR100
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=archive.parent))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(cifar100, "url", f"http://127.0.0.1:{server.server_port}/{archive.name}")
    monkeypatch.setattr(cifar100, "tgz_md5", md5[archive.name])
    monkeypatch.setattr(cifar100, "train_list", [["train", md5["train"]]])
    monkeypatch.setattr(cifar100, "test_list", [["test", md5["test"]]])
    monkeypatch.setattr(cifar100, "meta", cifar100.meta | {"md5": md5["meta"]})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("offered")
def test_absent_cifar_files_are_downloaded(tmp_path: Path) -> None:
    config = DataConfig("cifar100", str(tmp_path / "data"), str(tmp_path / "cache"))
    dataset = load_dataset(config)
    _check_consistent(dataset)
    assert dataset.images.shape == (300, 3, 32, 32) and dataset.class_names[7] == "c07"
    left = [path.name for path in (tmp_path / "data").iterdir() if not path.name.endswith(".lock")]
    assert left == ["cifar-100-python"]


def test_failed_download_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar100 = import_torchvision().datasets.CIFAR100
    monkeypatch.setattr(cifar100, "url", (tmp_path / "not-there.tar.gz").as_uri())
    config = DataConfig("cifar100", str(tmp_path / "data"), str(tmp_path / "cache"))
    with pytest.raises(DataError, match=f"^{tmp_path}/data/cifar-100-python: .*could not be downloaded"):
        load_dataset(config)
    assert not (tmp_path / "data" / "cifar-100-python").exists()


def test_download_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="could not be downloaded"):
        load_dataset(DataConfig("cifar100", str(tmp_path / "file" / "data"), str(tmp_path / "cache")))


# --- torchvision -------------------------------------------------------------------------------------------------


def test_torchvision_imports_here_and_only_once() -> None:
    torchvision = import_torchvision()
    assert torchvision is import_torchvision() is sys.modules["torchvision"]
    assert torchvision.models.resnet18(num_classes=3)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
