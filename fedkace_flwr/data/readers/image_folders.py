"""Data sets of image files: ImageNet-100, and folders of the user's own.

The fingerprint of an image folder covers how pictures are read, the resolved path, and every image's name, size and
modification time. This takes one ``stat`` per file: on a local disk 0.9 s for the 130,000 images of ImageNet100.
Contents are not read, so replacing a file by one of the same size and time goes unnoticed.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data import pixels
from fedkace_flwr.data.images import Framing
from fedkace_flwr.data.readers.source import BLOCK, Content, Origin, check_num_classes, data_dir, digest
from fedkace_flwr.errors import DataError, MissingDataError
from fedkace_flwr.sections import DataConfig

logger = logging.getLogger(__name__)

_JPEG = (".jpeg", ".jpg")
_PICTURES = (*_JPEG, ".bmp", ".gif", ".png", ".ppm", ".tif", ".tiff", ".webp")
_IMAGENET_LAYOUT = "ILSVRC2012's train/<synset>/*.JPEG"
_FOLDER_LAYOUT = "train/<class>/<image> and val/<class>/<image> (or test/)"

_Listing = Mapping[str, Sequence[tuple[str, int, int]]]  # class -> (file name, size, modification time), sorted


def find_imagenet100(config: DataConfig, size: int) -> Origin:
    """The first 100 synsets of ILSVRC2012's training images, 1000 images of each for training and 300 for testing.

    A synset with fewer than 1300 images is split in the same proportion, with a warning. With ``num-classes``, only
    that many synsets must exist, and only those are prepared.
    """
    root = data_dir(config)
    root = root / "train" if (root / "train").is_dir() else root
    wanted = config.num_classes or 100
    synsets = [name for name in _folders(root, _IMAGENET_LAYOUT) if re.fullmatch(r"n\d+", name)][:wanted]
    if len(synsets) < wanted:
        raise MissingDataError(
            f"{root}: {len(synsets)} synset folders, expected {wanted}; data-dir should hold {_IMAGENET_LAYOUT}"
        )
    listing = {synset: _pictures(root / synset, _JPEG, at_least=2) for synset in synsets}
    return Origin(digest(pixels.READING, str(root), listing), partial(_read_imagenet100, root, listing, size))


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
    root = data_dir(config)
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
    listings = [{name: _pictures(split / name, _PICTURES) for name in names} for split in (train, held_out)]
    found = digest(pixels.READING, str(root), held_out.name, listings)
    return Origin(found, partial(_read_folder, (train, held_out), listings, size))


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
        for start in range(0, len(paths), BLOCK):
            decode = partial(_decode, framing=framing)
            yield np.stack(list(pool.map(decode, paths[start : start + BLOCK])))


def _decode(path: Path, *, framing: Framing) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(path) as file:
            picture = pixels.as_viewed(file)  # ImageNet also holds greyscale and CMYK files
    except DataError as fault:
        raise DataError(f"{path}: {fault}; convert or remove it") from fault
    except Exception as fault:  # on damaged files, decoders raise anything from SyntaxError to struct.error
        raise DataError(f"{path}: damaged or not an image ({fault}); restore or remove it") from fault
    return framing.square(picture)


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
