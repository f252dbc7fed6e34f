"""Readers of original image files, used by :mod:`fedkace_flwr.data.datasets`.

A reader works in two steps. Finding the files is cheap and happens on every load; it yields a fingerprint that
names the prepared copy. The files are read only if there is no prepared copy yet.

The fingerprint of an image folder covers the resolved path and every image's name, size and modification time. This
takes one ``stat`` per file: on a local disk 0.9 s for the 130,000 images of ImageNet100. Contents are not read, so
replacing a file by one of the same size and time goes unnoticed.
"""

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.data.images import Framing, FramingOf, scaled
from fedkace_flwr.errors import ConfigError, DataError, MissingDataError
from fedkace_flwr.sections import DataConfig

logger = logging.getLogger(__name__)

_BLOCK = 128  # images decoded, resized and written at a time: 19 MB at 224 pixels
_JPEG = (".jpeg", ".jpg")
PICTURES = (*_JPEG, ".bmp", ".gif", ".png", ".ppm", ".tif", ".tiff", ".webp")
_CIFAR = ("meta", "test", "train")
CIFAR100_FOLDER = "cifar-100-python"
_IMAGENET_LAYOUT = "ILSVRC2012's train/<synset>/*.JPEG"
_FOLDER_LAYOUT = "train/<class>/<image> and val/<class>/<image> (or test/)"

_Listing = Mapping[str, Sequence[tuple[str, int, int]]]  # class -> (file name, size, modification time), sorted


@dataclass(frozen=True)
class Content:
    """The images of a data set, ready to be streamed.

    Attributes
    ----------
    class_names : tuple of str
        All classes, in the order of their labels.
    labels : ndarray
        int64, shape (N,): the training split, then the test split.
    train_size : int
        Length of the training split.
    blocks : iterator of ndarray
        uint8, shape (n, 3, H, W) each; together the N images, in the order of ``labels``.
    """

    class_names: tuple[str, ...]
    labels: NDArray[np.int64]
    train_size: int
    blocks: Iterator[NDArray[np.uint8]]


@dataclass(frozen=True)
class Origin:
    """Files that were found: their fingerprint, and how to read them."""

    fingerprint: str
    read: Callable[[], Content]


@dataclass(frozen=True)
class Source:
    """A kind of data set.

    Attributes
    ----------
    classes : int or None
        Number of classes; None if it depends on the files.
    image_size : int
        The data set's own image size, in pixels.
    find : callable
        Called with the configuration and the wanted image size; raises :class:`DataError` if files are missing or
        not as expected.
    framing : callable
        Called with the wanted image size; returns how pictures become squares of that size.
    mirrors : bool
        Whether a mirrored image still shows its class, so that ``augment = auto`` may mirror it.
    downloaded : str
        Folder in ``data-dir`` that is downloaded if it does not exist; empty if nothing is downloaded.
    """

    classes: int | None
    image_size: int
    find: Callable[[DataConfig, int], Origin]
    framing: FramingOf = Framing.of_arrays
    mirrors: bool = False
    downloaded: str = ""


def check_num_classes(config: DataConfig, classes: int) -> None:
    """Raise :class:`ConfigError` if ``config`` keeps more classes than the data set has."""
    if config.num_classes > classes:
        raise ConfigError(f"num-classes = {config.num_classes}: data set {config.dataset} has {classes} classes")


# --- digits ------------------------------------------------------------------------------------------------------


def find_digits(config: DataConfig, size: int) -> Origin:
    """scikit-learn's 1797 scanned digits of 8x8 pixels, with three equal channels.

    There is no official split: every fifth image of each class, in the data set's order, is a test image.
    """
    return Origin(_digest("bundled with scikit-learn"), partial(_read_digits, size))


def _read_digits(size: int) -> Content:
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[:, None], 3, axis=1)
    labels = np.asarray(digits.target, dtype=np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    order = np.argsort(test, kind="stable")
    return Content(
        class_names=tuple(str(name) for name in digits.target_names),
        labels=labels[order],
        train_size=int((~test).sum()),
        blocks=_resized(images[order], size),
    )


# --- CIFAR-100 ---------------------------------------------------------------------------------------------------


def find_cifar100(config: DataConfig, size: int) -> Origin:
    """The official CIFAR-100 files in ``data-dir``, downloaded if their folder does not exist."""
    folder = _data_dir(config) / CIFAR100_FOLDER
    if not folder.exists():
        _download_cifar100(folder)
    try:
        sizes = [(folder / name).stat().st_size for name in _CIFAR]
    except OSError as fault:
        raise _damaged_cifar100(folder, fault) from fault
    return Origin(_digest(str(folder), sizes), partial(_read_cifar100, folder, size))


def _read_cifar100(folder: Path, size: int) -> Content:
    cifar100 = import_torchvision().datasets.CIFAR100
    try:  # torchvision verifies the official checksums before it unpickles anything
        train, test = (cifar100(folder.parent, train=split, download=False) for split in (True, False))
    except (OSError, RuntimeError) as fault:
        raise _damaged_cifar100(folder, fault) from fault
    images = np.concatenate([train.data, test.data]).transpose(0, 3, 1, 2)
    return Content(
        class_names=tuple(train.classes),
        labels=np.asarray(train.targets + test.targets, dtype=np.int64),
        train_size=len(train.targets),
        blocks=_resized(images, size),
    )


def _damaged_cifar100(folder: Path, fault: Exception) -> DataError:
    return DataError(
        f"{folder}: should hold the official CIFAR-100 files train, test and meta, but one is missing or damaged "
        f"({fault}); put them there, or remove the folder to have them downloaded"
    )


def _download_cifar100(folder: Path) -> None:
    # Unpacked into a temporary folder and then moved, so that the folder is either absent or complete.
    cifar100 = import_torchvision().datasets.CIFAR100
    new, lock = not folder.parent.exists(), folder.parent / f".{folder.name}.lock"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if folder.exists():
                return
            logger.info("downloading CIFAR-100 to %s", folder)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as aside:
                cifar100(aside, download=True)
                os.replace(Path(aside, folder.name), folder)
    except (OSError, RuntimeError, HTTPException) as fault:
        if new:  # leave no empty folder behind
            with suppress(OSError):
                lock.unlink(missing_ok=True)
                folder.parent.rmdir()
        raise MissingDataError(
            f"{folder}: CIFAR-100 is missing and could not be downloaded ({fault}); data-dir should be the folder "
            f"that holds {folder.name}/ with the official files train, test and meta, or a writable folder"
        ) from fault


# --- image folders -----------------------------------------------------------------------------------------------


def find_imagenet100(config: DataConfig, size: int) -> Origin:
    """The first 100 synsets of ILSVRC2012's training images, 1000 images of each for training and 300 for testing.

    A synset with fewer than 1300 images is split in the same proportion, with a warning. With ``num-classes``, only
    that many synsets must exist, and only those are prepared.
    """
    root = _data_dir(config)
    root = root / "train" if (root / "train").is_dir() else root
    wanted = config.num_classes or 100
    synsets = [name for name in _folders(root, _IMAGENET_LAYOUT) if re.fullmatch(r"n\d+", name)][:wanted]
    if len(synsets) < wanted:
        raise MissingDataError(
            f"{root}: {len(synsets)} synset folders, expected {wanted}; data-dir should hold {_IMAGENET_LAYOUT}"
        )
    listing = {synset: _pictures(root / synset, _JPEG, at_least=2) for synset in synsets}
    return Origin(_digest(str(root), listing), partial(_read_imagenet100, root, listing, size))


def _read_imagenet100(root: Path, listing: _Listing, size: int) -> Content:
    train: list[tuple[int, Path]] = []
    test: list[tuple[int, Path]] = []
    small: list[str] = []
    for label, (synset, files) in enumerate(listing.items()):
        cut = 1000
        if len(files) < 1300:
            cut = min(max(round(len(files) * 10 / 13), 1), len(files) - 1)
            small.append(f"{synset} ({len(files)})")
        paths = [(label, root / synset / name) for name, _, _ in files[:1300]]
        train += paths[:cut]
        test += paths[cut:]
    if small:
        logger.warning("imagenet100: fewer than 1300 images, still split 10 to 3: %s", ", ".join(small))
    return _pictured(tuple(listing), train, test, imagenet_framing(size))


def imagenet_framing(size: int) -> Framing:
    """The usual framing: a centre crop of 224 out of 256 pixels."""
    return Framing.of_files(size, round(size * 256 / 224))


def find_folder(config: DataConfig, size: int) -> Origin:
    """Any images sorted into ``train/<class>/`` and ``val/<class>/`` (or ``test/<class>/``) in ``data-dir``."""
    root = _data_dir(config)
    train = root / "train"
    held_out = root / "val" if (root / "val").is_dir() else root / "test"
    names, others = _folders(train, _FOLDER_LAYOUT), _folders(held_out, _FOLDER_LAYOUT)
    if not names:
        raise MissingDataError(f"{train}: no class folders; data-dir should hold {_FOLDER_LAYOUT}")
    if names != others:
        sides = ((held_out, set(names) - set(others)), (train, set(others) - set(names)))
        lacks = "; ".join(f"{where} lacks {', '.join(sorted(missing))}" for where, missing in sides if missing)
        raise DataError(f"{lacks}: both need the same class folders")
    check_num_classes(config, len(names))
    listings = [{name: _pictures(split / name, PICTURES) for name in names} for split in (train, held_out)]
    return Origin(_digest(str(root), held_out.name, listings), partial(_read_folder, (train, held_out), listings, size))


def _read_folder(splits: tuple[Path, Path], listings: Sequence[_Listing], size: int) -> Content:
    train, test = (
        [(label, split / name / file) for label, name in enumerate(listing) for file, _, _ in listing[name]]
        for split, listing in zip(splits, listings, strict=True)
    )
    return _pictured(tuple(listings[0]), train, test, Framing.of_files(size))


def _pictured(
    names: tuple[str, ...], train: list[tuple[int, Path]], test: list[tuple[int, Path]], framing: Framing
) -> Content:
    both = train + test
    labels = np.array([label for label, _ in both], dtype=np.int64)
    return Content(names, labels, len(train), _decoded([path for _, path in both], framing))


def _decoded(paths: Sequence[Path], framing: Framing) -> Iterator[NDArray[np.uint8]]:
    # Threads suffice: Pillow decodes and resizes without holding the interpreter lock.
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(paths), _BLOCK):
            decode = partial(_decode, framing=framing)
            yield np.stack(list(pool.map(decode, paths[start : start + _BLOCK])))


def _decode(path: Path, *, framing: Framing) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(path) as file:
            picture = file.convert("RGB")  # ImageNet also holds greyscale and CMYK files
    except Exception as fault:  # on damaged files, decoders raise anything from SyntaxError to struct.error
        raise DataError(f"{path}: damaged or not an image ({fault}); restore or remove it") from fault
    return framing.square(picture)


# --- shared ------------------------------------------------------------------------------------------------------


def _resized(images: NDArray[np.uint8], size: int) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, len(images), _BLOCK):
        block = np.ascontiguousarray(images[start : start + _BLOCK])
        yield scaled(torch.from_numpy(block), size).numpy()


def _data_dir(config: DataConfig) -> Path:
    return Path(config.data_dir).expanduser().resolve()


def _folders(root: Path, layout: str) -> list[str]:
    """Sorted names of the folders in ``root``; errors say that ``data-dir`` should hold ``layout``."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as fault:
        kind = MissingDataError if isinstance(fault, FileNotFoundError | NotADirectoryError) else DataError
        raise kind(f"{root}: cannot be read ({fault.strerror}); data-dir should hold {layout}") from fault


def _pictures(folder: Path, suffixes: tuple[str, ...], at_least: int = 1) -> list[tuple[str, int, int]]:
    """Name, size and modification time of the images in ``folder``, sorted by name."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.lower().endswith(suffixes) and not entry.name.startswith("."):
                    facts = entry.stat()
                    found.append((entry.name, facts.st_size, facts.st_mtime_ns))
    except OSError as fault:
        raise DataError(f"{folder}: cannot be read ({fault})") from fault
    if len(found) < at_least:
        raise DataError(f"{folder}: {len(found)} images ({', '.join(suffixes)}), expected at least {at_least}")
    return sorted(found)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
