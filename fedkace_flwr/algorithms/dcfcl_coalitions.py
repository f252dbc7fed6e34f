"""The coalition game of DCFCL, which decides which clients average their models (Yang et al., NeurIPS 2025, arXiv:2509.23683).

Pure NumPy. Shapes: m players, n coalitions under consideration; a coalition is a boolean mask over the players.

A player's benefit from a coalition is the similarity of its update and its model to the others' averages. It is
computed from two Gram matrices (m, m), without the vectors. Coalitions that would benefit all their members form in
turn (the paper's Algorithm 2); the one that has lasted longest is settled, and the game continues among the rest
(Algorithm 1).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Masks = npt.NDArray[np.bool_]
Coalition = frozenset[int]
Benefit = Callable[[int, Masks], Floats]
"""Map a player and n coalitions that it is a member of, bool (n, m), to its benefit in each, (n,)."""

LARGEST_EXACT = 20
"""Largest number of players for which every nonempty subset can be a candidate (2^20 - 1 subsets)."""

_TOLERANCE = 1e-9
_CANCELLED = 1e-13
_BLOCK = 4096


@dataclass(frozen=True)
class CoalitionGame:
    """The benefit of each player from each coalition.

    Attributes
    ----------
    updates, models : array
        Gram matrices float64 (m, m) of g and of theta.
    sizes : array
        float64 (m,), positive: n_p, the numbers of samples by which a coalition weights its members.
    epsilon : float
        Weight of model similarity beside update similarity.
    """

    updates: Floats
    models: Floats
    sizes: Floats
    epsilon: float

    def benefit(self, player: int, members: Masks) -> Floats:
        """u_i(S) = cos(g_i, mean of the others' g) + epsilon cos(theta_i, mean of the others' theta).

        Means are weighted by ``sizes``. The benefit of being alone is 0; a term is 0 if the player's vector or the
        others' mean is zero.

        Parameters
        ----------
        player : int
            i.
        members : array
            bool (n, m): n coalitions S, all with i.

        Returns
        -------
        array
            float64 (n,).
        """
        others = members.astype(np.float64)
        others[:, player] = 0.0
        updates, models = (_cosine(gram, player, others) for gram in self._scaled)
        return updates + self.epsilon * models

    @cached_property
    def _scaled(self) -> tuple[Floats, Floats]:
        # Scaling the vectors by their sizes turns weighted means into sums, whose lengths cancel in a cosine.
        share = self.sizes / self.sizes.sum()
        return self.updates * np.outer(share, share), self.models * np.outer(share, share)


def _cosine(gram: Floats, player: int, others: Floats) -> Floats:
    """Cosine of one vector with the sum of others, float64 0 or 1 (n, m), from all vectors' Gram matrix."""
    lengths = np.sqrt(np.diagonal(gram))
    square = np.einsum("nm,nm->n", others @ gram, others)
    solid = (square > _CANCELLED * (others @ lengths) ** 2) & (lengths[player] > 0)
    norms = np.where(solid, lengths[player] * np.sqrt(np.where(solid, square, 1.0)), 1.0)
    cosine: Floats = np.where(solid, others @ gram[player] / norms, 0.0)
    return cosine.clip(-1.0, 1.0)


@dataclass(frozen=True)
class Formation:
    """The outcome of a game.

    Attributes
    ----------
    partition : tuple of tuple of int
        Disjoint coalitions that together hold every player, members and coalitions in ascending order.
    passes : int
        Rounds of Algorithm 1, at most m + 1.
    benefits : array
        float64 (m,): each player's benefit from its coalition.
    """

    partition: tuple[tuple[int, ...], ...]
    passes: int
    benefits: Floats


def form_coalitions(benefit: Benefit, start: Iterable[Iterable[int]], exact_up_to: int = LARGEST_EXACT) -> Formation:
    """Form coalitions by merge and blocking (the paper's Algorithm 1).

    The result is not always stable, since a stable partition need not exist.

    Parameters
    ----------
    benefit : callable
        The game, for instance :meth:`CoalitionGame.benefit`.
    start : iterable of iterable of int
        The partition to begin with, of the players 0 to m - 1.
    exact_up_to : int
        Consider every subset, in time and memory of 2^m, once no more players are left; before, those of
        :func:`nearby_coalitions`.

    Notes
    -----
    Inferred: coalitions of equal size take turns in lexicographic order; of two that lasted equally long, the
    larger one is settled, then the one with the smallest members; nearby coalitions depend on the partition and are
    enumerated again up to m times per pass.
    """
    remaining = [frozenset(coalition) for coalition in start]
    players = sum(len(coalition) for coalition in remaining)
    settled: list[Coalition] = []
    passes = 0
    while remaining:
        passes += 1
        exact = sum(map(len, remaining)) <= exact_up_to
        remaining, lasted = _evolve(benefit, remaining, players, exact=exact)
        if not lasted:
            settled += remaining
            break
        stable = min(remaining, key=lambda c: (-lasted[c], -len(c), sorted(c)))
        settled.append(stable)
        remaining.remove(stable)
    partition = sorted(tuple(sorted(coalition)) for coalition in settled)
    return Formation(tuple(partition), passes, _held(benefit, settled, players))


def _evolve(
    benefit: Benefit, partition: list[Coalition], players: int, *, exact: bool
) -> tuple[list[Coalition], dict[Coalition, int]]:
    """Algorithm 2: let blocking coalitions form; return the partition and the formations that each part outlasted."""
    lasted: dict[Coalition, int] = {}
    for _ in range(1 if exact else players):
        before = partition
        blocks = all_coalitions(partition, players) if exact else nearby_coalitions(partition, players)
        current = _held(benefit, partition, players)
        for members in blocks:
            position = _first_blocking(benefit, members, current, 0)
            while position is not None:
                formed = frozenset(np.flatnonzero(members[position]).tolist())
                partition = [formed, *(rest for c in partition if (rest := c - formed))]
                lasted = {c: lasted.get(c, 0) + 1 for c in partition}
                current = _held(benefit, partition, players)
                position = _first_blocking(benefit, members, current, position + 1)
        if partition == before:
            break
    return partition, lasted


def _first_blocking(benefit: Benefit, members: Masks, current: Floats, begin: int) -> int | None:
    """The first coalition from ``begin`` on by which no member loses and some member gains."""
    left = np.arange(begin, len(members))
    gains = np.zeros(len(left), dtype=np.bool_)
    for player in range(members.shape[1]):
        inside = members[left, player]
        change = np.zeros(len(left))
        change[inside] = benefit(player, members[left[inside]]) - current[player]
        willing = change >= -_TOLERANCE  # one member who loses is enough to reject the coalition
        left, gains = left[willing], (gains | (change > _TOLERANCE))[willing]
    blocking = left[gains]
    return int(blocking[0]) if len(blocking) else None


def _held(benefit: Benefit, partition: Sequence[Coalition], players: int) -> Floats:
    """Each player's current benefit; 0 for players outside the partition."""
    held = np.zeros(players)
    for members in _masks(partition, players):
        for player in np.flatnonzero(members):
            held[player] = benefit(int(player), members[None])[0]
    return held


def _masks(coalitions: Sequence[Coalition], players: int) -> Masks:
    masks = np.zeros((len(coalitions), players), dtype=np.bool_)
    for mask, coalition in zip(masks, coalitions, strict=True):
        mask[list(coalition)] = True
    return masks


def all_coalitions(partition: Iterable[Coalition], players: int) -> Iterator[Masks]:
    """Every non-empty subset of the partition's players, by size, then lexicographically, in blocks (n, m)."""
    present = np.array(sorted(frozenset().union(*partition)))
    bits = np.arange(len(present))[::-1]  # the first player at the highest bit: lexicographic is descending
    codes = np.arange(1, 1 << len(present))
    counts = np.zeros(len(codes), dtype=np.int8)
    for bit in bits:
        counts += (codes >> bit & 1).astype(np.int8)
    codes = codes[np.lexsort((-codes, counts))]
    for begin in range(0, len(codes), _BLOCK):
        block = codes[begin : begin + _BLOCK]
        masks = np.zeros((len(block), players), dtype=np.bool_)
        masks[:, present] = block[:, None] >> bits & 1
        yield masks


def nearby_coalitions(partition: Sequence[Coalition], players: int) -> Iterator[Masks]:
    """Singletons, pairs, unions of two coalitions, and coalitions with one player more or less, in blocks (n, m)."""
    present = sorted(frozenset().union(*partition))
    found = {frozenset(pair) for pair in combinations(present, 2)} | {frozenset([player]) for player in present}
    found |= {first | second for first, second in combinations(partition, 2)}
    found |= {coalition ^ {player} for coalition in partition for player in present}
    ordered = sorted(found - {frozenset()}, key=lambda coalition: (len(coalition), sorted(coalition)))
    for begin in range(0, len(ordered), _BLOCK):
        yield _masks(ordered[begin : begin + _BLOCK], players)
