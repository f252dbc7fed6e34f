"""Data sets of image files: ImageNet-100, and folders of the user's own.

The fingerprint of an image folder covers how pictures are read, the resolved path, and every image's name, size and
modification time. This takes one ``stat`` per file: on a local disk 0.9 s for the 130,000 images of ImageNet100.
Contents are not read, so replacing a file by one of the same size and time goes unnoticed.

Pictures may lie in folders within that of their class. Hidden entries, and folders that systems and archivers leave
behind (:data:`_NOT_OURS`), do not count; all else that is not taken is named when the pictures are read.
"""

import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data import pixels
from fedkace_flwr.data.images import Framing
from fedkace_flwr.data.readers.source import BLOCK, Content, Origin, check_num_classes, data_dir, digest
from fedkace_flwr.errors import DataError, MissingDataError
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.storage.files import open_regular
from fedkace_flwr.storage.names import printable

logger = logging.getLogger(__name__)

_JPEG = (".jpeg", ".jpg", ".jfif", ".jpe")
_PICTURES = (*_JPEG, ".bmp", ".gif", ".png", ".ppm", ".tif", ".tiff", ".webp")
_IMAGENET_LAYOUT = "ILSVRC2012's train/<synset>/*.JPEG"
_FOLDER_LAYOUT = "train/<class>/<image> and perhaps test/<class>/<image> (or val/)"

_NOT_OURS = ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found")
_NAMED = 3  # of the files that are not taken

_now = threading.local()  # the picture that a thread decodes


@dataclass(frozen=True, order=True)
class _Picture:
    """An image file that was found.

    Attributes
    ----------
    name : str
        Its path within the folder of its class.
    size, changed : int
        Bytes, and modification time in nanoseconds.
    folder : Path
        The folder of its class.
    """

    name: str
    size: int
    changed: int
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / self.name


@dataclass(frozen=True)
class _Listing:
    """The pictures of each class, sorted by name, and what lies among them and is not taken."""

    pictures: Mapping[str, Sequence[_Picture]]
    others: Sequence[Path]

    @property
    def facts(self) -> dict[str, list[tuple[str, int, int]]]:
        """What identifies the pictures."""
        return {name: [(each.name, each.size, each.changed) for each in of] for name, of in self.pictures.items()}


def find_imagenet100(config: DataConfig, size: int) -> Origin:
    """The first 100 synsets of ILSVRC2012's training images, 1000 images of each for training and 300 for testing.

    A synset with fewer than 1300 images is split in the same proportion, with a warning. With ``num-classes``, only
    the synsets up to the last class used must exist, and only those are prepared.
    """
    root = data_dir(config)
    root = root / "train" if (root / "train").is_dir() else root
    wanted = config.first_class + config.num_classes or 100
    split = _split(root, _IMAGENET_LAYOUT)
    synsets = [name for name in split.folders if re.fullmatch(r"n\d+", name)][:wanted]
    if len(synsets) < wanted:
        raise MissingDataError(
            f"{root}: {len(synsets)} synset folders, expected {wanted}; data-dir should hold {_IMAGENET_LAYOUT}"
        )
    wanted_alone = _Split({synset: split.folders[synset] for synset in synsets}, split.others)
    listing = _listed(wanted_alone, _JPEG, at_least=2)
    return Origin(digest(pixels.READING, str(root), listing.facts), partial(_read_imagenet100, listing, size))


def _read_imagenet100(listing: _Listing, size: int) -> Content:
    _tell(listing)
    train: list[tuple[int, Path]] = []
    test: list[tuple[int, Path]] = []
    small: list[str] = []
    for label, (synset, files) in enumerate(listing.pictures.items()):
        cut = 1000
        if len(files) < 1300:
            cut = min(max(round(len(files) * 10 / 13), 1), len(files) - 1)
            small.append(f"{synset} ({len(files)})")
        paths = [(label, each.path) for each in files[:1300]]
        train += paths[:cut]
        test += paths[cut:]
    if small:
        logger.warning("imagenet100: fewer than 1300 images, still split 10 to 3: %s", ", ".join(small))
    return _pictured(tuple(listing.pictures), train, test, imagenet_framing(size))


def imagenet_framing(size: int) -> Framing:
    """The usual framing: a centre crop of 224 out of 256 pixels."""
    return Framing.of_files(size, round(size * 256 / 224))


def find_folder(config: DataConfig, size: int) -> Origin:
    """Any images sorted into ``train/<class>/`` and perhaps ``test/<class>/`` or ``val/<class>/`` in ``data-dir``.

    If both are there, ``test`` is taken, and a warning says so.
    """
    root = data_dir(config)
    train = root / "train"
    splits = [_split(train, _FOLDER_LAYOUT)]
    names = splits[0].folders
    if not names:
        raise MissingDataError(f"{train}: no class folders; data-dir should hold {_FOLDER_LAYOUT}")
    held_out = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    if held_out == root / "test" and (root / "val").is_dir():
        logger.warning("folder: %s is not used; its test images are those of test/", root / "val")
    if held_out is None:
        if unknown := _split(root, _FOLDER_LAYOUT).folders.keys() - {"train"}:
            raise DataError(
                f"{root}: has {', '.join(sorted(unknown))}; should hold {_FOLDER_LAYOUT}, and no other folder"
            )
    else:
        splits.append(_split(held_out, _FOLDER_LAYOUT))
        others = splits[1].folders
        if names.keys() != others.keys():
            sides = ((held_out, set(names) - set(others)), (train, set(others) - set(names)))
            lacks = "; ".join(f"{where} lacks {', '.join(sorted(missing))}" for where, missing in sides if missing)
            raise DataError(f"{lacks}: both need the same class folders")
    check_num_classes(config, len(names))
    listings = [_listed(split, _PICTURES, at_least=2 if held_out is None else 1) for split in splits]
    named = held_out.name if held_out is not None else ""
    found = digest(pixels.READING, str(root), named, [listing.facts for listing in listings])
    return Origin(found, partial(_read_folder, listings, size))


def _read_folder(listings: Sequence[_Listing], size: int) -> Content:
    _tell(*listings)
    train, *tests = (
        [(label, each.path) for label, files in enumerate(listing.pictures.values()) for each in files]
        for listing in listings
    )
    test = list(chain(*tests))
    foreign = sorted({path.suffix.lower() for _, path in train + test} - set(pixels.SUFFIXES))
    if foreign:
        logger.warning(
            "folder: trains on %s files, too; predictions and inboxes take %s alone",
            ", ".join(foreign),
            ", ".join(pixels.SUFFIXES),
        )
    return _pictured(tuple(listings[0].pictures), train, test, Framing.of_files(size))


def _tell(*listings: _Listing) -> None:
    """Count and name the files that are not taken."""
    others = [path for listing in listings for path in listing.others]
    if others:
        some = ", ".join(printable(str(path)) for path in others[:_NAMED]) + (", ..." if len(others) > _NAMED else "")
        logger.warning("left out: %d entries that are no image files (%s): %s", len(others), ", ".join(_PICTURES), some)


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
            with _warnings_named():
                block = np.stack(list(pool.map(decode, paths[start : start + BLOCK])))
            yield block


@contextmanager
def _warnings_named() -> Iterator[None]:
    """Log each of Pillow's warnings, which name no file, with the file that its thread decodes."""

    def told(message: Warning | str, *_: object, **__: object) -> None:
        logger.warning("%s: %s", getattr(_now, "path", "an image"), printable(str(message)))

    with warnings.catch_warnings():
        warnings.filterwarnings("always", module=r"PIL\b")
        warnings.showwarning = told
        yield


def _decode(path: Path, *, framing: Framing) -> NDArray[np.uint8]:
    from PIL import Image

    _now.path = path
    try:
        with os.fdopen(open_regular(path), "rb") as content, Image.open(content) as file:
            picture = pixels.as_viewed(file)  # ImageNet also holds greyscale and CMYK files
    except DataError as fault:
        raise DataError(f"{path}: {fault}; convert or remove it") from fault
    except Exception as fault:  # on damaged files, decoders raise anything from SyntaxError to struct.error
        raise DataError(f"{path}: damaged or not an image ({fault}); restore or remove it") from fault
    return framing.square(picture)


@dataclass(frozen=True)
class _Split:
    """The folders in a folder by their names in Unicode's composed form (NFC), sorted; what else lies there."""

    folders: Mapping[str, Sequence[Path]]
    others: Sequence[Path]


def _split(root: Path, layout: str) -> _Split:
    """Look into ``root``; errors say that ``data-dir`` should hold ``layout``."""
    try:
        with os.scandir(root) as entries:
            kinds = {entry.name: entry.is_dir() for entry in entries if _counts(entry.name)}
    except OSError as fault:
        kind = MissingDataError if isinstance(fault, FileNotFoundError | NotADirectoryError) else DataError
        raise kind(f"{root}: cannot be read ({fault.strerror}); data-dir should hold {layout}") from fault
    names = sorted(name for name, is_folder in kinds.items() if is_folder)
    if odd := next((name for name in names if name.encode(errors="ignore").decode() != name), None):
        raise DataError(f"{root}: the folder {printable(odd)} names a class; its name must be UTF-8")
    folders: dict[str, list[Path]] = {name: [] for name in sorted(normalize("NFC", name) for name in names)}
    for name in names:
        folders[normalize("NFC", name)].append(root / name)  # more than one only if both forms are there
    return _Split(folders, [root / name for name in kinds.keys() - set(names)])


def _counts(name: str) -> bool:
    return not name.startswith(".") and name not in _NOT_OURS


def _listed(split: _Split, suffixes: tuple[str, ...], at_least: int = 1) -> _Listing:
    """List the images in the folders of each class."""
    pictures: dict[str, list[_Picture]] = {}
    others = list(split.others)
    for name, places in split.folders.items():
        pictures[name] = []
        for place in places:
            _list(place, "", suffixes, pictures[name], others)
        if len(pictures[name]) < at_least:
            raise DataError(
                f"{places[0]}: {len(pictures[name])} images ({', '.join(suffixes)}), expected at least {at_least}"
            )
        pictures[name].sort()
    return _Listing(pictures, sorted(others))


def _list(folder: Path, within: str, suffixes: tuple[str, ...], pictures: list[_Picture], others: list[Path]) -> None:
    """Append the images below ``folder / within``, and what is neither an image nor a folder of some."""
    try:
        with os.scandir(folder / within) as entries:
            for entry in entries:
                name = f"{within}{os.sep}{entry.name}" if within else entry.name
                if not _counts(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    _list(folder, name, suffixes, pictures, others)
                elif (
                    entry.name.lower().endswith(suffixes) and entry.is_file()
                ):  # and no pipe, which would be waited for
                    facts = entry.stat()
                    pictures.append(_Picture(name, facts.st_size, facts.st_mtime_ns, folder))
                else:
                    others.append(folder / name)
    except OSError as fault:
        raise DataError(f"{folder / within}: cannot be read ({fault})") from fault
