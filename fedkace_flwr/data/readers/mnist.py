"""MNIST and EMNIST, from the idx files in which they are published."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data.readers.idx import read_idx
from fedkace_flwr.data.readers.source import Content, Origin, check_num_classes, data_dir, digest, resized
from fedkace_flwr.errors import DataError, MissingDataError
from fedkace_flwr.sections import DataConfig

_MERGED = "".join(letter for letter in string.ascii_lowercase if letter not in "cijklmopsuvwxyz")
EMNIST: Mapping[str, str] = {
    "balanced": string.digits + string.ascii_uppercase + _MERGED,
    "byclass": string.digits + string.ascii_uppercase + string.ascii_lowercase,
    "bymerge": string.digits + string.ascii_uppercase + _MERGED,
    "letters": string.ascii_lowercase,
    "digits": string.digits,
    "mnist": string.digits,
}
"""The classes of EMNIST's splits. Two of them treat as one class letters that look alike in both cases."""


@dataclass(frozen=True)
class _Files:
    """Where a data set's files may be, and how to read them.

    Attributes
    ----------
    name : str
        For messages.
    names : tuple of str
        Training images and labels, test images and labels; each file may have ``.gz`` appended.
    folders : tuple of str
        Folders in ``data-dir`` in which they are looked for before ``data-dir`` itself.
    classes : str
        One character for each class.
    first : int
        The label of the first class.
    transposed : bool
        Whether rows and columns of the images are exchanged.
    """

    name: str
    names: tuple[str, str, str, str]
    folders: tuple[str, ...]
    classes: str
    first: int = 0
    transposed: bool = False

    def find(self, config: DataConfig, size: int) -> Origin:
        check_num_classes(config, len(self.classes))
        root = data_dir(config)
        try:
            folder = next((root / each for each in self.folders if _file(root / each, self.names[0])), root)
            found = [_file(folder, name) for name in self.names]
            facts = [path.stat() for path in found if path is not None]
        except OSError as fault:
            raise DataError(f"{root}: cannot be searched for {self.name} ({fault})") from fault
        paths = [path for path in found if path is not None]
        if len(paths) < len(found):
            missing = ", ".join(name for name, path in zip(self.names, found, strict=True) if path is None)
            raise MissingDataError(
                f"{folder}: {f'lacks {missing}' if paths else 'holds none'} of {self.name}'s files "
                f"{', '.join(self.names)} (each as it is, or with .gz); data-dir should be a folder that holds them, "
                f"itself or in {' or '.join(self.folders)}"
            )
        parts = [(str(path), each.st_size, each.st_mtime_ns) for path, each in zip(paths, facts, strict=True)]
        return Origin(digest(parts), partial(self.read, paths, size))

    def read(self, paths: Sequence[Path], size: int) -> Content:
        train, test = self._split(*paths[:2]), self._split(*paths[2:])
        if train[0].shape[1:] != test[0].shape[1:]:
            shapes = " and ".join(f"{height} x {width}" for _, height, width in (train[0].shape, test[0].shape))
            raise DataError(f"{paths[0]}, {paths[2]}: images of {shapes} pixels; must be of the same size")
        grey = np.concatenate([train[0], test[0]])
        if self.transposed:
            grey = grey.transpose(0, 2, 1)
        images = np.broadcast_to(grey[:, None], (len(grey), 3, *grey.shape[1:]))  # copied block by block
        labels = np.concatenate([train[1], test[1]]).astype(np.int64) - self.first
        return Content(tuple(self.classes), labels, len(train[1]), resized(images, size))

    def _split(self, images_path: Path, labels_path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        count, height, width = images.shape
        if height != width:
            raise DataError(f"{images_path}: holds {count} images of {height} x {width} pixels; must hold square ones")
        if len(labels) != count:
            raise DataError(f"{labels_path}: holds {len(labels)} labels for {count} images; must hold as many")
        last = self.first + len(self.classes) - 1
        if not self.first <= labels.min() <= labels.max() <= last:
            raise DataError(f"{labels_path}: labels {labels.min()} to {labels.max()}; must be {self.first} to {last}")
        return images, labels


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)


def _named(before: str, test: str) -> tuple[str, str, str, str]:
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    train, held_out = ([f"{before}{split}-{kind}" for kind in kinds] for split in ("train", test))
    return train[0], train[1], held_out[0], held_out[1]


def find_mnist(config: DataConfig, size: int) -> Origin:
    """Find MNIST's four files in ``data-dir``, or where torchvision puts them."""
    return _Files("MNIST", _named("", "t10k"), ("MNIST/raw",), string.digits).find(config, size)


def find_emnist(config: DataConfig, size: int) -> Origin:
    """Find the four files of one of EMNIST's splits (``emnist-SPLIT``).

    They are looked for in ``data-dir``, in ``gzip/`` as NIST's archive has them, and where torchvision puts them.
    """
    split = config.dataset.removeprefix("emnist-")
    files = _Files(
        f"EMNIST {split}",
        _named(f"emnist-{split}-", "test"),
        ("EMNIST/raw", "gzip"),
        EMNIST[split],
        first=1 if split == "letters" else 0,
        transposed=True,
    )
    return files.find(config, size)
