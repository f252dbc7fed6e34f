"""A client that is killed at any change of the disk loses no sample of its inbox and learns none twice."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.made.inboxes import FORM, RUN, SIZE, drop, names_in, numbers_of, opened

from fedkace_flwr.samples import Form, Samples
from fedkace_flwr.storage.client_state import Answer, ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.storage.folders import OpenFolder


class Crash(BaseException):
    """The process is killed here; nothing catches it."""


class Disk:
    """Counts what changes the disk, and kills the process before the k-th change."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.done = 0
        for place, name in (
            (os, "rename"),
            (os, "mkdir"),
            (os, "unlink"),
            (OpenFolder, "create"),
            (shutil, "rmtree"),
            (os, "replace"),
            (os, "fsync"),
        ):
            patch.setattr(place, name, self._counted(getattr(place, name)))

    def _counted(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                raise Crash
            self.left -= 1
            self.done += 1
            return change(*args, **kwargs)

        return counted


def empty(form: Form = FORM) -> ClientState:
    return ClientState(torch.zeros(3, dtype=torch.bool), Samples.none(form), RUN)


def learn(folder: Path, number: int, *, keep: bool, form: Form = FORM) -> None:
    """One round of a client whose model is the list of all samples that it has learned."""
    store = ClientStore(folder / "state", empty(form))
    if store.answer(number) is not None:
        return
    state = store.before(number)
    box = opened(folder / "inbox", keep=keep, bound=4, form=form)
    taken = numbers_of(box.take(number, state.round))
    if not taken:
        return
    ledger = torch.cat([state.extra.get("ledger", torch.empty(0, dtype=torch.int64)), torch.tensor(taken)])
    store.save_trained(
        replace(state, round=number, follows=state.round, extra={"ledger": ledger}), Answer({}, len(taken), {})
    )
    box.learned(number)


def ledger_of(folder: Path, number: int, form: Form = FORM) -> list[int]:
    return sorted(ClientStore(folder / "state", empty(form)).before(number + 1).extra["ledger"].tolist())


def live(folder: Path, disk: Disk, kills: list[int], *, keep: bool, skips: bool) -> list[int]:
    """Rounds until everything that arrived is learned, the process killed after each of ``kills`` further changes."""
    number, arrived, waiting = 1, 0, iter(kills)
    disk.left = next(waiting, -1)
    while number <= 3 or names_in(folder / "inbox" / "new") or disk.left >= 0:
        if arrived < number <= 3:
            left, disk.left = disk.left, -1
            taken = (
                folder / "inbox" / "new" / "same.npz"
            ).exists()  # a producer uses a name again, but replaces nothing
            drop(folder / "inbox", f"{number}.npz" if taken else "same.npz", 10 * number, 10 * number + 1)
            disk.left, arrived = left, number
        try:
            learn(folder, number, keep=keep)
        except Crash:
            disk.left = next(waiting, -1)
            number += skips  # the server goes on without this client, or asks again
            continue
        if number > 6 + len(kills):
            disk.left = -1
        number += 1
    disk.left = -1
    learn(folder, number, keep=keep)
    return ledger_of(folder, number)


EVERYTHING = [10, 11, 20, 21, 30, 31]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("skips", [True, False])
def test_a_crash_at_any_change_of_the_disk_loses_no_sample_and_learns_none_twice(
    keep: bool, skips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    live(tmp_path / "whole", disk, [], keep=keep, skips=skips)
    changes = disk.done
    assert changes > 60
    for kill in range(changes):
        folder = tmp_path / str(kill)
        assert live(folder, disk, [kill], keep=keep, skips=skips) == EVERYTHING, f"killed before change {kill}"
        files = names_in(folder / "inbox")
        assert not keep or len([name for name in files if name.endswith(".npz")]) == 3


@settings(suppress_health_check=list(HealthCheck))
@given(kills=st.lists(st.integers(0, 40), min_size=2, max_size=6), keep=st.booleans(), skips=st.booleans())
def test_crashes_during_recovery_too(
    kills: list[int], keep: bool, skips: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("life")
        assert live(folder, Disk(patch), kills, keep=keep, skips=skips) == EVERYTHING


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
def test_a_crash_while_labels_are_applied_loses_no_picture_and_learns_none_twice(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)

    def labelled(folder: Path, kill: int) -> None:
        place = folder / "inbox" / "new" / "unlabelled"
        place.mkdir(parents=True)
        for number in (1, 2, 4):
            Image.new("RGB", (SIZE, SIZE), (number, 0, 0)).save(place / f"{number}.png")
        (folder / "inbox" / "new" / "labels.csv").write_text("1.png,b\n2.png,c\n4.png,b\nnone.png,a\n")
        disk.left, disk.done = kill, 0
        with suppress(Crash):
            learn(folder, 1, keep=keep)
        disk.left = -1

    labelled(tmp_path / "whole", -1)
    changes = disk.done
    for kill in range(changes):
        folder = tmp_path / str(kill)
        labelled(folder, kill)
        for number in (1, 2):
            learn(folder, number, keep=keep)
        assert ledger_of(folder, 2) == [1, 2, 4], f"killed before change {kill}"
        texts = [path.read_text() for path in (folder / "inbox" / "rejected").glob("labels*.reason.txt")]
        assert texts and all("1 of 4 rows" in text for text in texts)
        assert names_in(folder / "inbox" / "new") == []


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
def test_a_crash_loses_no_array_and_learns_none_twice(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, form = Disk(monkeypatch), Form.array(2)

    def arrived(folder: Path, kill: int) -> None:
        new = folder / "inbox" / "new"
        (new / "unlabelled").mkdir(parents=True)
        np.save(new / "unlabelled" / "late.npy", np.array([1, 0], dtype=np.float32))
        np.savez(new / "a.npz", x=np.array([[2, 0]], dtype=np.float32), y=np.array(["c"]))
        (new / "table.csv").write_text("x,z,label\n3,0,a\n4,0,b\n")
        (new / "labels.csv").write_text("late.npy,b\n")
        disk.left, disk.done = kill, 0
        with suppress(Crash):
            learn(folder, 1, keep=keep, form=form)
        disk.left = -1

    arrived(tmp_path / "whole", -1)
    changes = disk.done
    for kill in range(changes):
        folder = tmp_path / str(kill)
        arrived(folder, kill)
        for number in (1, 2):
            learn(folder, number, keep=keep, form=form)
        assert ledger_of(folder, 2, form) == [1, 2, 3, 4], f"killed before change {kill}"
        assert names_in(folder / "inbox" / "new") == names_in(folder / "inbox" / "rejected") == []
