"""The stream: which classes and samples a client receives in each round (paper, sections 3, 5.1 and A.1).

Pure and seeded. A client shuffles the classes once into a cyclic list and slides a window along it. A chunk holds the
same number of samples of each class in the window; the client has not received any of them before.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedkace_flwr.errors import ConfigError, StreamError
from fedkace_flwr.seeding import seed_for


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


@dataclass(frozen=True)
class ClientStream:
    """What one client receives, round by round.

    Attributes
    ----------
    windows : tuple of tuple of int
        Classes of each round.
    chunks : tuple of int64 arrays
        Sample ids of each round, ``samples_per_class`` per class, in the order of the window.
    """

    windows: tuple[tuple[int, ...], ...]
    chunks: tuple[npt.NDArray[np.int64], ...]


def client_stream(
    client: int,
    seed: int,
    ids_by_class: Sequence[npt.NDArray[np.int64]],
    *,
    window: int,
    overlap: int,
    rounds: int,
    samples_per_class: int,
) -> ClientStream:
    """Draw the stream of one client.

    Clients draw independently, so two clients may hold the same sample; one client never receives a sample twice.

    Parameters
    ----------
    client, seed : int
        The client's number and the experiment's seed.
    ids_by_class : sequence of int64 arrays
        Training sample ids of each class.
    window, overlap, rounds, samples_per_class : int
        See :class:`fedkace_flwr.sections.StreamConfig`.

    Raises
    ------
    StreamError
        A class has too few samples for the number of times it appears within ``rounds``.
    """
    order = np.random.default_rng(seed_for(seed, "class order", client)).permutation(len(ids_by_class))
    windows = class_windows([int(label) for label in order], window, overlap, rounds)
    appearances = Counter(label for classes in windows for label in classes)
    for label, times in sorted(appearances.items()):
        needed, held = times * samples_per_class, len(ids_by_class[label])
        if needed > held:
            raise StreamError(
                f"samples-per-class = {samples_per_class}, rounds = {rounds}: client {client} would need {needed} "
                f"training samples of class {label}, the data set has {held}; at most "
                f"{_longest(windows, ids_by_class, samples_per_class)} rounds or "
                f"{min(len(ids_by_class[each]) // count for each, count in appearances.items())} "
                "samples per class and round are possible"
            )
    shuffled = {
        label: np.random.default_rng(seed_for(seed, "samples", client, label)).permutation(ids_by_class[label])
        for label in appearances
    }
    used: Counter[int] = Counter()
    chunks = []
    for classes in windows:
        parts = []
        for label in classes:
            parts.append(shuffled[label][used[label] : used[label] + samples_per_class])
            used[label] += samples_per_class
        chunks.append(np.concatenate(parts).astype(np.int64))
    return ClientStream(windows=tuple(windows), chunks=tuple(chunks))


def _longest(
    windows: Sequence[tuple[int, ...]], ids_by_class: Sequence[npt.NDArray[np.int64]], samples_per_class: int
) -> int:
    """The number of rounds before a class runs out of samples."""
    used: Counter[int] = Counter()
    for index, classes in enumerate(windows):
        for label in classes:
            used[label] += samples_per_class
            if used[label] > len(ids_by_class[label]):
                return index
    return len(windows)
