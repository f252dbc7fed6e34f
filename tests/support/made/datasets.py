"""Generated data sets, and assertions that hold for every data set.

``FEDKACE_DATA_DIR`` names a folder with ``cifar-100-python/``, ``tiny-imagenet-100.tar.xz`` and
``imagenet100-samples/``; without it, the tests that need these files are skipped.
"""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedkace_flwr.data.datasets import Dataset

DATA_DIR = Path(os.environ.get("FEDKACE_DATA_DIR", ""))
ROOT = Path(__file__).resolve().parents[3]


def needs(name: str) -> pytest.MarkDecorator:
    """Skip the test unless ``FEDKACE_DATA_DIR`` contains a file or folder with this name."""
    there = "FEDKACE_DATA_DIR" in os.environ and (DATA_DIR / name).exists()
    return pytest.mark.skipif(not there, reason=f"FEDKACE_DATA_DIR does not name a folder with {name}")


def write_picture(path: Path, shape: tuple[int, int] = (40, 30), mode: str = "RGB", seed: int = 0) -> None:
    """Write a smooth random image of width x height ``shape``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(shape, Image.Resampling.BICUBIC).convert(mode).save(path)


def write_tree(root: Path, classes: tuple[str, ...], count: int, seed: int = 0) -> None:
    for label, name in enumerate(classes):
        for i in range(count):
            write_picture(root / name / f"{name}_{i:02d}.JPEG", seed=seed + 100 * label + i)


def idx(array: np.ndarray) -> bytes:
    """Return the idx file of an array of unsigned bytes."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def assert_consistent(dataset: Dataset) -> None:
    """Assert everything that holds for a data set loaded with all its classes."""
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
    trained, tested = np.sort(np.concatenate(train)), np.sort(np.concatenate(test))
    assert sorted([*trained, *tested]) == list(range(count)) and len(trained) == dataset.train_size
    assert dataset.split_digest or tested[0] == dataset.train_size
    for channel in range(3):
        scaled = dataset.images[trained, channel] / 255
        assert dataset.mean[channel] == pytest.approx(scaled.mean(), abs=1e-9)
        assert dataset.std[channel] == pytest.approx(scaled.std(), abs=1e-9)


def cache_folder(cache: Path) -> Path:
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return folder


def start_python(script: str, *args: str) -> "subprocess.Popen[str]":
    """Start a script in a new Python process."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
