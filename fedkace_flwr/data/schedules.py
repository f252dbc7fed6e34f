"""Which classes a client receives in each round, and how many samples of each (paper, sections 3, 5.1 and A.1).

Pure and seeded, and without data: :mod:`fedkace_flwr.data.stream` draws the samples. The paper's stream slides a window
along a cyclic list of classes. The others differ from it in one respect each; docs/streams.md defines them.

Shapes: C classes, T rounds, W classes in a window, n samples per class, N = W n samples in a chunk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.sections import StreamConfig
from fedkace_flwr.seeding import seed_for

Counts = npt.NDArray[np.int64]

_LONGEST = 10**7  # samples of one client, which take some hundred MiB to draw


@dataclass(frozen=True)
class Schedule:
    """One client's classes by round.

    Attributes
    ----------
    windows : tuple of tuple of int
        The classes of each round, in the order in which the chunk holds them; each has at least one sample.
    counts : tuple of tuple of int
        The number of samples of each of these classes.
    """

    windows: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def of_table(cls, table: Counts, order: Sequence[Sequence[int]]) -> "Schedule":
        """Return the schedule of a table of counts, int64 (T, C); ``order`` lists all classes for each round."""
        windows = tuple(
            tuple(label for label in labels if row[label]) for row, labels in zip(table, order, strict=True)
        )
        counts = tuple(tuple(int(row[label]) for label in labels) for row, labels in zip(table, windows, strict=True))
        return cls(windows, counts)

    def table(self, classes: int) -> Counts:
        """Return the number of samples of each class in each round, int64 (T, C)."""
        table = np.zeros((len(self.windows), classes), dtype=np.int64)
        for row, labels, counts in zip(table, self.windows, self.counts, strict=True):
            row[list(labels)] = counts
        return table


@lru_cache(maxsize=64)
def schedule_of(client: int, seed: int, classes: int, settings: StreamConfig) -> Schedule:
    """Draw the schedule of one client.

    Parameters
    ----------
    client, seed : int
        The client's number, from 0, and the experiment's seed.
    classes : int
        C.
    settings : StreamConfig
        Which stream, and its keys.

    Raises
    ------
    ConfigError
        ``window`` is not in 1..C, ``overlap`` is not in 0..window, ``rounds`` is below 1, or the stream is too long.
    """
    if (total := settings.rounds * settings.largest_chunk) > _LONGEST:
        raise ConfigError(
            f"samples-per-class = {settings.samples_per_class}, window = {settings.window}, rounds = "
            f"{settings.rounds}: a client's stream would have {total} samples; must be at most {_LONGEST}"
        )
    return _KINDS[settings.kind](client, seed, classes, settings)


def class_windows(class_order: Sequence[int], window: int, overlap: int, rounds: int) -> list[tuple[int, ...]]:
    """Slide a window along a cyclic list of classes (paper, section 5.1).

    With ``overlap < window`` the window advances by ``window - overlap`` classes every round. With
    ``overlap == window`` it stays in place for ``window`` rounds and then advances by ``window``.

    Parameters
    ----------
    class_order : sequence of int
        The client's cyclic list, which holds each class once.
    window, overlap, rounds : int
        Classes per round, classes shared by consecutive rounds, number of rounds.

    Returns
    -------
    list of tuple of int
        One tuple of ``window`` classes per round.

    Raises
    ------
    ConfigError
        ``window`` is not in 1..len(class_order), ``overlap`` is not in 0..window, or ``rounds`` is below 1.
    """
    if not 1 <= window <= len(class_order):
        raise ConfigError(f"window = {window}: must be between 1 and the number of classes, {len(class_order)}")
    if not 0 <= overlap <= window:
        raise ConfigError(f"overlap = {overlap}: must be between 0 and window = {window}")
    if rounds < 1:
        raise ConfigError(f"rounds = {rounds}: must be >= 1")
    if overlap == window:
        starts = [(index // window) * window for index in range(rounds)]
    else:
        starts = [index * (window - overlap) for index in range(rounds)]
    size = len(class_order)
    return [tuple(class_order[(start + step) % size] for step in range(window)) for start in starts]


def class_order(client: int, seed: int, classes: int) -> tuple[int, ...]:
    """Return the cyclic list of a client, which holds each class once."""
    order = np.random.default_rng(seed_for(seed, "class order", client)).permutation(classes)
    return tuple(int(label) for label in order)


def _windows(client: int, seed: int, classes: int, settings: StreamConfig) -> Schedule:
    order = class_order(client, seed, classes)
    windows = class_windows(order, settings.window, settings.overlap, settings.rounds)
    samples = settings.samples_of(client, seed)
    return Schedule(tuple(windows), tuple((samples,) * len(labels) for labels in windows))


def _blurred(client: int, seed: int, classes: int, settings: StreamConfig) -> Schedule:
    """Take a share of each chunk's places, and shuffle their classes over all rounds; totals are those of the windows."""
    sharp = _windows(client, seed, classes, settings)
    places = np.array([np.repeat(labels, counts) for labels, counts in zip(sharp.windows, sharp.counts, strict=True)])
    exchanged = max(1, round(settings.numbers["share"] * places.shape[1]))
    generator = np.random.default_rng(seed_for(seed, "blur", client))
    chosen = np.argsort(generator.random(places.shape), axis=1)[:, :exchanged]
    pool = generator.permutation(np.take_along_axis(places, chosen, axis=1).ravel())
    np.put_along_axis(places, chosen, pool.reshape(chosen.shape), axis=1)
    table = np.array([np.bincount(row, minlength=classes) for row in places])
    order = [(*labels, *(label for label in range(classes) if label not in labels)) for labels in sharp.windows]
    return Schedule.of_table(table, order)


def _dirichlet(client: int, seed: int, classes: int, settings: StreamConfig) -> Schedule:
    """Draw each class's weight anew with the probability of a drift, and the classes of a chunk by their weights.

    The weights are independent gamma variables, so their shares follow the Dirichlet distribution in every round. Rounds
    and chunks that are cut short begin like longer ones.
    """
    size, shape = settings.window * settings.samples_per_class, settings.numbers["concentration"]
    logarithms = np.zeros(classes)
    table = np.zeros((settings.rounds, classes), dtype=np.int64)
    for index in range(settings.rounds):
        generator = np.random.default_rng(seed_for(seed, "class frequencies", client, index + 1))
        # The logarithm of a gamma variable, which for small shapes would itself be rounded to 0.
        fresh = np.log(generator.standard_gamma(shape + 1, classes)) + np.log1p(-generator.random(classes)) / shape
        drawn = generator.random(classes) < settings.numbers["drift"]
        logarithms = fresh if index == 0 else np.where(drawn, fresh, logarithms)
        shares = np.exp(logarithms - logarithms.max()).cumsum()
        labels = np.searchsorted(shares, generator.random(size) * shares[-1], side="right")
        table[index] = np.bincount(np.minimum(labels, classes - 1), minlength=classes)
    return Schedule.of_table(table, [range(classes)] * settings.rounds)


_KINDS: Mapping[str, Callable[[int, int, int, StreamConfig], Schedule]] = {
    "windows": _windows,
    "blurred": _blurred,
    "dirichlet": _dirichlet,
    "quantity-skew": _windows,
}
