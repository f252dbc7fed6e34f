"""A client's folder: whose it is, who may work in it at a time, what becomes of earlier runs, and what others can read."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.common import rounds_of
from support.made.stored import (
    assert_bit_identical,
    assert_same,
    empty,
    heard,
    learned,
    names,
    of_run,
    read_state,
    reply,
    trained,
)

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, StateError, UnreadableStateError
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.storage import atomic as durable
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.storage.paths import client_folder

ROOT = Path(__file__).parents[2]
Make = Callable[..., Config]


# The name


def test_a_machine_that_has_a_name_keeps_its_folder_whatever_its_number(small: Make) -> None:
    config = small(state_dir="/state")
    place: dict[str, Any] = {"partition-id": 1, "num-partitions": 3, "client-name": "cam-7.north_2"}
    assert str(client_folder(config, 5, 1, place)) == "/state/cam-7.north_2"
    assert str(client_folder(config, 5, 1, {**place, "client-name": ""})) == "/state/client-001"
    assert str(client_folder(config, 5, 1, {"num-partitions": 3})) == "/state/client-001"


def test_clients_that_share_a_machine_do_not_share_a_folder(small: Make) -> None:
    config = small(clients=4, state_dir="/state")
    place: dict[str, Any] = {"partition-id": 1, "num-partitions": 2, "client-name": "cam7"}
    assert [client_folder(config, 5, number, place).name for number in (1, 3)] == ["cam7", "cam7-003"]


@pytest.mark.parametrize("name", ["a/b", "..", "a" * 65, "ä", "a\nb", 7])
def test_a_name_that_will_not_do_is_refused_in_one_line(small: Make, name: Any) -> None:
    place = {"num-partitions": 3, "client-name": name}
    with pytest.raises(ConfigError, match="--node-config: client-name = ") as caught:
        client_folder(small(), 5, 1, place)
    assert "\n" not in str(caught.value) and "1 to 64 letters" in str(caught.value)


# The lock

HOLD = """
import sys
from pathlib import Path
from support.made.stored import empty, learned, reply
from fedkace_flwr.storage.client_store import ClientStore
with ClientStore(Path(sys.argv[1]), empty()).locked() as store:
    store.save_trained(learned(1), reply(1))
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> "subprocess.Popen[str]":
    """A process at work on a client."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.mark.slow
def test_two_processes_are_not_at_work_on_a_client_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "client-000"
    process = holder(folder)
    try:
        store = ClientStore(folder, empty())
        with pytest.raises(StateError, match="another process is at work on this client") as caught, store.locked(0):
            pass
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
        assert_same(store.before(2), learned(1))  # looking is free
        process.kill()
        process.wait()
        with store.locked():  # its lock went with it
            store.save_trained(learned(2), reply(2))
        assert_same(store.before(3), learned(2))
    finally:
        process.kill()
        process.communicate()


def test_a_message_for_a_client_that_is_at_work_costs_its_reply_and_nothing_else(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round goes on with the others; the folder is not touched by two at once."""
    config = small(clients=3, rounds=1, state_dir=str(tmp_path / "states"))
    monkeypatch.setattr("fedkace_flwr.storage.client_store._LOCK_SECONDS", 0.0)
    folder = client_folder(config, 0, 1, {})
    with ClientStore(folder, empty()).locked():
        run_inline(config)
    (record,) = rounds_of(Path(config.run.results_dir) / "run")
    assert "another process is at work" in str(record)
    assert names(folder) == []


def test_a_lock_is_let_go_after_an_error(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    with pytest.raises(ZeroDivisionError), store.locked():
        raise ZeroDivisionError
    with ClientStore(tmp_path, empty()).locked(0):
        pass


# Permissions


def test_a_folder_that_others_can_read_is_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "client-000"
    folder.mkdir()
    folder.chmod(0o755)
    with heard() as warned:
        trained(folder, "1", 1)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(warned) == 1 and "was open to others (mode 755)" in warned[0]


def test_a_folder_that_cannot_be_closed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without owners, such as a memory card's."""
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "chmod", lambda *args, **kwargs: None)
    with pytest.raises(StateError, match=r"is open to others \(mode 755\) and cannot be closed to them"):
        trained(tmp_path, "1", 1)
    assert list(tmp_path.glob("*.npz")) == []


def test_a_link_in_place_of_a_half_written_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "others"
    target.write_text("theirs")
    folder = tmp_path / "client-000"
    trained(folder, "1", 1)
    (folder / "state-000002.npz.partial").symlink_to(target)
    trained(folder, "1", 2)
    assert target.read_text() == "theirs"
    assert read_state(folder / "state-000002.npz").round == 2


@pytest.mark.timeout(60)
def test_a_pipe_or_a_folder_in_place_of_a_state_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state-000002.npz")
    (tmp_path / "state-000001.npz").mkdir()
    with heard() as warned:
        assert_same(ClientStore(tmp_path, empty()).before(3), empty())
    assert len(warned) == 2 and all("not a regular file" in line for line in warned)


# Earlier runs and other clients


def test_a_run_begun_by_mistake_does_not_cost_what_the_one_before_has_learnt(tmp_path: Path) -> None:
    trained(tmp_path, "1", 1, 2)
    store = ClientStore(tmp_path, of_run("2"))
    with heard() as warned:
        assert store.answer(1) is None
        assert_same(store.before(1), of_run("2"))
        store.save_trained(of_run("2", 1), reply(1))
        store.save_trained(of_run("2", 2), reply(2))
    assert len(warned) == 1 and "earlier run, 1, up to its round 2" in warned[0] and "earlier/1" in warned[0]
    assert names(tmp_path) == ["answer-000002.npz", "earlier", "state-000001.npz", "state-000002.npz"]
    assert names(tmp_path / "earlier" / "1") == ["answer-000002.npz", "state-000001.npz", "state-000002.npz"]

    again = ClientStore(tmp_path, of_run("1"))  # the earlier run is resumed
    assert again.before(3).run == "1"
    assert_bit_identical(again.answer(2), reply(2))
    again.save_trained(of_run("1", 3), reply(3))
    assert ClientStore(tmp_path, of_run("1")).before(4).round == 3
    assert ClientStore(tmp_path, of_run("2")).before(3).round == 2


def test_a_run_is_told_what_no_path_may_hold(tmp_path: Path) -> None:
    """The name of a run comes from the server."""
    trained(tmp_path / "client", "../../../elsewhere", 1)
    trained(tmp_path / "client", "2", 1)
    (place,) = (tmp_path / "client" / "earlier").iterdir()
    assert len(place.name) == 64 and names(place) == ["answer-000001.npz", "state-000001.npz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["client"]


def test_a_reply_of_another_run_is_not_given(tmp_path: Path) -> None:
    """Killed between the reply and the state of its first round, a new run must not answer for the old one."""
    trained(tmp_path, "1", 1)
    durable.write(tmp_path / "answer-000001.npz", *reply(9).to_record("2"))
    assert ClientStore(tmp_path, of_run("1")).answer(1) is None


def test_the_state_of_another_client_of_the_run_is_refused_and_left(tmp_path: Path) -> None:
    trained(tmp_path, "1", 1, client=2)
    before = (tmp_path / "state-000001.npz").read_bytes()
    store = ClientStore(tmp_path, of_run("1", client=3))
    for action in (lambda: store.before(2), lambda: store.answer(1)):
        with pytest.raises(UnreadableStateError, match="holds the state of client 2 of this run, and this is client 3"):
            action()
    assert (tmp_path / "state-000001.npz").read_bytes() == before


@pytest.mark.parametrize(
    ("told", "fits"),
    [(("a", "b", "c"), True), (("a", "b", "c", "d"), True), (("a", "b"), False), (("a", "b", "x", "c"), False)],
)
def test_the_server_may_add_classes_but_not_rename_those_that_a_client_has(
    tmp_path: Path, told: tuple[str, ...], fits: bool
) -> None:
    ClientStore(tmp_path, replace(of_run("1"), names=("a", "b", "c"))).save_trained(of_run("1", 1), reply(1))
    store = ClientStore(tmp_path, replace(of_run("1"), names=told))
    if fits:
        assert store.before(2).round == 1
        return
    with pytest.raises(UnreadableStateError, match=r"its classes are \['a', 'b', 'c'\], the server's \['a', 'b'"):
        store.before(2)


def test_damaged_files_of_one_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "state-000001.npz").write_bytes(b"damage %d" % number)
        assert ClientStore(tmp_path, empty()).before(2).round == 0
    aside = [tmp_path / f"state-000001.{name}" for name in ("corrupt", "corrupt-2", "corrupt-3")]
    assert [path.read_bytes() for path in aside] == [b"damage 0", b"damage 1", b"damage 2"]
