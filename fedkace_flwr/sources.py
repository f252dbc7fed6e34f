"""Sources of a client's samples: a stream of a data set (simulation), or an inbox (device)."""

import logging
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedkace_flwr.data import inbox_files as arrivals
from fedkace_flwr.data.inbox import Inbox, waiting
from fedkace_flwr.data.picture_process import PictureProcess
from fedkace_flwr.errors import DataError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.folders import OpenFolder

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Training and test samples of one client."""

    def none(self) -> Samples:
        """No samples, held in the same way as this source's."""
        ...

    def chunk(self, number: int, learned: int) -> Samples:
        """The chunk D_t of a round, from 1; ``learned`` is the last round in the client's state."""
        ...

    def learned(self, number: int) -> None:
        """Acknowledge that a round's outcome is on disk."""
        ...

    def waiting(self) -> int | None:
        """Number of labelled samples that wait for the next round, as far as it could take them; None if nobody knows."""
        ...

    def test_set(self, seen: Tensor) -> Samples:
        """Test samples of the classes seen, bool (C,); none without a test set."""
        ...


class StreamSource:
    """A client's chunks as :mod:`fedkace_flwr.data.stream` draws them, by id into the data set.

    Parameters
    ----------
    experiment : Experiment
        Data set and streams.
    client : int
        The client's number k.
    """

    def __init__(self, experiment: Experiment, client: int) -> None:
        self._experiment = experiment
        self._client = client

    def none(self) -> Samples:
        """No samples, by id."""
        return Samples.none()

    def chunk(self, number: int, learned: int) -> Samples:
        """The chunk of a round; a stream can give every chunk again."""
        return self._experiment.chunk(self._client, number)

    def learned(self, number: int) -> None:
        """Do nothing: a stream has no files to put away."""

    def waiting(self) -> None:
        """Nothing is known of a stream."""

    def test_set(self, seen: Tensor) -> Samples:
        """The client's test images of the classes seen."""
        return self._experiment.test_set(self._client, seen)


class InboxSource:
    """A device's chunks as they arrive, by pixel.

    Parameters
    ----------
    experiment : Experiment
        Agreed classes, image size, and limits of the inbox.
    folder : Path
        The inbox.
    run : str
        The run that learns.
    test_folder : Path, optional
        Labelled test images, in files like those of the inbox; without it no accuracy is reported.

    Raises
    ------
    DataError
        The inbox cannot be used.
    """

    def __init__(self, experiment: Experiment, folder: Path, run: str, test_folder: Path | None = None) -> None:
        settings, dataset = experiment.config.data, experiment.dataset
        self._names, self._size = dataset.class_names, dataset.image_size
        keep = settings.inbox_after == "keep"
        self._inbox = Inbox(folder, run, self._names, self._size, bound=settings.inbox_bound, keep=keep)
        self._test_folder = test_folder
        self._bound = settings.inbox_bound

    def none(self) -> Samples:
        """No samples, by pixel."""
        return Samples.none((3, self._size, self._size))

    def chunk(self, number: int, learned: int) -> Samples:
        """The samples that have arrived; see :meth:`Inbox.take`."""
        images, labels = self._inbox.take(number, learned)
        return Samples.arrived(torch.from_numpy(images), torch.from_numpy(labels), number)

    def learned(self, number: int) -> None:
        """Mark the round's files as learned."""
        self._inbox.learned(number)

    def waiting(self) -> int:
        """Number of labelled samples that wait, counted up to ``inbox-bound``."""
        return waiting(self._inbox.folder, self._bound)

    def test_set(self, seen: Tensor) -> Samples:
        """The test folder's images of the classes seen; none, with a warning, if the folder cannot be read."""
        if self._test_folder is None:
            return self.none()
        try:
            images, labels = read_folder(self._test_folder, self._names, self._size)
        except DataError as fault:  # what cannot be measured can be learned nevertheless
            logger.warning("%s; nothing is tested", fault)
            return self.none()
        samples = Samples.arrived(torch.from_numpy(images), torch.from_numpy(labels), 0)
        return samples.take(seen[samples.labels].nonzero().squeeze(1))


def read_folder(folder: Path, class_names: tuple[str, ...], image_size: int) -> arrivals.Arrived:
    """All samples of a folder with files like those of an inbox; uint8 (n, 3, S, S) and int64 (n,).

    Files that an inbox would reject are left out, with a warning that counts them.

    Raises
    ------
    DataError
        The folder cannot be read, or the process that decodes pictures does not work.
    """
    images, labels = [np.empty((0, 3, image_size, image_size), dtype=np.uint8)], [np.empty(0, dtype=np.int64)]
    faults: list[str] = []
    try:
        with OpenFolder.at(folder) as opened, PictureProcess() as decoder:
            for arrival in arrivals.listing(opened):
                try:
                    more = arrivals.read(arrival, class_names, image_size, decoder.square)
                except (DataError, OSError) as fault:
                    if isinstance(fault, OSError) and arrivals.concerns_all(fault):
                        raise
                    faults.append(str(fault))
                    continue
                images.append(more[0])
                labels.append(more[1])
    except OSError as fault:
        raise DataError(f"test = {folder}: {fault}") from fault
    if faults:
        logger.warning("test = %s: %d files cannot be tested on and are left out: %s", folder, len(faults), faults[0])
    return np.concatenate(images), np.concatenate(labels)
