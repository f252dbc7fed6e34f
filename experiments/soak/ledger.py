"""Who was given which labelled sample, and what became of it, as seen from outside: from files and stored states alone."""

import hashlib
import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.errors import StateError
from fedkace_flwr.storage import atomic, client_state
from fedkace_flwr.storage.atomic import ANSWER, STATE
from fedkace_flwr.storage.client_state import Answer, ClientState
from fedkace_flwr.storage.files import write_bytes
from fedkace_flwr.storage.folders import make_folder

_LEARNED = re.compile(r"(?P<run>[0-9A-Za-z]+)-(?P<round>\d+)(?P<mark>|\.learned)(~.*)?")

_UNLABELLED = "unlabelled"

Pixels = NDArray[np.uint8]
Form = Literal["archive", "pictures", "unlabelled"]
"""How samples arrive: as one archive, or as one picture each, in the folder of its class or in that for those without."""


@dataclass
class File:
    """A file that a node was given.

    Attributes
    ----------
    node : str
        The node.
    samples : list of str
        Digests of its samples' pixels.
    label : {"given", "to come", "never", "dropped"}
        Whether the node has been told what it shows; or, as nobody has, has put it away.
    learned : list of int
        The rounds in which it was learned.
    """

    node: str
    samples: list[str]
    label: Literal["given", "to come", "never", "dropped"] = "given"
    learned: list[int] = field(default_factory=list)

    @property
    def is_to_be_learned(self) -> bool:
        """Whether it has a label, or will."""
        return self.label in ("given", "to come")


@dataclass
class Memory:
    """What a node has been seen to remember.

    Attributes
    ----------
    classes : int
        The most classes met.
    samples : int
        Samples in its buffer when it was last read.
    round : int
        The round of that state.
    undone : list of list of int
        Spans of rounds that count as not having been.
    """

    classes: int = 0
    samples: int = 0
    round: int = 0
    undone: list[list[int]] = field(default_factory=list)


class Ledger:
    """All samples of a year.

    Parameters
    ----------
    folder : Path
        The federation's folder; node NAME has its inbox in ``NAME/inbox`` and its state in ``NAME/state/NAME``.

    Attributes
    ----------
    files : dict of str to File
        All files, by name.
    memories : dict of str to Memory
        What each node remembers.
    faults : list of str
        What should not be.
    late : int
        Number of pictures whose labels came late.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: dict[str, File] = {}
        self.memories: defaultdict[str, Memory] = defaultdict(Memory)
        self.faults: list[str] = []
        self.late = 0
        self._given: dict[str, tuple[str, str]] = {}  # the file and the class of each sample
        self._trained: dict[tuple[str, int], int] = {}  # samples of each node and round

    def drop(self, node: str, images: Pixels, names: Sequence[str], form: Form = "archive") -> list[str]:
        """Put samples into a node's inbox; return the names of the files.

        Parameters
        ----------
        node : str
            The node.
        images : array
            Grey pictures, uint8 (n, S, S), each different from all before.
        names : sequence of str
            Their classes, as the node is told. Of pictures without labels, an empty one says that none will come.
        form : {"archive", "pictures", "unlabelled"}
            How they arrive.
        """
        number = len(self.files)
        new = self._folder / node / "inbox" / "new"
        digests = [digest(np.repeat(image[None], 3, axis=0)) for image in images]
        if self._given.keys() & digests or len(set(digests)) < len(digests):
            raise ValueError(f"{node}: a sample would be given twice")
        if form == "archive":
            content = io.BytesIO()
            np.savez(content, images=images, labels=np.array(names))
            self._add(new / f"{number:06d}.npz", content.getvalue(), File(node, digests), names)
        else:
            for place, (image, name) in enumerate(zip(images, names, strict=True)):
                file, folder = File(node, [digests[place]]), name
                if form == "unlabelled":
                    file.label, folder = "to come" if name else "never", _UNLABELLED
                self._add(new / folder / f"{number + place:06d}.png", _png(image), file, [name])
        return list(self.files)[number:]

    def _add(self, path: Path, content: bytes, file: File, names: Sequence[str]) -> None:
        # Noted before it is written: what the ledger does not know could be learned unseen.
        self.files[path.name] = file
        self._given |= {sample: (path.name, name) for sample, name in zip(file.samples, names, strict=True)}
        make_folder(path.parent)
        write_bytes(path, content, mode=0o600)

    def label(self, classes: Mapping[str, str], *, as_list: bool) -> None:
        """Tell a node what pictures show: by a list, or by moving each into the folder of its class.

        Parameters
        ----------
        classes : mapping of str to str
            For files of one node whose labels are to come, what it is told.
        as_list : bool
            Whether by a list.
        """
        first = next(iter(classes))
        node, self.late = self.files[first].node, self.late + len(classes)
        new = self._folder / node / "inbox" / "new"
        for name, told in classes.items():
            self.files[name].label = "given"
            self._given[self.files[name].samples[0]] = name, told
        if as_list:
            lines = ["name,label", *(f"{name},{told}" for name, told in classes.items()), ""]
            write_bytes(new / f"labels-{first}.csv", "\n".join(lines).encode(), mode=0o600)
            return
        for name, told in classes.items():
            make_folder(new / told)
            try:
                (new / _UNLABELLED / name).rename(new / told / name)
            except FileNotFoundError:
                self._fault(f"{node}: {name} was gone before its label came")

    def unlabelled(self) -> tuple[int, int]:
        """Return how many pictures wait for a label that never comes, and how many were put away."""
        labels = [file.label for file in self.files.values()]
        return labels.count("never"), labels.count("dropped")

    def waiting(self, node: str) -> int:
        """Return the number of files with labels that the node has not taken."""
        new = self._folder / node / "inbox" / "new"
        return sum(path.parent.name != _UNLABELLED and path.suffix != ".csv" for path in _files(new))

    def open(self, node: str) -> list[str]:
        """Return the files of a node that are still to be learned, as far as is known."""
        mine = {name: file for name, file in self.files.items() if file.node == node and file.is_to_be_learned}
        return [name for name, file in mine.items() if not file.learned]

    @property
    def last_round(self) -> int:
        """The last round in which a file was learned."""
        return max((number for file in self.files.values() for number in file.learned), default=0)

    def count(self, node: str) -> None:
        """Note what the node has learned and refused; files in ``done/`` are removed, so that the disk does not grow."""
        inbox = self._folder / node / "inbox"
        for place, is_done in ((inbox / "done", True), (inbox / "taken", False)):
            for claim in _folders(place):
                parts = _LEARNED.fullmatch(claim.name)
                if parts is None or not (is_done or parts["mark"]):
                    continue
                for path in _files(claim):
                    self._learned(node, path.name, int(parts["round"]))
                    if is_done:
                        path.unlink()
                if is_done:
                    _remove_folders(claim)
        for path in _files(inbox / "done" / _UNLABELLED):
            self._dropped(node, path.name)
            path.unlink()
        for path in (inbox / "done").glob("labels-*"):
            path.unlink()
        for path in _files(inbox / "rejected"):
            self._fault(f"{node}: {path.name} was rejected" if path.suffix != ".txt" else "")

    def _learned(self, node: str, name: str, number: int) -> None:
        file = self.files.get(name)
        if file is None or file.node != node:
            self._fault(f"{node}: {name} was learned, and was not given to it")
        elif number not in file.learned:
            file.learned.append(number)
            if file.label != "given":
                self._fault(f"{node}: {name} was learned in round {number}, and has no label")
            if len(file.learned) > 1:
                self._fault(f"{node}: {name} was learned in rounds {file.learned}")

    def _dropped(self, node: str, name: str) -> None:
        file = self.files.get(name)
        if file is None or file.is_to_be_learned:
            self._fault(f"{node}: {name} was put away without having been learned")
        else:
            file.label = "dropped"

    def recall(self, node: str) -> None:
        """Note what the node remembers; a class or a buffer that it has lost, or a sample not its own, is a fault."""
        home = self._folder / node / "state" / node
        state = newest(home, STATE, ClientState.from_record, client_state.VERSION)
        before = self.memories[node]
        if state is None:
            if before.round:
                self._fault(f"{node}: has no state any more")
            return
        classes, samples = int(state.seen.sum()), len(state.buffer)
        takes_back = state.undone.tolist() != before.undone  # rounds count as not having been, since it was last read
        if classes < before.classes and not takes_back:
            self._fault(f"{node}: has met {classes} classes after round {state.round}, and had met {before.classes}")
        if before.samples and not samples and not takes_back:
            self._fault(f"{node}: its buffer is empty after round {state.round}")
        if state.round < before.round:
            self._fault(f"{node}: is at round {state.round}, and was at {before.round}")
        held = [digest(image) for image in state.buffer.content.numpy()]
        copies = Counter(held)
        for sample, label, arrived in zip(
            held, state.buffer.labels.tolist(), state.buffer.rounds.tolist(), strict=True
        ):
            self._check_sample(node, sample, copies[sample], state.names[label] if state.names else "", arrived)
        self.memories[node] = Memory(classes, samples, state.round, state.undone.tolist())
        answer = newest(home, ANSWER, lambda arrays, record: Answer.from_record(arrays, record)[1])
        # Read after the state: this answer is of its round, or of a later one.
        if answer is not None and atomic.numbered(home, STATE)[:1] == atomic.numbered(home, ANSWER)[:1] == [
            state.round
        ]:
            self._trained[node, state.round] = answer.examples

    def _check_sample(self, node: str, sample: str, copies: int, name: str, arrived: int) -> None:
        given, its_class = self._given.get(sample, ("", ""))
        file = self.files.get(given)
        if file is None or file.node != node:
            self._fault(f"{node}: its buffer holds a sample that it was not given")
            return
        if copies > 1:
            self._fault(f"{node}: its buffer holds {copies} copies of a sample of {given}")
        if name and name != its_class:
            self._fault(f"{node}: its buffer holds a sample of {given}, class {its_class}, as {name}")
        if file.learned and arrived not in file.learned:
            self._fault(f"{node}: learned {given} in round {arrived}, and filed it under {file.learned}")

    def compare(self) -> None:
        """Compare how many samples nodes say that they have trained on with those of the files that they filed."""
        for (node, number), samples in self._trained.items():
            files = [file for file in self.files.values() if file.node == node and number in file.learned]
            if (filed := sum(len(file.samples) for file in files)) != samples:
                self._fault(f"{node}: trained on {samples} samples in round {number}, and has filed {filed} under it")

    def totals(self) -> dict[str, int]:
        """Return the numbers of samples that were given with a label, learned once, learned more often, and never."""
        each = [(len(file.learned), len(file.samples)) for file in self.files.values() if file.is_to_be_learned]
        return {
            "given": sum(samples for _, samples in each),
            "learned once": sum(samples for times, samples in each if times == 1),
            "learned again": sum(samples for times, samples in each if times > 1),
            "not learned": sum(samples for times, samples in each if not times),
        }

    def _fault(self, text: str) -> None:
        if text and text not in self.faults:
            self.faults.append(text)


def digest(image: NDArray[Any]) -> str:
    """Return the name of a picture's pixels, uint8 (3, S, S)."""
    return hashlib.blake2b(np.ascontiguousarray(image).tobytes(), digest_size=12).hexdigest()


def newest(folder: Path, kind: str, parse: Callable[..., Any], version: int = atomic.VERSION) -> Any:
    """Return the content of a client's newest file of a kind; None if there is none. Its process may be writing others."""
    for number in atomic.numbered(folder, kind):
        with suppress(StateError):
            found = atomic.read(atomic.path_of(folder, kind, number), version, parse)
            if found is not None:
                return found
    return None


def _folders(place: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from sorted(path for path in place.iterdir() if path.is_dir())


def _files(place: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):  # the client has put it elsewhere: it is found there next time
        yield from sorted(path for path in place.rglob("*") if path.is_file())


def _remove_folders(place: Path) -> None:
    for path in sorted(place.rglob("*"), reverse=True):
        path.rmdir()
    place.rmdir()


def _png(image: Pixels) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()
