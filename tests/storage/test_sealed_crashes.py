"""Kills and power cuts of a client with a key: whatever they leave, its ledger vouches for it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.doubles.crashes import TAILS, Disk, choices, lay_out
from support.doubles.kills import killed_at
from support.made.stored import assert_bit_identical, assert_same, empty, heard, learned, names, of_run, reply, train

from fedkace_flwr.errors import StateError, UnreadableStateError
from fedkace_flwr.storage.client_store import ClientStore


@pytest.mark.slow
def test_a_client_with_a_key_that_is_killed_at_any_call_goes_on(tmp_path: Path, key: str) -> None:
    step, killed = 0, True
    while killed:
        step += 1
        folder = tmp_path / str(step) / "client"
        store = ClientStore(folder, empty())
        train(store, 1, 2)
        killed = killed_at(step, lambda store=store: train(store, 3))  # type: ignore[misc]
        with heard() as warned:
            happened = ClientStore(folder, empty()).answer(3) is not None
            assert_same(ClientStore(folder, empty()).before(4), learned(3 if happened else 2))
            train(ClientStore(folder, empty()), 3)
            assert_same(ClientStore(folder, empty()).before(4), learned(3))
            assert_bit_identical(ClientStore(folder, empty()).answer(3), reply(3))
            train(ClientStore(folder, empty()), 4)
        assert warned == []
        assert names(folder) == ["answer-000004.npz", "ledger.npz", "state-000003.npz", "state-000004.npz"]
    assert step > 20


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a rebuilt disk holds need not outlive this machine."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("no_syncs")
def test_a_power_cut_at_any_call_is_no_attack(tmp_path: Path, key: str) -> None:
    """Whatever it leaves, the ledger vouches for it: two rounds, evaluations, another run, and a server that goes back."""
    root = tmp_path / "disk"
    root.mkdir(mode=0o700)
    disk, ends = Disk(root), list[int]()
    steps: list[tuple[str, int, bool]] = [
        *((("1", 1, False), ("1", 1, True), ("1", 2, False), ("1", 2, True))),
        *((("2", 1, False), ("1", 3, False), ("1", 2, False))),
    ]

    def deliver(folder: Path, step: tuple[str, int, bool]) -> None:
        run, number, again = step
        with ClientStore(folder, of_run(run)).locked() as store:
            if again:
                store.save(of_run(run, number))
            else:
                store.save_trained(of_run(run, number), reply(number))

    with disk.watched():
        for step in steps:
            deliver(root / "client", step)
            ends.append(disk.step)
    outcomes = set()
    for call in range(disk.step + 1):
        done = sum(end <= call for end in ends)
        for chosen in choices(call).values():
            for tail in TAILS.values():
                tree = disk.crashed(call, chosen, tail)
                if (found := (done, frozenset(tree.items()))) in outcomes:
                    continue
                outcomes.add(found)
                lay_out(tree, tmp_path / "crashed")
                client = tmp_path / "crashed" / "client"
                run, number, _ = steps[min(done, len(steps) - 1)]
                for later in range(1, number + 3):
                    ClientStore(client, of_run(run)).answer(later)
                    try:
                        ClientStore(client, of_run(run)).before(later)
                    except UnreadableStateError:
                        raise
                    except StateError as error:
                        assert "is gone" in str(error)  # the generations that a client keeps are two
                for step in steps[done:]:
                    deliver(client, step)
                assert_same(ClientStore(client, of_run("1")).before(3), of_run("1", 2))
                shutil.rmtree(tmp_path / "crashed")
    assert len(outcomes) > disk.step / 2
