"""CIFAR-100, from its official files."""

import logging
import os
import tempfile
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path

import numpy as np
from filelock import FileLock

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.data.readers.source import Content, Origin, data_dir, digest, resized
from fedkace_flwr.errors import DataError, MissingDataError
from fedkace_flwr.sections import DataConfig

logger = logging.getLogger(__name__)

_CIFAR = ("meta", "test", "train")
CIFAR100_FOLDER = "cifar-100-python"


def find_cifar100(config: DataConfig, size: int) -> Origin:
    """The official CIFAR-100 files in ``data-dir``, downloaded if their folder does not exist."""
    folder = data_dir(config) / CIFAR100_FOLDER
    if not folder.exists():
        _download_cifar100(folder)
    try:
        sizes = [(folder / name).stat().st_size for name in _CIFAR]
    except OSError as fault:
        raise _damaged_cifar100(folder, fault) from fault
    return Origin(digest(str(folder), sizes), partial(_read_cifar100, folder, size))


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
        blocks=resized(images, size),
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
