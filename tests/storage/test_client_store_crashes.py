"""The store at every call to the file system: power cuts, full disks, and processes that are really killed."""

import errno
import json
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from support.doubles.crashes import TAILS, Disk, Tree, choices, lay_out
from support.made.stored import assert_bit_identical, assert_same, empty, learned, new_key, reply

from fedkace_flwr.errors import RunError, StateError
from fedkace_flwr.storage import encryption
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore

ROUNDS = 4
COMBINATIONS = settings().max_examples


def before_run(run: str) -> ClientState:
    return replace(empty(), run=run, client=3)


def state_of(run: str, number: int, *, tested: bool) -> ClientState:
    state = replace(learned(number), run=run, client=3, follows=number - 1, evaluated=number - 1)
    return replace(state, evaluated=number, evaluation={"accuracy": number / 7}) if tested else state


Step = tuple[str, int, bool]
"""Run, round, and whether it is the round's second part."""

ONE_RUN: list[Step] = [("1", number, tested) for number in range(1, ROUNDS + 1) for tested in (False, True)]
# Another run begins in the folder, its second round is done, and the first one is resumed.
THREE_COURSES = [*ONE_RUN[:4], *(("2", number, tested) for number in (1, 2) for tested in (False, True)), *ONE_RUN[4:6]]


def deliver(folder: Path, step: Step) -> None:
    """What a client does when a message comes, be it for the second time."""
    run, number, tested = step
    with ClientStore(folder, before_run(run)).locked() as store:
        if tested:
            state = store.before(number + 1)
            assert state.round == number
            if state.evaluated != number:
                assert_same(state, state_of(run, number, tested=False))
                store.save(state_of(run, number, tested=True))
            return
        if store.answer(number) is None:
            known = store.before(number)
            assert known.round == number - 1
            if number > 1:
                assert_same(known, state_of(run, number - 1, tested=True))
            store.save_trained(state_of(run, number, tested=False), reply(number))


def check(folder: Path, steps: list[Step], under_way: int) -> None:
    """A client's folder holds what was before the step under way, or what comes after it, and nothing else."""
    run, number, tested = steps[under_way]
    store = ClientStore(folder, before_run(run))
    found = store.before(number + 1)
    if found.round == number:
        if tested and found.evaluated < number:
            assert_same(found, state_of(run, number, tested=False))
        else:
            assert_same(found, state_of(run, number, tested=found.evaluated == number))
        assert_bit_identical(store.answer(number), reply(number))
    else:
        assert not tested
        assert store.answer(number) is None
        assert_same(found, state_of(run, number - 1, tested=True) if number > 1 else before_run(run))


def tree_of(root: Path) -> Tree:
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.name != ".lock"
    }


def files(tree: Tree) -> dict[str, bytes]:
    return {name: content for name, content in tree.items() if content is not None}


@dataclass
class Course:
    """Steps, what an uninterrupted client's disk holds after each, and the calls that it took."""

    steps: list[Step]
    disk: Disk
    ends: list[int]
    trees: list[Tree]

    def under_way(self, call: int) -> int:
        return min(sum(end <= call for end in self.ends), len(self.steps) - 1)


def recorded(root: Path, steps: list[Step]) -> Course:
    root.mkdir(mode=0o700)
    course = Course(steps, Disk(root), [], [])
    with course.disk.watched():
        for step in steps:
            deliver(client_of(root), step)
            course.ends.append(course.disk.step)
            course.trees.append(tree_of(root))
    return course


def client_of(root: Path) -> Path:
    return root / "state" / "client-003"


def go_on(root: Path, course: Course, under_way: int) -> None:
    """Deliver what is left, up to where the disk is that of a client to which nothing happened."""
    for index in range(under_way, len(course.steps)):
        deliver(client_of(root), course.steps[index])
        if files(tree_of(root)) == files(course.trees[index]):
            return
    left, whole = files(tree_of(root)), files(course.trees[-1])
    assert left.items() >= whole.items()
    # What a kill kept from being cleared away at the very end goes when the next round comes.
    run, number, _ = course.steps[-1]
    deliver(client_of(root), (run, number + 1, False))
    after = [name for name in files(tree_of(root)) if "earlier" not in name]
    assert len(after) == (2 if number == 1 else 3)


@pytest.fixture(params=["one run", "three courses with a key"])
def course(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    if request.param == "one run":
        return recorded(tmp_path / "disk", ONE_RUN)
    monkeypatch.setenv(encryption.VARIABLE, new_key())
    monkeypatch.setattr(os, "urandom", bytes)  # so that the files of two courses can be compared
    return recorded(tmp_path / "disk", THREE_COURSES)


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rebuilt disk holds need not outlive this machine."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def crashes(disk: Disk, calls: Iterable[int]) -> Iterator[tuple[int, Tree]]:
    """What crashes after each call may leave, each different outcome once."""
    met = set()
    for call in calls:
        for happened in choices(call).values():
            for tail in TAILS.values():
                tree = disk.crashed(call, happened, tail)
                if (call, frozenset(tree.items())) not in met:
                    met.add((call, frozenset(tree.items())))
                    yield call, tree


def test_the_disk_of_these_tests_can_lose_what_was_not_synced(tmp_path: Path) -> None:
    """A store that does not sync would not pass: its file is lost, or is there and empty."""
    (tmp_path / "disk").mkdir()
    disk, path = Disk(tmp_path / "disk"), tmp_path / "disk" / "file"
    with disk.watched():
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(descriptor, b"content")
        os.close(descriptor)
        os.replace(path, path.with_suffix(".done"))
    left = [tree for _, tree in crashes(disk, [disk.step])]
    for tree in ({}, {"file.done": b""}, {"file.done": b"con"}, {"file.done": b"content"}):
        assert tree in left


@pytest.mark.slow
@pytest.mark.usefixtures("no_syncs")
def test_after_a_power_cut_at_any_call_the_round_has_happened_or_not(tmp_path: Path, course: Course) -> None:
    assert course.disk.step >= 100
    outcomes = 0
    for call, tree in crashes(course.disk, range(course.disk.step + 1)):
        lay_out(tree, tmp_path / "crashed")
        check(client_of(tmp_path / "crashed"), course.steps, course.under_way(call))
        go_on(tmp_path / "crashed", course, course.under_way(call))
        shutil.rmtree(tmp_path / "crashed")
        outcomes += 1
    assert outcomes > 2 * course.disk.step


@pytest.mark.slow
@pytest.mark.usefixtures("no_syncs")
def test_more_power_cuts_while_the_first_is_made_good(tmp_path: Path, course: Course) -> None:
    chance, whole = random.Random(20), files(course.trees[-1])
    for number in range(COMBINATIONS):
        disk, ends, done = course.disk, course.ends, 0
        for _ in range(3):
            call = chance.randint(0, disk.step)
            done = min(done + sum(end <= call for end in ends), len(course.steps) - 1)
            tree = disk.crashed(
                call, chance.choice(list(choices(number).values())), chance.choice(list(TAILS.values()))
            )
            place = tmp_path / "crashed"
            shutil.rmtree(place, ignore_errors=True)
            lay_out(tree, place)
            check(client_of(place), course.steps, done)
            disk, ends = Disk(place), []
            with disk.watched():
                for step in course.steps[done : done + 3]:
                    deliver(client_of(place), step)
                    ends.append(disk.step)
        for step in course.steps[done + 3 :]:
            deliver(client_of(place), step)
        assert files(tree_of(place)).items() >= whole.items()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_a_call_that_fails_costs_one_line_and_no_state(tmp_path: Path, course: Course, number: int) -> None:
    failures = 0
    for index, step in enumerate(course.steps):
        call = 0
        while True:
            call += 1
            root = tmp_path / "failing"
            lay_out(course.trees[index - 1] if index else {}, root)
            disk = Disk(root)
            try:
                with disk.watched(call, number):
                    deliver(client_of(root), step)
            except StateError as error:
                line = str(error)
                failures += 1
                assert str(client_of(root)) in line and os.strerror(number) in line and "\n" not in line
                assert not list(root.rglob("*.partial"))
                if client_of(root).exists():
                    check(client_of(root), course.steps, index)
            if disk.step >= call:  # it failed, though the step may not have minded
                go_on(root, course, index)
            shutil.rmtree(root)
            if disk.step < call:
                break
    assert failures > 50


@pytest.mark.usefixtures("no_syncs")
def test_after_a_power_cut_the_server_finds_this_checkpoint_or_the_one_before(tmp_path: Path) -> None:
    def made(number: int) -> Checkpoint:
        return Checkpoint(number, "1", {"w": np.full(3, number, np.float32)}, {}, {"n": number})

    (tmp_path / "disk").mkdir(mode=0o700)
    disk, ends = Disk(tmp_path / "disk"), []
    with disk.watched():
        for number in (1, 2, 3, 4):
            Checkpoints(tmp_path / "disk" / "run" / "server").save(made(number))
            ends.append(disk.step)
    whole, place = files(tree_of(tmp_path / "disk")), tmp_path / "crashed"
    for call, tree in crashes(disk, range(disk.step + 1)):
        done = sum(end <= call for end in ends)
        lay_out(tree, place)
        store = Checkpoints(place / "run" / "server")
        found = store.newest()
        assert (found.round if found else 0) in (done, done + 1)
        if found:
            assert found.weights["w"].tolist() == [found.round] * 3
        for number in range(found.round + 1 if found else 1, 6):
            store.save(made(number))
        assert set(files(tree_of(place))) == {
            name.replace("4.npz", "5.npz").replace("3.npz", "4.npz") for name in whole
        }
        shutil.rmtree(place)


def test_a_folder_that_may_not_be_written_costs_one_line(tmp_path: Path) -> None:
    """By a user without rights, in a process of its own: root may write everywhere."""
    folder = tmp_path / "client-000"
    ClientStore(folder, empty()).save_trained(learned(1), reply(1))
    folder.chmod(0o500)
    if os.geteuid() == 0:
        for path in [folder, *folder.iterdir()]:
            os.chown(path, 65534, 65534)
    descriptor = os.open(folder, os.O_RDONLY)  # a way in that the folders above it do not bar

    def work() -> str:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        os.fchdir(descriptor)
        here = Path()
        assert ClientStore(here, empty()).before(2).round == 1
        try:
            ClientStore(here, empty()).save_trained(learned(2), reply(2))
        except StateError as error:
            return f"{type(error).__name__}: {error}"
        return "saved"

    assert "cannot be written (Permission denied)" in in_a_child(work)
    os.close(descriptor)
    folder.chmod(0o700)
    assert_same(ClientStore(folder, empty()).before(2), learned(1))


def in_a_child(work: Callable[[], str]) -> str:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside PyTorch's idle threads: nothing is computed
        child = os.fork()
    if child == 0:
        try:
            result = work()
        except BaseException as error:
            result = repr(error)
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as file:
        result = file.read()
    os.waitpid(child, 0)
    return result


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_that_are_killed_lose_no_round(tmp_path: Path) -> None:
    """Children store rounds as fast as they can, each from where the last one was killed."""
    folder, chance, known, kills = tmp_path / "client-003", random.Random(5), 0, 60
    for _ in range(kills):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                with ClientStore(folder, empty()).locked() as store:
                    number = store.before(1_000_000).round
                    while True:
                        number += 1
                        store.save_trained(replace(learned(number), follows=number - 1), reply(number))
                        os.write(writing, json.dumps(number).encode() + b"\n")
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8") as acknowledged:
            known = max([known, *(int(acknowledged.readline()) for _ in range(chance.randint(1, 3)))])
            time.sleep(chance.random() / 50)  # the moment of the kill; nothing depends on it
            os.kill(child, signal.SIGKILL)
            known = max([known, *(int(line) for line in acknowledged if line.endswith("\n"))])
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status)
        store = ClientStore(folder, empty())
        found = store.before(1_000_000)
        assert found.round in (known, known + 1)
        assert_same(found, learned(found.round))
        assert_bit_identical(store.answer(found.round), reply(found.round))
        assert not list(folder.glob("*.corrupt*"))
        known = found.round
    assert known > kills


def test_a_checkpoint_of_another_key_or_version_is_no_reason_to_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Checkpoints(tmp_path)
    store.save(Checkpoint(1, "1", {"w": np.zeros(1)}))
    monkeypatch.setenv("FEDKACE_STATE_KEY", "A" * 43 + "=")
    store.save(Checkpoint(2, "1", {"w": np.zeros(1)}))
    found = store.newest()
    assert found is not None and found.round == 2
    monkeypatch.delenv("FEDKACE_STATE_KEY")
    with pytest.raises(RunError, match=r"checkpoint-000002\.npz: it is encrypted and FEDKACE_STATE_KEY is not set"):
        store.newest()
