"""What a new run begins with, where an earlier one has left its state: the same at every attempt, and nothing is lost."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.doubles.crashes import TAILS, Disk, choices, lay_out
from support.doubles.kills import killed_at
from support.made.stored import assert_same, heard, learned, names, new_key, of_run, read_state, reply, trained

from fedkace_flwr.errors import StateError, UnreadableStateError
from fedkace_flwr.storage import encryption
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.storage.earlier_runs import MOST_RUNS


def remembered(earlier: ClientState, empty: ClientState) -> ClientState:
    return replace(empty, seen=earlier.seen, buffer=earlier.buffer)


def forgotten(earlier: ClientState, empty: ClientState) -> ClientState:
    return empty


def store_of(folder: Path, run: str) -> ClientStore:
    return ClientStore(folder, of_run(run), remembered)


def memory_of(number: int, run: str) -> ClientState:
    return remembered(learned(number), of_run(run))


def train(folder: Path, run: str, *rounds: int) -> None:
    """As a client of a run that keeps the memory."""
    for number in rounds:
        with store_of(folder, run).locked() as store:
            store.before(number)
            store.save_trained(replace(of_run(run, number), follows=number - 1), reply(number))


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[None]:
    before = files(folder)
    yield
    assert files(folder) == before


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_a_run_begins_with_the_newest_state_of_the_run_before(tmp_path: Path) -> None:
    trained(tmp_path, "1", 1, 2)
    for _ in range(2):
        assert_same(store_of(tmp_path, "2").before(1), memory_of(2, "2"))
    assert names(tmp_path / "earlier" / "1") == ["answer-000002.npz", "passed", "state-000001.npz", "state-000002.npz"]
    train(tmp_path, "2", 1)
    assert_same(store_of(tmp_path, "2").before(1), memory_of(2, "2"))  # the round may be trained again
    train(tmp_path, "2", 2)
    with pytest.raises(StateError, match="the state before round 1 is gone"):
        store_of(tmp_path, "2").before(1)


def test_it_is_settled_when_the_run_comes_for_the_first_time(tmp_path: Path) -> None:
    """The run before may be resumed and another one may come: neither changes what this one begins with."""
    trained(tmp_path, "1", 1)
    assert_same(store_of(tmp_path, "2").before(1), memory_of(1, "2"))
    trained(tmp_path, "1", 2)
    train(tmp_path, "3", 1)
    assert_same(store_of(tmp_path, "2").before(1), memory_of(1, "2"))
    assert_same(store_of(tmp_path, "3").before(1), memory_of(2, "3"))
    assert ClientStore(tmp_path, of_run("1")).before(3).round == 2


@pytest.mark.parametrize("damaged", [1, 2], ids=["the newest state", "both states"])
def test_a_damaged_state_gives_way_to_the_one_before(tmp_path: Path, damaged: int) -> None:
    trained(tmp_path, "0", 3)
    trained(tmp_path, "1", 1, 2)
    for number in (2, 1)[:damaged]:
        path = tmp_path / f"state-{number:06d}.npz"
        path.write_bytes(path.read_bytes()[:-1])
    with heard() as warned:
        assert_same(store_of(tmp_path, "2").before(1), memory_of(1 if damaged == 1 else 3, "2"))
    assert sum("checksum" in line for line in warned) == damaged


def test_a_state_that_no_key_opens_is_no_reason_to_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(encryption.VARIABLE, new_key())
    trained(tmp_path, "1", 1)
    monkeypatch.setenv(encryption.VARIABLE, new_key())
    with kept(tmp_path), pytest.raises(UnreadableStateError, match=r"state-000001\.npz: it is encrypted, and no key"):
        store_of(tmp_path, "2").before(1)


# Crashes


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A client's folder with a run that ended."""
    folder = tmp_path / "disk" / "client-003"
    trained(folder, "1", 1, 2)
    return folder


def check(folder: Path) -> None:
    """The new run begins as if nothing had happened, or has done its first round; the run before has all its files."""
    found = store_of(folder, "2").before(2)
    assert_same(found, of_run("2", 1) if found.round else memory_of(2, "2"))
    train(folder, "2", 1)
    assert_same(store_of(folder, "2").before(1), memory_of(2, "2"))
    assert [read_state(folder / "earlier" / "1" / f"state-{number:06d}.npz").round for number in (1, 2)] == [1, 2]
    assert names(folder) == ["answer-000001.npz", "earlier", "state-000000.npz", "state-000001.npz"]
    assert not (folder / "earlier" / "2").exists()


@pytest.mark.slow
def test_killed_at_any_moment_it_begins_with_the_same(tmp_path: Path, begun: Path) -> None:
    step, killed = 0, True
    while killed:
        step += 1
        folder = tmp_path / str(step) / "client-003"
        shutil.copytree(begun, folder)
        killed = killed_at(step, lambda folder=folder: train(folder, "2", 1))  # type: ignore[misc]
        check(folder)
    assert step > 20


@pytest.mark.slow
def test_after_a_power_cut_at_any_call_it_begins_with_the_same(
    tmp_path: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    disk = Disk(begun.parent)
    with disk.watched():
        train(begun, "2", 1)
    for call in range(disk.step + 1):
        for happened in choices(call).values():
            for tail in TAILS.values():
                lay_out(disk.crashed(call, happened, tail), tmp_path / "crashed")
                check(tmp_path / "crashed" / "client-003")
                shutil.rmtree(tmp_path / "crashed")


# Many runs


def runs_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "earlier").iterdir() if any(path.glob("*-*")))


def test_a_device_takes_part_in_any_number_of_runs_that_keep_its_memory(tmp_path: Path) -> None:
    for number in range(MOST_RUNS + 4):
        train(tmp_path, f"{number:02d}", 1)
    assert runs_in(tmp_path) == [f"{number:02d}" for number in range(3, MOST_RUNS + 3)]


def test_what_no_later_run_has_taken_up_is_not_removed_for_one(tmp_path: Path) -> None:
    """Neither a run before a fresh start, nor one before a run that took a part, nor one before a resumed one."""
    train(tmp_path, "old", 1)
    trained(tmp_path, "fresh", 1)
    with ClientStore(tmp_path, of_run("part"), forgotten).locked() as store:
        assert len(store.before(1).buffer) == 0
    train(tmp_path, "further", 1)
    train(tmp_path, "next", 1)
    train(tmp_path, "further", 2)
    for number in range(MOST_RUNS + 2):
        train(tmp_path, f"{number:02d}", 1)
    assert {"old", "fresh", "next"} <= set(runs_in(tmp_path)) and len(runs_in(tmp_path)) == MOST_RUNS
    for number in range(MOST_RUNS - 3):
        trained(tmp_path, f"new{number}", 1)
    with kept(tmp_path), pytest.raises(StateError, match="the states of 8 earlier runs are kept already"):
        train(tmp_path, "refused", 1)
