"""Keys of the stream, and the sizes of chunks that follow from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np

from fedkace_flwr.keys import Number, Numbers, key, word_of
from fedkace_flwr.seeding import seed_for

_CONCENTRATION = Number("concentration", 1.0, low=0.01, high=1e6)


@dataclass(frozen=True)
class StreamConfig:
    """Stream."""

    clients: int = key(10, "Number of clients K.", low=1, high=100_000)
    rounds: int = key(
        15,
        "Number of rounds T. A run that is resumed with more goes on, as if they had been planned from the start; with streams and methods that need T beforehand that is refused.",
        low=1,
        high=100_000,
        living=True,
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
        """Number of clients that train in a round."""
        return max(1, round(self.fraction_train * self.clients))

    def participants(self, number: int, seed: int) -> tuple[int, ...]:
        """Return the clients that train in a round, from 1, in ascending order; ``seed`` is the experiment's."""
        if self.participants_per_round == self.clients:
            return tuple(range(self.clients))
        return _drawn(self.clients, self.participants_per_round, number, seed)

    def participations(self, number: int, seed: int) -> int:
        """Return the largest number of rounds, of the first ``number``, in which a single client trains."""
        if self.participants_per_round == self.clients:
            return number
        rounds = range(1, number + 1)
        return max(Counter(chain.from_iterable(self.participants(each, seed) for each in rounds)).values())

    @property
    def largest_chunk(self) -> int:
        """Number of samples in the largest chunk."""
        return self.window * self.samples_per_class

    def mean_chunk(self, seed: int) -> int:
        """Return the number of samples in a chunk, averaged over clients and rounded; ``seed`` is the experiment's."""
        if self.kind != "quantity-skew":
            return self.largest_chunk
        return round(self.window * sum(self.samples_of(client, seed) for client in range(self.clients)) / self.clients)

    def samples_of(self, client: int, seed: int) -> int:
        """Return the number of samples of each class in a window of a client, from 0; ``seed`` is the experiment's."""
        if self.kind != "quantity-skew":
            return self.samples_per_class
        share = _shares(self.clients, self.numbers["concentration"], seed)[client]
        return max(-(-2 // self.window), round(self.samples_per_class * share))  # at least two in a chunk


@lru_cache(maxsize=4096)
def _drawn(clients: int, count: int, number: int, seed: int) -> tuple[int, ...]:
    generator = np.random.default_rng(seed_for(seed, "participants", number))
    return tuple(sorted(generator.choice(clients, count, replace=False).tolist()))


@lru_cache(maxsize=16)
def _shares(clients: int, concentration: float, seed: int) -> Sequence[float]:
    """The clients' shares of all samples, from a Dirichlet distribution, relative to the largest one."""
    generator = np.random.default_rng(seed_for(seed, "quantities"))
    shares = generator.dirichlet(np.full(clients, concentration))
    return tuple((shares / shares.max()).tolist())
