"""What every data set offers, on the scanned digits."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.made.datasets import assert_consistent, cache_folder

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.data.readers.catalogue import DATASETS, source_of
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.sections import DataConfig


def test_digits_are_the_scanned_digits(digits: DataConfig) -> None:
    from sklearn.datasets import load_digits

    dataset = load_dataset(digits)
    assert_consistent(dataset)
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


def test_first_class_gives_later_classes_the_first_labels(digits: DataConfig) -> None:
    whole, part = load_dataset(digits), load_dataset(replace(digits, num_classes=4, first_class=6))
    assert part.class_names == ("6", "7", "8", "9") and part.digest == whole.digest
    for label in range(4):
        np.testing.assert_array_equal(part.train_ids(label), whole.train_ids(6 + label))
        np.testing.assert_array_equal(part.test_ids(label), whole.test_ids(6 + label))
        assert (part.labels[part.train_ids(label)] == label).all()
    with pytest.raises(ConfigError, match=r"^first-class = 7 with num-classes = 4: data set digits has 10 classes$"):
        load_dataset(replace(digits, num_classes=4, first_class=7))


@pytest.mark.parametrize(
    ("name", "classes"), [("digits", 10), ("cifar10", 10), ("cifar100", 100), ("imagenet100", 100)]
)
def test_more_classes_than_there_are(name: str, classes: int, tmp_path: Path) -> None:
    config = DataConfig(dataset=name, data_dir=str(tmp_path), num_classes=200)
    with pytest.raises(ConfigError, match=f"^num-classes = 200: data set {name} has {classes} classes$"):
        load_dataset(config)


def test_other_image_size_is_antialiased_bilinear(digits: DataConfig) -> None:
    native = load_dataset(digits)
    for size in (4, 20):
        resized = load_dataset(replace(digits, image_size=size))
        assert_consistent(resized)
        assert resized.image_size == size
        np.testing.assert_array_equal(resized.labels, native.labels)
        for row in (0, 700, 1796):  # Pillow's bilinear filter is antialiased as well
            expected = np.asarray(
                Image.fromarray(native.images[row, 0]).resize((size, size), Image.Resampling.BILINEAR)
            )
            assert np.abs(resized.images[row, 1].astype(int) - expected).max() <= 1


def test_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    for call in (lambda: source_of("svhn"), lambda: load_dataset(DataConfig(dataset="svhn"))):
        with pytest.raises(
            ConfigError,
            match=r"'svhn'.*digits, cifar10, cifar100, mnist, emnist-balanced, .*, imagenet100, folder, hub, .*, arrays, inbox",
        ):
            call()
    assert [source_of(name).classes for name in DATASETS] == [10, 10, 100, 10, *[None] * 6, 100, None, None, 3, None]


def test_cache_dir_falls_back_to_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKACE_CACHE_DIR", str(tmp_path / "from-environment"))
    load_dataset(DataConfig(dataset="digits"))
    assert (cache_folder(tmp_path / "from-environment") / "images.npy").is_file()
    monkeypatch.delenv("FEDKACE_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    load_dataset(DataConfig(dataset="digits"))
    assert (cache_folder(tmp_path / ".cache" / "fedkace_flwr") / "images.npy").is_file()


def test_progress_bar_is_shown_on_request(digits: DataConfig, capsys: pytest.CaptureFixture[str]) -> None:
    load_dataset(digits, progress=True)
    assert "preparing digits" in capsys.readouterr().out


def test_torchvision_imports_here_and_only_once() -> None:
    torchvision = import_torchvision()
    assert torchvision is import_torchvision() is sys.modules["torchvision"]
    assert torchvision.models.resnet18(num_classes=3)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
