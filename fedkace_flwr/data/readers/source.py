"""What a reader returns, and what readers share.

A reader works in two steps. Finding the files is cheap and happens on every load; it yields a fingerprint that
names the prepared copy. The files are read only if there is no prepared copy yet.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import torch
from numpy.typing import NDArray

from fedkace_flwr.data.images import Framing, FramingOf, scaled
from fedkace_flwr.errors import ConfigError, DataError, FedkaceError
from fedkace_flwr.keys import is_plain_name
from fedkace_flwr.samples import Form
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.storage.folders import absolute

BLOCK = 128
"""Images that are decoded, resized and written at a time: 19 MB at 224 pixels."""


@dataclass(frozen=True)
class Content:
    """The samples of a data set, ready to be streamed.

    Attributes
    ----------
    class_names : tuple of str
        All classes, in the order of their labels.
    labels : ndarray
        int64, shape (N,): the training split, then the test split.
    train_size : int
        Length of the training split; N if there is no test split, which ``test-share`` then draws.
    blocks : iterator of ndarray
        The N samples, in the order of ``labels``: pictures, uint8 (n, 3, H, W) each, or finite arrays, float32 (n, ...).
    """

    class_names: tuple[str, ...]
    labels: NDArray[np.int64]
    train_size: int
    blocks: Iterator[NDArray[Any]]


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
    shape : tuple of int
        Of each sample, if samples are arrays and not pictures.
    """

    fingerprint: str
    read: Callable[[], Content]
    remote: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """A kind of data set.

    Attributes
    ----------
    classes : int or None
        Number of classes; None if it depends on the files.
    image_size : int
        The data set's own image size, in pixels; 0 if samples are arrays, whose shape the origin then tells.
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


@contextmanager
def _faults_of(name: str) -> Iterator[None]:
    """Name the data set, in one line, in whatever its reader raises, which may be another package's code.

    Raises
    ------
    DataError
        The block has raised something else than an error of this package.
    """
    try:
        yield
    except FedkaceError:
        raise
    except Exception as fault:
        raise DataError(f"dataset = {name!r}: its files cannot be read ({type(fault).__name__}: {fault})") from fault


def found(name: str, source: Source, config: DataConfig, size: int) -> Origin:
    """Find a data set's files.

    Raises
    ------
    FedkaceError
        They are missing or not as expected, or the reader fails.
    """
    with _faults_of(name):
        origin = source.find(config, size)
        if not is_plain_name(origin.fingerprint):
            raise DataError(
                f"dataset = {name!r}: gives the fingerprint {origin.fingerprint!r:.100}; must be a text that can be a "
                "part of a file's name"
            )
        if not source.image_size and not (
            isinstance(origin.shape, tuple) and origin.shape and all(type(n) is int and n > 0 for n in origin.shape)
        ):
            raise DataError(
                f"dataset = {name!r}: gives the shape {origin.shape!r:.100}; must be the lengths of an array, all above 0"
            )
    return origin


def form_of(origin: Origin, source: Source, size: int) -> Form:
    """What each sample is: a picture of ``size`` pixels, or an array of the shape that was found."""
    return Form.picture(size) if source.image_size else Form.array(*origin.shape)


def checked(name: str, origin: Origin, form: Form) -> Content:
    """Read a data set, and check all that the reader gives: labels and names now, samples block by block.

    Parameters
    ----------
    name : str
        The data set's, for messages.
    origin : Origin
        Reads it.
    form : Form
        What each sample must be; nothing is converted, but for class names to Unicode's composed form (NFC).

    Raises
    ------
    DataError
        Labels, names or splits are not as :class:`Content` has them, or the reader fails. The blocks raise it if their
        samples are of another form, or not as many as there are labels.
    """
    with _faults_of(name):
        content = origin.read()
        if wrong := _wrong(content):
            raise DataError(f"dataset = {name!r}: {wrong}")
        names = tuple(normalize("NFC", each) for each in content.class_names)
        blocks = _checked(name, iter(content.blocks), len(content.labels), form)
    return Content(names, content.labels, int(content.train_size), blocks)


def _wrong(content: Content) -> str:
    """What is wrong with labels, names and splits, and what would be right; empty if nothing is."""
    names, labels, train = content.class_names, content.labels, content.train_size
    if not isinstance(labels, np.ndarray) or labels.dtype != np.int64 or labels.ndim != 1:
        return f"its labels are {_described(labels)}; must be int64 of shape (N,)"
    if not isinstance(train, int | np.integer) or not 0 < train <= len(labels):
        return f"train_size = {train} of {len(labels)} samples; some must be for training, and all if there is no test split"
    texts = not isinstance(names, str) and all(isinstance(each, str) for each in names)
    if not texts or len({normalize("NFC", each) for each in names}) < len(names):
        return f"it has the class names {names!r:.200}; must be different texts"
    low, high = labels.min(), labels.max()
    if not 0 <= low <= high < len(names):
        return (
            f"it has labels {low} to {high}; must be 0 to {len(names) - 1}, the places of its {len(names)} class names"
        )
    return ""


def _checked(name: str, blocks: Iterator[Any], labels: int, form: Form) -> Iterator[NDArray[Any]]:
    samples = 0
    while True:
        with _faults_of(name):
            block = next(blocks, None)
        if block is None:
            break
        if not isinstance(block, np.ndarray) or block.dtype != form.dtype or block.shape[1:] != form.shape:
            wanted = ", ".join(map(str, form.shape))
            raise DataError(
                f"dataset = {name!r}: its samples are {_described(block)}; must be {form.dtype} of shape (n, {wanted})"
            )
        if not form.is_picture and not bool(np.isfinite(block).all()):
            row = samples + int(np.isfinite(block.reshape(len(block), -1)).all(axis=1).argmin())
            raise DataError(f"dataset = {name!r}: sample {row} holds a value that is not finite")
        samples += len(block)
        if samples > labels:
            raise DataError(f"dataset = {name!r}: has more than {labels} samples for {labels} labels")
        yield block
    if samples < labels:
        raise DataError(f"dataset = {name!r}: has {samples} samples for {labels} labels; must be as many")


def _described(value: object) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def check_num_classes(config: DataConfig, classes: int) -> None:
    """Raise :class:`ConfigError` if ``config`` keeps more classes than the data set has."""
    if config.first_class + config.num_classes > classes:
        first = f"first-class = {config.first_class} with " if config.first_class else ""
        raise ConfigError(f"{first}num-classes = {config.num_classes}: data set {config.dataset} has {classes} classes")


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
