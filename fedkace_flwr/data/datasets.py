"""Data sets, each as one memory-mapped array.

The samples of a data set are read, pictures resized, and written to a cache folder once; every process then maps that array
instead of holding a copy. A cache folder is built under a temporary name and then renamed, so it is either complete
or absent; if it is damaged later, it is built again. :mod:`fedkace_flwr.data.readers` reads the original files.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray

from fedkace_flwr.data.readers.catalogue import form_asked, source_of
from fedkace_flwr.data.readers.source import BLOCK, Content, check_num_classes, checked, form_of, found
from fedkace_flwr.errors import DataError, MissingDataError
from fedkace_flwr.samples import Form
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.seeding import seed_for
from fedkace_flwr.storage.files import read_text, write_text
from fedkace_flwr.storage.folders import absolute

logger = logging.getLogger(__name__)

CACHE = "FEDKACE_CACHE_DIR"
"""Environment variable that names the folder of prepared data."""

_FORMAT = 1  # increase it whenever the same files would be prepared differently
_LEAST_CHANGE = 1e-6  # standard deviation, as a share of the mean
_IMAGES, _LABELS, _META = "images.npy", "labels.npy", "meta.json"

_Numbers = tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A prepared data set. A sample's id is its row number, whatever the number of classes kept.

    Attributes
    ----------
    name : str
        Name in :data:`DATASETS`.
    images : ndarray
        Samples, memory-mapped and read-only: pictures, uint8 (N, 3, H, W), or arrays, float32 (N, ...).
    labels : ndarray
        int64, shape (N,).
    held_out : ndarray
        bool, shape (N,): the test split: the last rows, or those that ``test-share`` has drawn.
    class_names : tuple of str
        The classes kept; labels below 0 and from ``num_classes`` on belong to classes that are not used.
    mean, std : tuple of float
        Over all prepared training samples: per channel of pictures scaled to [0, 1], or along an array's first dimension
        (per feature of a table, per channel of a series), where what never changes has 1 in place of its deviation.
    digest : str
        SHA-256 of images, labels and class names and of where the training split ends; empty without images.
    split_digest : str
        The same with the test split that ``test-share`` has drawn; empty if the data set has one of its own.
    """

    name: str
    images: NDArray[Any]
    labels: NDArray[np.int64]
    held_out: NDArray[np.bool_]
    class_names: tuple[str, ...]
    mean: _Numbers
    std: _Numbers
    digest: str = ""
    split_digest: str = ""

    @property
    def train_size(self) -> int:
        """Number of training samples."""
        return len(self.labels) - int(self.held_out.sum())

    @property
    def num_classes(self) -> int:
        """Number of classes kept."""
        return len(self.class_names)

    @property
    def image_size(self) -> int:
        """Height and width of pictures, in pixels."""
        return int(self.images.shape[-1])

    @property
    def form(self) -> Form:
        """What each sample is."""
        return Form(self.images.dtype, tuple(self.images.shape[1:]))

    def train_ids(self, label: int) -> NDArray[np.int64]:
        """Return the ids of a class in the training split, int64, ascending.

        Raises
        ------
        IndexError
            ``label`` is not one of the classes kept.
        """
        return self._ids(self._train_index, label)

    def test_ids(self, label: int) -> NDArray[np.int64]:
        """Return the ids of a class in the test split, int64, ascending.

        Raises
        ------
        IndexError
            ``label`` is not one of the classes kept.
        """
        return self._ids(self._test_index, label)

    def fetch(self, ids: torch.Tensor) -> torch.Tensor:
        """Return copies of the rows ``ids``.

        Parameters
        ----------
        ids : Tensor
            int64, shape (n,), on any device.

        Returns
        -------
        Tensor
            uint8 (n, 3, H, W) or float32 (n, ...), on the CPU.
        """
        return torch.from_numpy(np.asarray(self.images[ids.cpu().numpy()]))

    def _ids(self, index: list[NDArray[np.int64]], label: int) -> NDArray[np.int64]:
        if not 0 <= label < self.num_classes:
            raise IndexError(f"label {label}: {self.name} is loaded with classes 0 to {self.num_classes - 1}")
        return index[label].copy()

    @cached_property
    def _train_index(self) -> list[NDArray[np.int64]]:
        return _by_class(np.flatnonzero(~self.held_out), self.labels, self.num_classes)

    @cached_property
    def _test_index(self) -> list[NDArray[np.int64]]:
        return _by_class(np.flatnonzero(self.held_out), self.labels, self.num_classes)


def _by_class(ids: NDArray[np.int64], labels: NDArray[np.int64], classes: int) -> list[NDArray[np.int64]]:
    ids = ids[np.argsort(labels[ids], kind="stable")]  # stable: ascending ids within a class
    bounds = np.searchsorted(labels[ids], np.arange(classes + 1))
    return [ids[start:stop] for start, stop in pairwise(bounds)]


def load_dataset(config: DataConfig, seed: int = 0, *, progress: bool = False, download: bool = True) -> Dataset:
    """Open a data set; prepare it first if the cache has no usable copy.

    With ``dataset = inbox`` there is no data set to open: the result has the agreed classes and statistics, no samples;
    of pictures, mean 0.5 and standard deviation 0.25.

    Any number of processes may call this at once: one prepares the data set, the others wait. If files change, they
    are prepared again next to the old copy. The cache can be deleted at any time. One prepared copy serves all seeds and
    values of ``test-share``.

    Parameters
    ----------
    config : DataConfig
        Which data set, where its files and the cache are, the classes to keep and the image size.
    seed : int
        The experiment's, which draws the test split of a data set that has none.
    progress : bool
        Show a progress bar while preparing.
    download : bool
        Whether missing files may be downloaded.

    Returns
    -------
    Dataset
        With ``config.num_classes`` classes from ``config.first_class`` on, or all if the former is 0.

    Raises
    ------
    ConfigError
        The name is unknown, or more classes are wanted than the data set has.
    DataError
        Files are missing (MissingDataError) or damaged, or the cache folder cannot be used.
    """
    if config.arrives:
        return _agreed(config)
    name = config.source
    source = source_of(name)
    if source.classes is not None:
        check_num_classes(config, source.classes)
    size = config.image_size or source.image_size
    place = absolute(config.data_dir, "data-dir") / source.downloaded
    if source.downloaded and not download and not place.exists():
        raise MissingDataError(f"{place}: is missing; a run would download {name} there")
    origin = found(name, source, config, size)
    form = form_of(origin, source, size)
    cache = cache_dir()
    folder = cache / f"{name}-{size}-{origin.fingerprint}"
    try:
        dataset = _open(folder, name, form)  # without the lock: a finished cache may be on a read-only disk
        if dataset is None:
            if origin.remote and not download:
                raise MissingDataError(f"{origin.remote}: is not on this machine; a run would download it")
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f"{folder.name}.lock"):
                dataset = _open(folder, name, form)
                if dataset is None:
                    content = checked(name, origin, form)
                    dataset = _prepare(folder, name, content, form, progress)
        if not dataset.held_out.any():
            dataset = _split(dataset, config.test_share, seed, folder)
    except OSError as fault:
        raise DataError(f"{CACHE} = {cache}: cannot be used ({fault}); must be writable and have room") from fault
    check_num_classes(config, dataset.num_classes)
    first, names = config.first_class, dataset.class_names[config.first_class :]
    return replace(dataset, labels=dataset.labels - first, class_names=names[: config.num_classes or None])


def _agreed(config: DataConfig) -> Dataset:
    """A data set without samples for data from inboxes: what the configuration fixes."""
    form = form_asked(config)
    mean, std = ((0.5,) * 3, (0.25,) * 3) if form.is_picture else config.inbox_statistics_of(form.shape[0])
    none, unheld = np.empty((0, *form.shape), dtype=form.dtype), np.empty(0, dtype=np.bool_)
    return Dataset("inbox", none, np.empty(0, dtype=np.int64), unheld, config.named_classes(), mean, std)


def cache_dir() -> Path:
    """Folder of prepared data and cached references: ``$FEDKACE_CACHE_DIR``, else the user's cache."""
    return absolute(os.environ.get(CACHE) or "~/.cache/fedkace_flwr", f"the variable {CACHE}")


def _open(folder: Path, name: str, form: Form) -> Dataset | None:
    """Map a prepared data set; None if it does not exist or is damaged."""
    if not folder.exists():
        return None
    try:
        return _read(folder, name, form)
    except (FileNotFoundError, _DamagedError) as fault:
        logger.warning("%s is damaged (%s); it will be prepared again", folder, fault)
        return None


class _DamagedError(Exception):
    """A cache folder does not hold what was written to it."""


def _read(folder: Path, name: str, form: Form) -> Dataset:
    try:
        meta = json.loads(read_text(folder / _META))
        if meta["format"] != _FORMAT:
            raise ValueError(f"format {meta['format']}, expected {_FORMAT}")
        images = np.load(folder / _IMAGES, mmap_mode="r")
        labels = np.array(np.load(folder / _LABELS, mmap_mode="r"))  # mapped: of a false size, nothing is allocated
        expected = (meta["shape"][0], *form.shape)
        if (images.dtype, images.shape, tuple(meta["shape"])) != (form.dtype, expected, expected):
            raise ValueError(f"{_IMAGES}: {images.dtype} {images.shape}, expected {form.dtype} {expected}")
        if (size := (folder / _IMAGES).stat().st_size) != images.offset + images.nbytes:
            raise ValueError(f"{_IMAGES}: {size} bytes, expected {images.offset + images.nbytes}")
        names = tuple(str(each) for each in meta["class_names"])
        if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
            raise ValueError(f"{_LABELS}: {labels.dtype} {labels.shape}, expected int64 {images.shape[:1]}")
        if not 0 <= labels.min() <= labels.max() < len(names):
            raise ValueError(f"{_LABELS}: labels {labels.min()} to {labels.max()}, expected 0 to {len(names) - 1}")
        held_out = np.arange(len(labels)) >= int(meta["train_size"])
        mean, std = (_numbers(meta[each], form) for each in ("mean", "std"))
        return Dataset(name, images, labels, held_out, names, mean, std, str(meta["digest"]))
    except OSError:  # a matter of permissions or of the disk, not of damaged bytes: keep the folder
        raise
    except Exception as fault:  # parsers may raise anything on damaged bytes
        raise _DamagedError(str(fault)) from fault


def _numbers(values: list[float], form: Form) -> _Numbers:
    if len(values) != form.shape[0]:
        raise ValueError(f"{len(values)} statistics, expected {form.shape[0]}")
    return tuple(map(float, values))


def _split(whole: Dataset, share: float, seed: int, folder: Path) -> Dataset:
    """Hold out a share of each class, at least one sample, and leave at least one."""
    held_out = np.zeros(len(whole.labels), dtype=np.bool_)
    for label in range(whole.num_classes):
        ids = whole.train_ids(label)
        count = max(min(max(round(share * len(ids)), 1), len(ids) - 1), 0)
        held_out[np.random.default_rng(seed_for(seed, "test split", label)).permutation(ids)[:count]] = True
    digest = hashlib.sha256(whole.digest.encode() + np.packbits(held_out).tobytes()).hexdigest()
    mean, std = _known_statistics(folder / f"split-{digest[:16]}.json", whole, ~held_out)
    return replace(whole, held_out=held_out, split_digest=digest, mean=mean, std=std)


def _known_statistics(path: Path, whole: Dataset, chosen: NDArray[np.bool_]) -> tuple[_Numbers, _Numbers]:
    """Mean and standard deviation of the chosen samples, kept in a file, unless the disk is read-only."""
    form = whole.form
    try:
        stored = json.loads(read_text(path))
        return _numbers(stored["mean"], form), _numbers(stored["std"], form)
    except (OSError, RecursionError, ValueError, KeyError, TypeError):  # missing or damaged
        statistics = _PixelStatistics() if form.is_picture else _Statistics(form.shape[0])
        for start in range(0, len(whole.images), BLOCK):
            rows = slice(start, start + BLOCK)
            statistics.add(whole.images[rows][chosen[rows]])
    mean, std = statistics.result()
    with suppress(OSError):
        write_text(path, json.dumps({"mean": mean, "std": std}))
    return _numbers(mean, form), _numbers(std, form)


def _prepare(folder: Path, name: str, content: Content, form: Form, progress: bool) -> Dataset:
    """Build the cache folder under a temporary name and rename it; the caller holds the lock."""
    aside = folder.with_name(f"{folder.name}.partial")  # a fixed name, so that a killed process's leftover is removed
    for stale in (aside, folder):
        if stale.is_symlink():
            stale.unlink()
        elif stale.exists():
            shutil.rmtree(stale)
    aside.mkdir()
    try:
        shape = (len(content.labels), *form.shape)
        statistics = _PixelStatistics() if form.is_picture else _Statistics(form.shape[0])
        blocks = _shown(content, name, progress)
        hashed = _write_samples(aside / _IMAGES, content.train_size, form.dtype, shape, blocks, statistics)
        mean, std = statistics.result()
        hashed.update(content.labels.tobytes())
        hashed.update(json.dumps([content.train_size, list(content.class_names)]).encode())
        np.save(aside / _LABELS, content.labels)
        meta = {
            "format": _FORMAT,
            "class_names": content.class_names,
            "train_size": content.train_size,
            "mean": mean,
            "std": std,
            "shape": shape,
            "digest": hashed.hexdigest(),
        }
        (aside / _META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
        _sync(aside / _LABELS, aside / _META)
        os.replace(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    logger.info("prepared %s: %d samples in %s", name, len(content.labels), folder)
    return _read(folder, name, form)


class _PixelStatistics:
    """Mean and standard deviation of each channel of pictures; a histogram is exact for any number of them."""

    def __init__(self) -> None:
        self._counts = np.zeros((3, 256), dtype=np.int64)

    def add(self, block: NDArray[Any]) -> None:
        for channel, of_one in enumerate(np.moveaxis(block, 1, 0)):
            self._counts[channel] += np.bincount(of_one.reshape(-1), minlength=256)

    def result(self) -> tuple[list[float], list[float]]:
        scaled = np.arange(256) / 255
        shares = self._counts / self._counts.sum(axis=1, keepdims=True)
        mean = shares @ scaled
        std = np.sqrt((shares * (scaled - mean[:, None]) ** 2).sum(axis=1))
        return mean.tolist(), std.tolist()


class _Statistics:
    """Mean and standard deviation along the first dimension of arrays, joined block by block (Chan et al., 1983)."""

    def __init__(self, length: int) -> None:
        self._values, self._mean, self._squares = 0, np.zeros(length), np.zeros(length)

    def add(self, block: NDArray[Any]) -> None:
        rows = np.moveaxis(block.astype(np.float64), 1, 0).reshape(len(self._mean), -1)
        if not rows.shape[1]:
            return
        mean, values = rows.mean(axis=1), self._values + rows.shape[1]
        apart, share = mean - self._mean, rows.shape[1] / values
        self._squares += ((rows - mean[:, None]) ** 2).sum(axis=1) + apart**2 * self._values * share
        self._mean += apart * share
        self._values = values

    def result(self) -> tuple[list[float], list[float]]:
        std = np.sqrt(self._squares / self._values)
        changes = std > _LEAST_CHANGE * np.abs(self._mean)  # below it, float32 has nothing left to tell samples apart
        return self._mean.tolist(), np.where(changes, std, 1.0).tolist()


def _write_samples(
    path: Path,
    train_size: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    blocks: Iterator[NDArray[Any]],
    statistics: _PixelStatistics | _Statistics,
) -> "hashlib._Hash":
    """Stream the samples into an .npy file, and the training samples into the statistics; return the hash of all."""
    # Written as a plain file, not through a memory map: a full disk then raises an error instead of a bus error.
    rows, hashed = 0, hashlib.sha256()
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            values = np.ascontiguousarray(block).data
            file.write(values)
            hashed.update(values)
            statistics.add(block[: max(train_size - rows, 0)])
            rows += len(block)
        file.flush()
        os.fsync(file.fileno())
    return hashed


def _sync(*paths: Path) -> None:
    # Without this, a rename could survive a power cut that the file's content does not survive.
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _shown(content: Content, name: str, progress: bool) -> Iterator[NDArray[Any]]:
    if not progress:
        yield from content.blocks
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task(f"preparing {name}", total=len(content.labels))
        for block in content.blocks:
            yield block
            bar.advance(task, len(block))
