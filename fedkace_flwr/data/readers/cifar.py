"""CIFAR-10 and CIFAR-100, from their official files."""

import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.data.readers.source import Content, Origin, data_dir, digest, resized
from fedkace_flwr.errors import DataError, MissingDataError
from fedkace_flwr.sections import DataConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cifar:
    """One of the two data sets.

    Attributes
    ----------
    name : str
        As it is written; without the hyphen, the name of torchvision's class.
    folder : str
        Folder in ``data-dir``, as the official archive unpacks to.
    files : tuple of str
        The official files in it.
    """

    name: str
    folder: str
    files: tuple[str, ...]

    def find(self, config: DataConfig, size: int) -> Origin:
        """Find the official files in ``data-dir``; they are downloaded if their folder does not exist."""
        folder = data_dir(config) / self.folder
        if not folder.exists():
            self._download(folder)
        try:
            sizes = [(folder / name).stat().st_size for name in sorted(self.files)]
        except OSError as fault:
            raise self._damaged(folder, fault) from fault
        return Origin(digest(str(folder), sizes), partial(self._read, folder, size))

    def _read(self, folder: Path, size: int) -> Content:
        try:  # torchvision verifies the official checksums before it unpickles anything
            train, test = (self._torchvision(folder.parent, train=split, download=False) for split in (True, False))
        except (OSError, RuntimeError) as fault:
            raise self._damaged(folder, fault) from fault
        images = np.concatenate([train.data, test.data]).transpose(0, 3, 1, 2)
        return Content(
            class_names=tuple(train.classes),
            labels=np.asarray(train.targets + test.targets, dtype=np.int64),
            train_size=len(train.targets),
            blocks=resized(images, size),
        )

    def _download(self, folder: Path) -> None:
        # Unpacked into a temporary folder and then moved, so that the folder is either absent or complete.
        new, lock = not folder.parent.exists(), folder.parent / f".{folder.name}.lock"
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):
                if folder.exists():
                    return
                logger.info("downloading %s to %s", self.name, folder)
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as aside:
                    self._torchvision(aside, download=True)
                    os.replace(Path(aside, folder.name), folder)
        except (OSError, RuntimeError, HTTPException) as fault:
            if new:  # leave no empty folder behind
                with suppress(OSError):
                    lock.unlink(missing_ok=True)
                    folder.parent.rmdir()
            raise MissingDataError(
                f"{folder}: {self.name} is missing and could not be downloaded ({fault}); data-dir should be the folder "
                f"that holds {folder.name}/ with the official files {self._listed}, or a writable folder"
            ) from fault

    def _torchvision(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_torchvision().datasets, self.name.replace("-", ""))(*args, **kwargs)

    @property
    def _listed(self) -> str:
        return f"{', '.join(self.files[:-1])} and {self.files[-1]}"

    def _damaged(self, folder: Path, fault: Exception) -> DataError:
        return DataError(
            f"{folder}: should hold the official {self.name} files {self._listed}, but one is missing or damaged "
            f"({fault}); put them there, or remove the folder to have them downloaded"
        )


CIFAR10 = Cifar(
    "CIFAR-10",
    "cifar-10-batches-py",
    (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
)
CIFAR100 = Cifar("CIFAR-100", "cifar-100-python", ("train", "test", "meta"))
