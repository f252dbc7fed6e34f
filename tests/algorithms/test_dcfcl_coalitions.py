"""The coalition game, against brute force, against a literal reading of the algorithm, and on cases with a known end."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from fedkace_flwr.algorithms.dcfcl_coalitions import (
    LARGEST_EXACT,
    CoalitionGame,
    Formation,
    all_coalitions,
    form_coalitions,
)

Partition = tuple[tuple[int, ...], ...]


def game_of(updates: np.ndarray, models: np.ndarray | None = None, sizes: object = None, epsilon: float = 0.0):  # type: ignore[no-untyped-def]
    models = np.zeros_like(updates) if models is None else models
    sizes = np.ones(len(updates)) if sizes is None else np.asarray(sizes, dtype=np.float64)
    return CoalitionGame(updates @ updates.T, models @ models.T, sizes, epsilon)


def mask(coalition: object, players: int) -> np.ndarray:
    row = np.zeros((1, players), dtype=bool)
    row[0, list(coalition)] = True  # type: ignore[call-overload]
    return row


def singletons(players: int) -> list[list[int]]:
    return [[player] for player in range(players)]


def formed(game: CoalitionGame, start: object = None, exact_up_to: int = LARGEST_EXACT) -> Formation:
    return form_coalitions(game.benefit, singletons(len(game.sizes)) if start is None else start, exact_up_to)  # type: ignore[arg-type]


def is_partition(partition: Partition, players: int) -> bool:
    return all(partition) and sorted(player for coalition in partition for player in coalition) == list(range(players))


def blocks(owners: list[int], noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """Updates with a part common to the block, opposed between blocks, and a part of each player's own.

    Averaging wears the own parts down, so that within its block a player gains by company.
    """
    players, count = len(owners), max(owners) + 1
    common = 1.5 * (np.eye(count) - 1 / count)[owners]
    return np.hstack([common, np.eye(players)]) + noise * np.random.default_rng(seed).normal(
        size=(players, players + count)
    )


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@given(st.integers(0, 10**6), st.integers(2, 6), st.floats(0, 2))
def test_benefit_is_the_similarity_with_the_explicit_mean_of_the_others(
    seed: int, players: int, epsilon: float
) -> None:
    rng = np.random.default_rng(seed)
    updates, models = (
        rng.normal(size=(players, 9)) * rng.uniform(0.01, 100, size=(players, 1)),
        rng.normal(size=(players, 7)),
    )
    sizes = rng.integers(1, 500, size=players)
    game = game_of(updates, models, sizes, epsilon)
    for size in range(2, players + 1):
        for coalition in combinations(range(players), size):
            for player in coalition:
                others = [p for p in coalition if p != player]
                mean_update, mean_model = (
                    np.average(v[others], axis=0, weights=sizes[others]) for v in (updates, models)
                )
                expected = cosine(updates[player], mean_update) + epsilon * cosine(models[player], mean_model)
                assert game.benefit(player, mask(coalition, players))[0] == pytest.approx(expected, abs=1e-9)


def test_the_benefit_of_a_pair_is_its_affinity_and_mutual() -> None:
    rng = np.random.default_rng(3)
    updates, models = rng.normal(size=(4, 6)), rng.normal(size=(4, 6))
    game = game_of(updates, models, [1, 7, 2, 3], 0.2)
    for first, second in combinations(range(4), 2):
        affinity = cosine(updates[first], updates[second]) + 0.2 * cosine(models[first], models[second])
        pair = mask((first, second), 4)
        assert game.benefit(first, pair)[0] == pytest.approx(affinity, abs=1e-12)
        assert game.benefit(second, pair)[0] == pytest.approx(affinity, abs=1e-12)


def test_being_alone_is_worth_nothing() -> None:
    game = game_of(np.ones((3, 2)), np.ones((3, 2)), epsilon=0.5)
    assert game.benefit(1, mask([1], 3)).tolist() == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("players", [1, 2, 3, 10, 24])
def test_equal_positive_affinities_give_the_grand_coalition(players: int) -> None:
    updates = np.eye(players) + 0.5  # every pair has the same positive cosine, every player the same length
    result = formed(game_of(updates))
    assert result.partition == (tuple(range(players)),)
    assert result.passes <= players + 1


@pytest.mark.slow
@pytest.mark.parametrize("owners", [[0, 1], [0, 0, 1, 1], [0, 1, 0, 1, 1, 0, 1], [0] * 5 + [1] * 5, [0, 1] * 12])
def test_two_opposed_blocks_give_exactly_the_two(owners: list[int]) -> None:
    expected = tuple(tuple(p for p, owner in enumerate(owners) if owner == block) for block in (0, 1))
    for exact_up_to in (LARGEST_EXACT, 0):
        assert formed(game_of(blocks(owners)), exact_up_to=exact_up_to).partition == expected
    if len(owners) <= LARGEST_EXACT:
        assert formed(game_of(blocks(owners, noise=0.01))).partition == expected


@pytest.mark.parametrize("players", [2, 5, 10, 22])
def test_mutual_opposition_leaves_everyone_alone(players: int) -> None:
    updates = np.eye(players) - 1 / players  # corners of a simplex: all pairwise cosines are negative
    result = formed(game_of(updates))
    assert result.partition == tuple((player,) for player in range(players))
    assert result.benefits.tolist() == [0.0] * players and result.passes == 1


def test_similar_models_can_unite_whom_updates_leave_apart() -> None:
    updates, models = np.eye(4) - 0.25, np.ones((4, 3))
    assert len(formed(game_of(updates, models, epsilon=0.0)).partition) == 4
    assert all(len(coalition) > 1 for coalition in formed(game_of(updates, models, epsilon=2.0)).partition)


def table_game(seed: int, players: int, coarse: bool):  # type: ignore[no-untyped-def]
    """A game of arbitrary pay-offs; coarse ones have many ties."""
    rng = np.random.default_rng(seed)
    table = (
        rng.integers(-2, 4, size=(players, 2**players)).astype(float)
        if coarse
        else rng.normal(size=(players, 2**players))
    )
    powers = 2 ** np.arange(players)
    for player in range(players):
        table[player, powers[player]] = 0.0
    return lambda player, members: table[player, members.astype(np.int64) @ powers]


def literally(benefit, start: list[frozenset[int]], players: int):  # type: ignore[no-untyped-def]
    """Algorithms 1 and 2 word by word."""

    def value(player: int, coalition: frozenset[int]) -> float:
        return float(benefit(player, mask(coalition, players))[0])

    subsets = [frozenset(c) for size in range(1, players + 1) for c in combinations(range(players), size)]
    present, before, result, passes = set(start), None, set(), 0
    while present and present != before:
        passes += 1
        before = set(present)
        count: dict[frozenset[int], int] = {}
        for candidate in subsets:
            of = {player: next(c for c in present if player in c) for player in candidate}
            changes = [value(player, candidate) - value(player, of[player]) for player in candidate]
            if all(change >= -1e-9 for change in changes) and any(change > 1e-9 for change in changes):
                present = {candidate} | {c - candidate for c in present if c - candidate}
                count = {c: count.get(c, 0) + 1 for c in present}
        if not count:
            break
        stable = sorted(present, key=lambda c: (-count[c], -len(c), sorted(c)))[0]
        result.add(stable)
        present.remove(stable)
        subsets = [candidate for candidate in subsets if not candidate & stable]
    return tuple(sorted(tuple(sorted(c)) for c in result | present)), passes


@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans(), st.data())
def test_any_game_ends_in_a_partition_as_the_algorithm_says(
    seed: int, players: int, coarse: bool, data: st.DataObject
) -> None:
    benefit = table_game(seed, players, coarse)
    owners = data.draw(st.lists(st.integers(0, players - 1), min_size=players, max_size=players))
    start = [[p for p in range(players) if owners[p] == owner] for owner in sorted(set(owners))]
    result = form_coalitions(benefit, start)
    assert is_partition(result.partition, players)
    assert result.passes <= players + 1
    assert (result.partition, result.passes) == literally(benefit, [frozenset(c) for c in start], players)
    for coalition in result.partition:
        for player in coalition:
            assert result.benefits[player] == benefit(player, mask(coalition, players))[0]


@examples(0.4)
@given(st.integers(0, 10**6), st.integers(4, 9))
def test_few_candidates_end_in_a_partition_too(seed: int, players: int) -> None:
    benefit = table_game(seed, players, False)
    for exact_up_to in (0, 3):
        result = form_coalitions(benefit, singletons(players), exact_up_to)
        assert is_partition(result.partition, players) and result.passes <= players + 1


@examples(0.6)
@given(st.permutations(range(8)))
def test_names_of_the_players_do_not_matter(order: list[int]) -> None:
    updates = blocks([0, 0, 0, 1, 1, 2, 2, 2], noise=0.02)
    plain = formed(game_of(updates))
    renamed = formed(game_of(updates[order]))
    assert {frozenset(order[p] for p in c) for c in renamed.partition} == {frozenset(c) for c in plain.partition}
    assert len(plain.partition) == 3


@pytest.mark.parametrize("owners", [[0, 0, 1, 1], [0, 1, 0, 1, 2, 2], [0] * 6])
def test_a_stable_partition_stays_when_the_game_is_played_again(owners: list[int]) -> None:
    game = game_of(blocks(owners) if len(set(owners)) > 1 else np.eye(len(owners)) + 0.5)
    first = formed(game)
    again = formed(game, first.partition)
    assert again.partition == first.partition and again.passes == 1


def test_merges_pass_by_what_no_pair_leads_to() -> None:
    """Three gain together, and any two of them lose; whom it takes a jump to find, one step at a time does not."""

    def benefit(player: int, members: np.ndarray) -> np.ndarray:
        together = {(0, 1, 2): 1.0, (player,): 0.0}
        return np.array([together.get(tuple(np.flatnonzero(row).tolist()), -1.0) for row in members])

    alone = ((0,), (1,), (2,), (3,))
    assert form_coalitions(benefit, singletons(4)).partition == ((0, 1, 2), (3,))
    assert form_coalitions(benefit, singletons(4), 0).partition == alone
    assert form_coalitions(benefit, singletons(4), 3).partition == alone
    assert form_coalitions(benefit, [[0, 1], [2], [3]], 0).partition == ((0, 1, 2), (3,))


def test_what_is_left_of_a_broken_coalition_stays_together() -> None:
    wanted = {frozenset([1, 3]): 2.0, frozenset([0, 1, 2]): 1.0, frozenset([0, 2]): 0.5}

    def benefit(player: int, members: np.ndarray) -> np.ndarray:
        return np.array([wanted.get(frozenset(np.flatnonzero(row).tolist()), 0.0) for row in members])

    assert form_coalitions(benefit, [[0, 1, 2], [3]]).partition == ((0, 2), (1, 3))


def test_updates_of_no_length_and_opposed_updates_give_no_nan() -> None:
    with np.errstate(all="raise"):
        still = game_of(np.zeros((4, 3)), np.zeros((4, 3)), epsilon=0.2)
        assert formed(still).partition == ((0,), (1,), (2,), (3,))
        opposed = game_of(np.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
        assert opposed.benefit(2, mask([0, 1, 2], 4)).tolist() == [0.0]
        result = formed(opposed)
    assert np.isfinite(result.benefits).all() and is_partition(result.partition, 4)


@pytest.mark.parametrize("players", [1, 3, 7, 13])
def test_every_coalition_is_a_candidate_once_and_in_order(players: int) -> None:
    found = [
        tuple(np.flatnonzero(row).tolist())
        for block in all_coalitions([frozenset(range(players))], players)
        for row in block
    ]
    assert found == [c for size in range(1, players + 1) for c in combinations(range(players), size)]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_twenty_players_are_exact() -> None:
    owners = [0, 1, 2, 0, 1] * 4
    result = formed(game_of(blocks(owners, noise=0.02)))
    assert result.partition == tuple(tuple(p for p, owner in enumerate(owners) if owner == block) for block in range(3))
