"""What a reader returns, and what readers share.

A reader works in two steps. Finding the files is cheap and happens on every load; it yields a fingerprint that
names the prepared copy. The files are read only if there is no prepared copy yet.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedkace_flwr.data.images import Framing, FramingOf, scaled
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.storage.folders import absolute

BLOCK = 128
"""Images that are decoded, resized and written at a time: 19 MB at 224 pixels."""


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
    """Files that were found.

    Attributes
    ----------
    fingerprint : str
        Changes with the files; a part of the prepared copy's name.
    read : callable
        Reads them.
    remote : str
        What reading downloads, in words, if the files are not on this machine.
    """

    fingerprint: str
    read: Callable[[], Content]
    remote: str = ""


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


def resized(images: NDArray[np.uint8], size: int) -> Iterator[NDArray[np.uint8]]:
    """Scale square images, uint8 (N, 3, H, H), to (N, 3, size, size), block by block."""
    for start in range(0, len(images), BLOCK):
        block = np.ascontiguousarray(images[start : start + BLOCK])
        yield scaled(torch.from_numpy(block), size).numpy()


def data_dir(config: DataConfig) -> Path:
    """Return the folder with the original files, as an absolute path."""
    return absolute(config.data_dir, "data-dir")


def digest(*parts: object) -> str:
    """Return a fingerprint, of 16 hexadecimal digits, of what identifies a data set's files."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
