"""The records of states: files of earlier versions are migrated, others are refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.made.stored import assert_same, body_of, empty, heard, learned, names, put, reply, train
from support.systems.in_process import Federation

from fedkace_flwr.clients.fedkace import GAPS
from fedkace_flwr.config import Config
from fedkace_flwr.errors import StateError
from fedkace_flwr.messaging import wire
from fedkace_flwr.storage.client_state import VERSION, migrated, read_state
from fedkace_flwr.storage.client_store import ClientStore

Make = Callable[..., Config]


def as_version_1(path: Path, gaps: object, switched_at: object) -> None:
    """Write a state file anew as version 1 of the program did, field by field."""
    arrays, record = body_of(path)
    old = {
        "version": 1,
        **{name: record[name] for name in ("run", "client", "round", "follows")},
        "gaps": gaps,
        "switched_at": switched_at,
        **{name: record[name] for name in ("local_accuracy", "evaluated", "evaluation")},
    }
    assert set(record) - set(old) == {"global_since", "local_class_accuracy"}
    put(path, {name: array for name, array in arrays.items() if name != f"extra.{GAPS}"}, old)


@pytest.mark.parametrize(("gaps", "switched_at"), [([0.1, 1 / 3, 0.0], 4), ([0.25], None), ([], None), ([], 2)])
def test_a_file_of_version_1_is_read(tmp_path: Path, gaps: list[float], switched_at: int | None) -> None:
    train(ClientStore(tmp_path, empty()), 1, 2)
    as_version_1(tmp_path / "state-000002.npz", gaps, switched_at)
    extra = {**learned(2).extra, **({GAPS: torch.tensor(gaps, dtype=torch.float64)} if gaps else {})}
    expected = replace(learned(2), global_since=switched_at, local_class_accuracy=[], extra=extra)
    with heard() as warned:
        found = ClientStore(tmp_path, empty()).before(3)
    assert_same(found, expected)
    assert_same(read_state(tmp_path / "state-000002.npz"), expected)
    assert warned == []
    store = ClientStore(tmp_path, empty())
    store.save(found)
    assert body_of(tmp_path / "state-000002.npz")[1]["version"] == VERSION
    assert_same(store.before(3), expected)


def test_a_file_of_version_2_is_read(tmp_path: Path) -> None:
    train(ClientStore(tmp_path, empty()), 1, 2)
    path = tmp_path / "state-000002.npz"
    arrays, record = body_of(path)
    del record["local_class_accuracy"]
    put(path, arrays, {**record, "version": 2})
    assert_same(ClientStore(tmp_path, empty()).before(3), replace(learned(2), local_class_accuracy=[]))


@pytest.mark.parametrize("wrong", [None, 0.5, "ab", ["a"], [float("nan")]])
def test_accuracies_of_classes_that_are_no_numbers_are_set_aside(tmp_path: Path, wrong: object) -> None:
    train(ClientStore(tmp_path, empty()), 1, 2)
    path = tmp_path / "state-000002.npz"
    arrays, record = body_of(path)
    put(path, arrays, {**record, "local_class_accuracy": wrong})
    with heard() as warned:
        assert_same(ClientStore(tmp_path, empty()).before(3), learned(1))
    assert len(warned) == 1 and "state-000002" in warned[0]


@pytest.mark.parametrize(
    ("gaps", "reason"), [(None, "gaps = None"), ([2**64], "gaps = "), ("ab", "gaps = 'ab'"), ([None], "gaps = ")]
)
def test_a_file_of_version_1_with_the_wrong_gaps_is_set_aside(tmp_path: Path, gaps: object, reason: str) -> None:
    train(ClientStore(tmp_path, empty()), 1, 2)
    as_version_1(tmp_path / "state-000002.npz", gaps, None)
    with heard() as warned:
        assert_same(ClientStore(tmp_path, empty()).before(3), learned(1))
    assert len(warned) == 1 and reason in warned[0]
    assert "state-000002.corrupt" in names(tmp_path)


def test_a_file_of_version_1_without_its_switch_is_damaged() -> None:
    with pytest.raises(StateError, match="switched_at"):
        migrated({}, {"gaps": []}, 1)


@pytest.mark.slow
def test_fedkace_goes_on_from_a_file_of_version_1_as_from_its_own(small: Make) -> None:
    """With the gaps of the old file, the switch comes in the same round and all numbers are the same."""

    def outcome(name: str, *, old: bool) -> list[dict[str, Any]]:
        federation, found = Federation(small(rounds=6, capacity=12, patience=1, run_name=name)), []
        for number in range(1, 7):
            federation.train(0, number)
            found.append(dict(federation.evaluate(0, number).metrics))
            path = federation.state(0, number)
            state = read_state(path)
            if old:
                as_version_1(path, state.extra[GAPS].tolist(), state.global_since)
        return [{name: value for name, value in each.items() if name not in TIMES} for each in found]

    assert outcome("new", old=False) == outcome("old", old=True)


TIMES = {wire.STARTED, wire.FINISHED, wire.EVALUATION_SECONDS}


def test_an_earlier_run_of_version_1_is_moved_aside_and_back(tmp_path: Path) -> None:
    first = ClientStore(tmp_path, replace(empty(), run="1"))
    first.save_trained(replace(learned(1), run="1"), reply(1))
    as_version_1(tmp_path / "state-000001.npz", [0.5], None)
    ClientStore(tmp_path, replace(empty(), run="2")).before(1)
    again = ClientStore(tmp_path, replace(empty(), run="1")).before(2)
    assert again.extra[GAPS].tolist() == [0.5] and again.round == 1
