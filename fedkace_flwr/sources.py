"""Sources of a client's samples: a stream of a data set (simulation), or an inbox (device)."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedkace_flwr.data import inbox_files as arrivals
from fedkace_flwr.data.inbox import Inbox, Strangers, waiting
from fedkace_flwr.data.picture_process import PictureProcess
from fedkace_flwr.errors import DataError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import MOST_NEW_CLASSES, AgreedClasses
from fedkace_flwr.samples import Form, Samples
from fedkace_flwr.storage.folders import OpenFolder

logger = logging.getLogger(__name__)


class Late(Protocol):
    """The samples of one client that wait for a label.

    Attributes
    ----------
    kept : int
        How many predictions are kept of samples that may still come with a label, beside those that wait here.
    """

    @property
    def kept(self) -> int:  # noqa: D102
        ...

    def keys(self, chunk: Samples) -> Tensor:
        """What tells the samples of the chunk that the source gave last from all others, int64 (n, k)."""
        ...

    def waiting(self, number: int) -> Tensor:
        """Keys of the samples that wait at the end of a round, int64 (m, k), in the order in which they came."""
        ...

    def samples(self, keys: Tensor) -> tuple[Tensor, Samples]:
        """Samples that wait, by their keys, int64 (m, k): positions of those that can be read, and these; labels are 0."""
        ...

    def tests(self, number: int) -> int:
        """Number of test images of the classes whose samples have come up to a round; 0 if all labels come at once."""
        ...

    def overdue(self) -> Tensor:
        """Keys of the samples to drop, as they are too old or too many, int64 (m, k)."""
        ...

    def drop(self, keys: Tensor) -> None:
        """Drop samples that wait, by their keys, int64 (m, k)."""
        ...


class Source(Protocol):
    """Training and test samples of one client.

    Attributes
    ----------
    late : Late
        The samples that wait for a label.
    class_names : tuple of str
        Names of the classes, in the order of their labels; with open classes, of those that are agreed so far.
    tells : bool
        Whether classes are open, and names of further ones may leave this machine.
    """

    @property
    def late(self) -> Late:  # noqa: D102
        ...

    @property
    def class_names(self) -> tuple[str, ...]:  # noqa: D102
        ...

    @property
    def tells(self) -> bool:  # noqa: D102
        ...

    def none(self) -> Samples:
        """No samples, held in the same way as this source's."""
        ...

    def chunk(self, number: int, learned: int) -> Samples:
        """The chunk D_t of a round, from 1; ``learned`` is the last round in the client's state."""
        ...

    def again(self, number: int, follows: int) -> Samples:
        """The chunk of the last trained round, as it was; ``follows`` is the round trained before it."""
        ...

    def learned(self, number: int) -> None:
        """Acknowledge that a round's outcome is on disk."""
        ...

    def counts(self) -> dict[str, int]:
        """Metrics for the server: what waits for the next round, and what does not; none if nobody knows."""
        ...

    def new_classes(self, number: int) -> list[str]:
        """Names for the server, of classes that have no number yet and whose samples wait; not too many at once."""
        ...

    def test_set(self, seen: Tensor) -> Samples:
        """Test samples of the classes seen, bool (C,); none without a test set."""
        ...


class LateStream:
    """Samples of a stream whose labels come in later rounds (``label-delay``); those that never get one are left out.

    Parameters
    ----------
    experiment : Experiment
        Data set and streams.
    client : int
        The client's number k.
    """

    kept = 0

    def __init__(self, experiment: Experiment, client: int) -> None:
        self._experiment = experiment
        self._client = client

    def keys(self, chunk: Samples) -> Tensor:
        """The samples' ids."""
        return chunk.content[:, None]

    def waiting(self, number: int) -> Tensor:
        """The ids of those whose labels come after a round."""
        return self._experiment.unlabelled(self._client, number).content[:, None]

    def samples(self, keys: Tensor) -> tuple[Tensor, Samples]:
        """Samples by id."""
        ids = keys[:, 0]
        return torch.arange(len(ids)), Samples.arrived(ids, torch.zeros_like(ids), 0)

    def tests(self, number: int) -> int:
        """The client's test images of the classes that the stream has brought."""
        stream = self._experiment.config.stream
        if not stream.label_delay and stream.label_share == 1:
            return 0
        came = torch.zeros(self._experiment.dataset.num_classes, dtype=torch.bool)
        for earlier in range(1, number + 1):
            came[self._experiment.drawn(self._client, earlier).labels] = True
        return len(self._experiment.test_set(self._client, came))

    def overdue(self) -> Tensor:
        """None: every label comes in its round."""
        return torch.empty((0, 1), dtype=torch.int64)

    def drop(self, keys: Tensor) -> None:
        """Do nothing."""


class StreamSource:
    """A client's chunks as :mod:`fedkace_flwr.data.stream` draws them, by id into the data set.

    Parameters
    ----------
    experiment : Experiment
        Data set and streams.
    client : int
        The client's number k.
    classes : AgreedClasses, optional
        With open classes, those agreed so far. Samples of another class wait until it is.
    tells : bool
        Whether names of further classes may leave this machine.
    """

    def __init__(
        self, experiment: Experiment, client: int, classes: AgreedClasses | None = None, *, tells: bool = True
    ) -> None:
        self._experiment = experiment
        self.tells = classes is not None and tells
        self.late = LateStream(experiment, client)
        self._client = client
        known = experiment.dataset.class_names
        classes = classes or AgreedClasses(known, (0,) * len(known))
        self.class_names = classes.names
        # By the data set's label: the agreed one, or -1, and the round from which it counts.
        place = {name: label for label, name in enumerate(classes.names)}
        self._labels = torch.tensor([place.get(name, -1) for name in known])
        self._rounds = torch.tensor([classes.rounds[label] if label >= 0 else 0 for label in self._labels.tolist()])

    def none(self) -> Samples:
        """No samples, by id."""
        return Samples.none()

    def chunk(self, number: int, learned: int) -> Samples:
        """The chunk of a round, and samples of earlier ones whose class is agreed since the client last trained."""
        chunk = self._drawn(number)
        parts = [chunk.take(self._is_agreed(chunk, number).nonzero().squeeze(1))]
        if bool((self._rounds > learned).any()):
            for earlier in range(1, number):
                if self._experiment.trains(self._client, earlier):
                    chunk = self._drawn(earlier)
                    waited = self._is_agreed(chunk, number) & (self._rounds[chunk.labels] > learned)
                    parts.append(chunk.take(waited.nonzero().squeeze(1)))
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.followed_by(part)
        return Samples.arrived(whole.content, self._labels[whole.labels], number)

    def again(self, number: int, follows: int) -> Samples:
        """The chunk of a round; a stream can give every chunk again."""
        return self.chunk(number, follows)

    def learned(self, number: int) -> None:
        """Do nothing: a stream has no files to put away."""

    def counts(self) -> dict[str, int]:
        """Nothing is known of a stream."""
        return {}

    def new_classes(self, number: int) -> list[str]:
        """Names of classes that the stream has brought up to a round."""
        if not self.tells or bool((self._labels >= 0).all()):
            return []
        rounds = (each for each in range(1, number + 1) if self._experiment.trains(self._client, each))
        met = {label for each in rounds for label in torch.unique(self._drawn(each).labels).tolist()}
        names = self._experiment.dataset.class_names
        return sorted(names[label] for label in met if self._labels[label] < 0)[:MOST_NEW_CLASSES]

    def test_set(self, seen: Tensor) -> Samples:
        """The client's test images of the classes seen."""
        wanted = (self._labels >= 0) & seen[self._labels]
        samples = self._experiment.test_set(self._client, wanted)
        return Samples.arrived(samples.content, self._labels[samples.labels], 0)

    def _drawn(self, number: int) -> Samples:
        """The samples whose labels come in a round, with the labels of the data set."""
        return self._experiment.chunk(self._client, number)

    def _is_agreed(self, chunk: Samples, number: int) -> Tensor:
        """Which samples have a class that counts in a round, bool (n,)."""
        return (self._labels[chunk.labels] >= 0) & (self._rounds[chunk.labels] <= number)


class LateInbox:
    """Pictures in an inbox that wait for a label. Their keys are inode, time of change and size.

    Parameters
    ----------
    inbox : Inbox
        The inbox.
    bound : int
        Most pictures that wait.
    age : float
        Seconds after which one is dropped.
    """

    def __init__(self, inbox: Inbox, bound: int, age: float) -> None:
        self._inbox = inbox
        self.kept = self._bound = bound
        self._age = age

    def keys(self, chunk: Samples) -> Tensor:
        """The keys of the files; 0 of samples of archives."""
        return _keys_of(self._inbox.keys)

    def waiting(self, number: int) -> Tensor:
        """The keys of the pictures that wait now."""
        return _keys_of([each.key for each in self._inbox.unlabelled()])

    def samples(self, keys: Tensor) -> tuple[Tensor, Samples]:
        """Pictures by key; one that cannot be read is rejected."""
        names = {each.key: each.name for each in self._inbox.unlabelled()}
        wanted = {place: names[key] for place, key in enumerate(_tuples(keys)) if key in names}
        read, images = self._inbox.read_unlabelled([*wanted.values()])
        places = torch.tensor([*wanted], dtype=torch.int64)[torch.tensor(read, dtype=torch.int64)]
        return places, Samples.arrived(torch.from_numpy(images), torch.zeros_like(places), 0)

    def tests(self, number: int) -> int:
        """0: nobody knows the classes of pictures without a label."""
        return 0

    def overdue(self) -> Tensor:
        """The keys of those that are too old, and of the oldest of too many."""
        return _keys_of([each.key for each in self._inbox.overdue(self._bound, self._age)])

    def drop(self, keys: Tensor) -> None:
        """Put pictures away as if they were learned."""
        self._inbox.drop({*_tuples(keys)})


def _keys_of(keys: Sequence[arrivals.Key]) -> Tensor:
    return torch.tensor(keys, dtype=torch.int64).reshape(-1, len(arrivals.NO_KEY))


def _tuples(keys: Tensor) -> list[arrivals.Key]:
    return [(inode, changed, size) for inode, changed, size in keys.tolist()]


class InboxSource:
    """A device's chunks as they arrive, by value.

    Parameters
    ----------
    experiment : Experiment
        Agreed classes, form of samples, and limits of the inbox.
    folder : Path
        The inbox.
    run : str
        The run that learns.
    test_folder : Path, optional
        Labelled test images, in files like those of the inbox; without it no accuracy is reported.
    classes : AgreedClasses, optional
        With open classes, those agreed so far.
    tells : bool
        Whether names of further classes may leave this machine. If so, their files wait; else they are rejected.

    Raises
    ------
    DataError
        The inbox cannot be used.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        run: str,
        test_folder: Path | None = None,
        classes: AgreedClasses | None = None,
        *,
        tells: bool = True,
    ) -> None:
        settings, dataset = experiment.config.data, experiment.dataset
        self.class_names, self._form = classes.names if classes else dataset.class_names, dataset.form
        self.tells = classes is not None and tells
        strangers: Strangers = "reject" if classes is None else "wait" if tells else "keep secret"
        self._inbox = Inbox(
            folder,
            run,
            self.class_names,
            self._form,
            bound=settings.inbox_bound,
            keep=settings.inbox_after == "keep",
            strangers=strangers,
        )
        self.late = LateInbox(self._inbox, settings.unlabelled_bound, settings.unlabelled_age)
        self._test_folder = test_folder
        self._bound, self._grows = settings.inbox_bound, classes is not None

    def none(self) -> Samples:
        """No samples, by value."""
        return Samples.none(self._form)

    def chunk(self, number: int, learned: int) -> Samples:
        """The samples that have arrived; see :meth:`Inbox.take`."""
        images, labels = self._inbox.take(number, learned)
        return Samples.arrived(torch.from_numpy(images), torch.from_numpy(labels), number)

    def again(self, number: int, follows: int) -> Samples:
        """The round's samples once more, whether its files are marked by now or not."""
        return self.chunk(number, number)

    def learned(self, number: int) -> None:
        """Mark the round's files as learned."""
        self._inbox.learned(number)

    def counts(self) -> dict[str, int]:
        """Labelled samples that wait, up to ``inbox-bound``; pictures that wait for labels; rejected files."""
        waits = waiting(self._inbox.folder, self._bound, self.class_names if self._grows else None)[0]
        unlabelled = len(self._inbox.unlabelled())
        return {wire.WAITING: waits, wire.UNLABELLED: unlabelled, wire.REJECTED: self._inbox.rejected()}

    def new_classes(self, number: int) -> list[str]:
        """Names of classes whose files wait."""
        return self._inbox.new_classes(MOST_NEW_CLASSES)

    def test_set(self, seen: Tensor) -> Samples:
        """The test folder's images of the classes seen; none, with a warning, if the folder cannot be read."""
        if self._test_folder is None:
            return self.none()
        try:
            images, labels = read_folder(self._test_folder, self.class_names, self._form)
        except DataError as fault:  # what cannot be measured can be learned nevertheless
            logger.warning("%s; nothing is tested", fault)
            return self.none()
        samples = Samples.arrived(torch.from_numpy(images), torch.from_numpy(labels), 0)
        return samples.take(seen[samples.labels].nonzero().squeeze(1))


def read_folder(folder: Path, class_names: tuple[str, ...], form: Form) -> arrivals.Arrived:
    """All samples of a folder with files like those of an inbox; uint8 (n, 3, S, S) or float32 (n, ...), and int64 (n,).

    Files that an inbox would reject are left out, with a warning that counts them.

    Raises
    ------
    DataError
        The folder cannot be read, or the process that decodes pictures does not work.
    """
    images, labels = [np.empty((0, *form.shape), dtype=form.dtype)], [np.empty(0, dtype=np.int64)]
    faults: list[str] = []
    try:
        with OpenFolder.at(folder) as opened, PictureProcess() as decoder:
            for arrival in arrivals.listing(opened):
                try:
                    more = arrivals.read(arrival, class_names, form, decoder.square)
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
