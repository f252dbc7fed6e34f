"""States and answers come back from a client's folder as they were stored."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.common import rounds_of
from support.made.stored import assert_bit_identical, assert_same, body_of, empty, learned, names, reply, train

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.storage import client_state
from fedkace_flwr.storage.client_state import Answer
from fedkace_flwr.storage.client_store import ClientStore

# Saving and finding again


@pytest.mark.parametrize("pixels", [False, True], ids=["ids", "pixels"])
def test_a_state_comes_back_as_it_was(tmp_path: Path, pixels: bool) -> None:
    state = learned(3, pixels)
    ClientStore(tmp_path / "c", empty(pixels_of=(3, 4, 4) if pixels else None)).save_trained(state, reply(3))
    again = ClientStore(tmp_path / "c", empty(pixels_of=(3, 4, 4) if pixels else None)).before(4)
    assert_same(again, state)


def test_what_is_not_set_comes_back_as_not_set(tmp_path: Path) -> None:
    state = replace(empty(), round=1)
    store = ClientStore(tmp_path, empty())
    store.save_trained(state, reply(1))
    again = store.before(2)
    assert_same(again, state)
    assert again.global_since is None
    assert again.local_accuracy is None
    assert again.extra == {}


def test_without_any_file_the_state_is_the_empty_one(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "never" / "made", empty())
    assert_same(store.before(7), empty())
    assert store.answer(7) is None
    assert not (tmp_path / "never").exists()


def test_saving_again_replaces_the_state_and_keeps_the_answer(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    changed = replace(learned(2), global_since=None, evaluation={"accuracy": 1.0})
    for _ in range(3):
        store.save(changed)
    assert_same(store.before(3), changed)
    assert_same(store.before(2), learned(1))
    assert_bit_identical(store.answer(2), reply(2))


def test_an_answer_comes_back_bit_identical(tmp_path: Path) -> None:
    train(ClientStore(tmp_path, empty()), 2)
    assert_bit_identical(ClientStore(tmp_path, empty()).answer(2), reply(2))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4), st.binary(min_size=16, max_size=16))
def test_any_number_and_any_bits_survive(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[float], bits: bytes
) -> None:
    folder = tmp_path_factory.mktemp("store")
    answer = Answer({"w": np.frombuffer(bits, dtype=np.float32)}, 1, {"numbers": numbers})
    store = ClientStore(folder, empty())
    state = replace(learned(1), evaluation={"list": numbers}, extra={"x": torch.tensor(numbers, dtype=torch.float64)})
    store.save_trained(state, answer)
    assert_bit_identical(store.answer(1), answer)
    assert_same(store.before(2), state)


def test_only_the_last_round_is_answered(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2, 3)
    assert_bit_identical(store.answer(3), reply(3))
    assert [store.answer(number) for number in (1, 2, 4)] == [None, None, None]


def test_two_generations_and_one_answer_are_kept(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2, 3, 4, 5)
    assert names(tmp_path) == ["answer-000005.npz", "state-000004.npz", "state-000005.npz"]


def test_training_an_earlier_round_again_drops_what_came_later(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2, 3, 4, 5)
    train(store, 4)
    assert names(tmp_path) == ["answer-000004.npz", "state-000004.npz"]
    assert_same(store.before(9), learned(4))
    assert store.answer(5) is None
    train(store, 1)
    assert names(tmp_path) == ["answer-000001.npz", "state-000001.npz"]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_before_a_round_stands_the_newest_generation_of_an_earlier_one(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[int]
) -> None:
    """Rounds may be missed, and the run may fall back to an earlier one."""
    folder = tmp_path_factory.mktemp("store")
    store, kept = ClientStore(folder, empty()), list[int]()
    for number in rounds:
        train(store, number)
        kept = sorted({*(other for other in kept if other < number), number})[-2:]
    for number in range(1, 15):
        expected = max((other for other in kept if other < number), default=0)
        assert store.before(number).round == expected
        assert (store.answer(number) is not None) == (number == kept[-1])


# The files themselves


def test_files_are_for_their_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        train(ClientStore(tmp_path / "clients" / "client-000", empty()), 1, 2)
    finally:
        os.umask(before)
    folder = tmp_path / "clients" / "client-000"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_files_hold_plain_arrays_and_json_and_no_pickle(tmp_path: Path) -> None:
    train(ClientStore(tmp_path, empty()), 2)
    arrays, record = body_of(tmp_path / "state-000002.npz")
    assert record["version"] == client_state.VERSION
    assert record["round"] == 2
    assert set(arrays) >= {"seen", "buffer.content", "buffer.labels", "buffer.rounds"}
    arrays, record = body_of(tmp_path / "answer-000002.npz")
    assert record["version"] == 1
    assert list(arrays) == list(reply(2).arrays)
    assert record["examples"] == 12


def test_a_number_that_json_does_not_know_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1)
    with pytest.raises(ValueError, match="JSON"):
        store.save_trained(replace(learned(2), local_accuracy=float("nan")), reply(2))
    assert_same(store.before(3), learned(1))


# Between runs


def test_another_run_with_the_same_state_dir_trains_afresh(small: Callable[..., Config], tmp_path: Path) -> None:
    """What an earlier run left there, of other settings even, must not be taken for this run's first round."""

    def run(name: str, state_dir: str, **changes: Any) -> list[dict[str, Any]]:
        run_inline(small(run_name=name, state_dir=str(tmp_path / state_dir), clients=2, rounds=1, **changes))
        return rounds_of(tmp_path / name)

    run("first", "shared")
    assert run("second", "shared", seed=9) == run("alone", "own", seed=9)
