"""The stream: which samples a client receives in each round (paper, sections 3, 5.1 and A.1).

Pure and seeded. :mod:`fedkace_flwr.data.schedules` says how many samples of each class a chunk holds; here they are
drawn, none of them twice for one client, and it is checked that the data set has enough.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedkace_flwr.data.schedules import Counts, schedule_of
from fedkace_flwr.errors import StreamError
from fedkace_flwr.sections import StreamConfig
from fedkace_flwr.seeding import seed_for

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClientStream:
    """What one client receives, round by round.

    Attributes
    ----------
    windows : tuple of tuple of int
        Classes of each round.
    chunks : tuple of int64 arrays
        Sample ids of each round, class by class in the order of the window.
    """

    windows: tuple[tuple[int, ...], ...]
    chunks: tuple[Ids, ...]


def client_stream(
    client: int, seed: int, ids_by_class: Sequence[Ids], settings: StreamConfig, class_names: Sequence[str] = ()
) -> ClientStream:
    """Draw the stream of one client, who never receives a sample twice.

    Clients draw independently, so two clients may hold the same sample, unless ``shared-samples`` is off: then each
    class's samples are shuffled once and dealt out to the clients, in the order of their numbers.

    Parameters
    ----------
    client, seed : int
        The client's number, from 0, and the experiment's seed.
    ids_by_class : sequence of int64 arrays
        Training sample ids of each class.
    settings : StreamConfig
        Which stream, and its keys.
    class_names : sequence of str
        For messages; by default, classes are named by their numbers.

    Raises
    ------
    ConfigError
        ``window`` or ``overlap`` does not fit the classes.
    StreamError
        A class has too few samples for the stream of this client or, if samples are not shared, of all clients up to it.
    """
    classes = len(ids_by_class)
    schedule = schedule_of(client, seed, classes, settings)
    _check(client, seed, ids_by_class, settings, class_names or range(classes))
    dealt = None if settings.shared_samples else _dealt(seed, classes, settings)[client]

    def shuffled(label: int) -> Ids:
        purpose = ("samples", client, label) if dealt is None else ("samples of all clients", label)
        ids = np.random.default_rng(seed_for(seed, *purpose)).permutation(ids_by_class[label])
        return ids if dealt is None else ids[dealt[label] :]

    left = {label: shuffled(label) for label in {label for window in schedule.windows for label in window}}
    used: Counter[int] = Counter()
    chunks = []
    for window, counts in zip(schedule.windows, schedule.counts, strict=True):
        parts = []
        for label, count in zip(window, counts, strict=True):
            parts.append(left[label][used[label] : used[label] + count])
            used[label] += count
        chunks.append(np.concatenate(parts).astype(np.int64))
    return ClientStream(windows=schedule.windows, chunks=tuple(chunks))


@lru_cache(maxsize=4)
def _dealt(seed: int, classes: int, settings: StreamConfig) -> Counts:
    """The samples of each class that clients with lower numbers receive, int64 (K + 1, C); the last row is the total."""
    needed = [_needed(client, seed, classes, settings) for client in range(settings.clients)]
    total: Counts = np.cumsum([np.zeros(classes, dtype=np.int64), *needed], axis=0)
    return total


def _needed(client: int, seed: int, classes: int, settings: StreamConfig) -> Counts:
    """The samples of each class that a client receives, int64 (C,)."""
    needed: Counts = schedule_of(client, seed, classes, settings).table(classes).sum(axis=0)
    return needed


def _check(
    client: int, seed: int, ids_by_class: Sequence[Ids], settings: StreamConfig, class_names: Sequence[object]
) -> None:
    classes, held, shared = len(ids_by_class), np.array([len(ids) for ids in ids_by_class]), settings.shared_samples
    needed = _needed(client, seed, classes, settings) if shared else _dealt(seed, classes, settings)[client + 1]
    short = np.flatnonzero(needed > held)
    if not len(short):
        return

    def suffices(asked: StreamConfig) -> bool:
        if not shared:
            return bool((_dealt(seed, classes, asked)[-1] <= held).all())
        clients = {client, *range(asked.clients)}
        return all(bool((_needed(each, seed, classes, asked) <= held).all()) for each in clients)

    rounds = _largest(settings.rounds, lambda value: suffices(replace(settings, rounds=value)))
    samples = _largest(settings.samples_per_class, lambda value: suffices(replace(settings, samples_per_class=value)))
    label, kind = int(short[0]), "" if settings.kind == "windows" else f"stream = {settings.stream!r}, "
    who = f"client {client}" if shared else f"shared-samples = false: clients up to {client} together"
    possible = [
        f"{most} {what}"
        for most, what in ((rounds, "rounds"), (samples, "samples per class and round"))
        if most  # neither if both are too high
    ]
    remedy = (
        f"at most {' or '.join(possible)} are possible"
        if possible
        else (f"lower both keys{'' if shared else ', or clients'}, or add samples of that class")
    )
    raise StreamError(
        f"{kind}samples-per-class = {settings.samples_per_class}, rounds = {settings.rounds}: {who} would need "
        f"{needed[label]} training samples of class {class_names[label]}, the data set has {held[label]}; {remedy}"
    )


def _largest(limit: int, suffices: Callable[[int], bool]) -> int:
    """The largest number below ``limit`` that suffices, or 0; what is larger than a number that does not, does not."""
    return bisect_left(range(1, limit), True, key=lambda value: not suffices(value))
