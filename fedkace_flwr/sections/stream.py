"""Keys of the stream, and the sizes of chunks that follow from them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedkace_flwr.keys import Number, Numbers, key, word_of
from fedkace_flwr.seeding import seed_for

_ABSENCE = re.compile(r"(?P<client>\d{1,6}):(?P<first>\d{1,6})-(?P<last>\d{0,6})", re.ASCII)
_NEVER = 10**9  # a round that no run reaches

_CONCENTRATION = Number("concentration", 1.0, low=0.01, high=1e6)


@dataclass(frozen=True)
class StreamConfig:
    """Stream."""

    clients: int = key(
        10,
        "Number of clients K. With an inbox on a federation whose nodes have keys, the number at the start: further nodes become further clients (docs/living.md).",
        low=1,
        high=100_000,
    )
    rounds: int = key(
        15,
        "Number of rounds T. 0, for inboxes alone: the run goes on until it is stopped. A run that is resumed with more goes on, as if they had been planned from the start; with streams and methods that need T beforehand that is refused.",
        low=0,
        high=100_000,
        living=True,
    )
    away: str = key(
        "",
        "In simulations: the rounds in which clients are away, each as client:first-last and separated by commas. `9:1-5, 3:5-9, 7:12-` lets client 9 join in round 6, client 3 miss rounds 5 to 9, and client 7 leave after round 11. Clients that are away are not asked, and their chunks are lost.",
    )
    fraction_train: float = key(
        1.0,
        "Fraction of the clients that train in a round, at least one, drawn anew for each round. The others miss the round's training and its chunk; images in an inbox wait. All clients receive the new global model and are evaluated.",
        above=0,
        high=1,
    )
    stream: str = key(
        "windows",
        "How a client's classes change over the rounds (docs/streams.md): `windows` of classes slide along a cyclic list, as in the paper; `blurred` exchanges a share of each chunk (0.1) with the client's other rounds; `dirichlet` draws the frequencies of all classes from a Dirichlet distribution with a concentration (1), and each anew in a round with the probability drift (0.1); `quantity-skew` gives clients windows with different numbers of samples, by shares from such a distribution (1).",
        words={
            "windows": (),
            "blurred": (Number("share", 0.1, above=0, high=1),),
            "dirichlet": (_CONCENTRATION, Number("drift", 0.1, low=0, high=1)),
            "quantity-skew": (_CONCENTRATION,),
        },
    )
    window: int = key(
        2,
        "Number of classes in a client's chunk, W. With `stream = dirichlet`, only the size of a chunk follows from it: `window` x `samples-per-class`.",
        unit="classes",
        low=1,
    )
    overlap: int = key(
        1,
        "Number of classes that two consecutive chunks share, O; between 0 and `window`. Not used with `stream = dirichlet`.",
        unit="classes",
        low=0,
    )
    samples_per_class: int = key(
        25,
        "Number of new samples of each class in a chunk, n; with `stream = quantity-skew`, of the client that receives most.",
        unit="samples",
        low=1,
    )
    shared_samples: bool = key(
        True,
        "Whether clients draw independently, as in the paper, so that two clients may receive the same sample; `false` divides each class's samples among the clients.",
    )
    label_delay: int = key(
        0,
        "In simulations: the number of rounds by which the labels of a chunk come after its images. Until then clients predict them; they learn them once the labels are there. An inbox gets labels whenever somebody gives them (docs/edge-data.md).",
        unit="rounds",
        low=0,
        high=100_000,
    )
    label_share: float = key(
        1.0,
        "In simulations: the probability with which an image ever gets a label; the others are never learned.",
        above=0,
        high=1,
    )

    @property
    def kind(self) -> str:
        """The kind of stream, without its numbers."""
        return word_of(self, "stream")[0]

    @property
    def numbers(self) -> Numbers:
        """The numbers of the kind of stream, by name."""
        return word_of(self, "stream")[1]

    @property
    def why_not_longer(self) -> str:
        """Why a stream of more rounds would begin with other samples, in half a sentence; empty if it would not."""
        if self.kind == "blurred":
            return f"stream = {self.stream!r} exchanges samples between all rounds"
        if not self.shared_samples:
            return "shared-samples = false divides the samples by what all rounds need"
        return ""

    @property
    def participants_per_round(self) -> int:
        """Number of clients that train in a round, if none is away."""
        return self._share_of(self.clients)

    def _share_of(self, members: int) -> int:
        return max(1, round(self.fraction_train * members))

    def participants(self, number: int, seed: int, members: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return the clients that train in a round, in ascending order.

        Parameters
        ----------
        number, seed : int
            The round, from 1, and the experiment's seed.
        members : tuple of int, optional
            The clients that take part in the round, in ascending order; by default those that are not :attr:`away`.
        """
        members = self.members(number) if members is None else members
        if self._share_of(len(members)) >= len(members):
            return members
        return _drawn(members, self._share_of(len(members)), number, seed)

    def members(self, number: int) -> tuple[int, ...]:
        """Return the clients that are not :attr:`away` in a round, from 1, in ascending order."""
        gone = {client for client, spans in absences(self.away).items() if any(number in span for span in spans)}
        return tuple(client for client in range(self.clients) if client not in gone)

    @property
    def largest_chunk(self) -> int:
        """Number of samples in the largest chunk."""
        return self.window * self.samples_per_class

    def mean_chunk(self, seed: int) -> int:
        """Return the number of labelled samples in a chunk, averaged over clients and rounded, at least 1.

        ``seed`` is the experiment's.
        """
        mean: float = self.largest_chunk
        if self.kind == "quantity-skew":
            mean = self.window * sum(self.samples_of(client, seed) for client in range(self.clients)) / self.clients
        return max(1, round(self.label_share * mean))

    def samples_of(self, client: int, seed: int) -> int:
        """Return the number of samples of each class in a window of a client, from 0; ``seed`` is the experiment's."""
        if self.kind != "quantity-skew":
            return self.samples_per_class
        share = _shares(self.clients, self.numbers["concentration"], seed)[client]
        return max(-(-2 // self.window), round(self.samples_per_class * share))  # at least two in a chunk


@lru_cache(maxsize=4096)
def _drawn(members: tuple[int, ...], count: int, number: int, seed: int) -> tuple[int, ...]:
    generator = np.random.default_rng(seed_for(seed, "participants", number))
    return tuple(sorted(members[place] for place in generator.choice(len(members), count, replace=False)))


@lru_cache(maxsize=64)
def absences(text: str) -> Mapping[int, tuple[range, ...]]:
    """Return the rounds in which each client is away, as the key ``away`` gives them.

    Raises
    ------
    ValueError
        An entry is not ``client:first-last``; the text names it.
    """
    found: dict[int, tuple[range, ...]] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        parts = _ABSENCE.fullmatch(entry)
        first, last = (int(parts["first"]), int(parts["last"] or _NEVER)) if parts else (0, 0)
        if parts is None or not 1 <= first <= last:
            raise ValueError(f"{entry!r:.40} is not client:first-last, such as 3:5-9, or 7:12- for ever")
        client = int(parts["client"])
        found[client] = (*found.get(client, ()), range(first, last + 1))
    return found


@lru_cache(maxsize=16)
def _shares(clients: int, concentration: float, seed: int) -> Sequence[float]:
    """The clients' shares of all samples, from a Dirichlet distribution, relative to the largest one."""
    generator = np.random.default_rng(seed_for(seed, "quantities"))
    shares = generator.dirichlet(np.full(clients, concentration))
    return tuple((shares / shares.max()).tolist())
