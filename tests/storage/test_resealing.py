"""``python -m fedkace_flwr.storage``: another key, or the first one, for files that are there; killed at any moment."""

import base64
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.doubles.kills import killed_at
from support.made.stored import assert_bit_identical, assert_same, heard, new_key, of_run, reply, trained

from fedkace_flwr.errors import UnreadableStateError
from fedkace_flwr.storage import atomic, encryption
from fedkace_flwr.storage.__main__ import main
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints
from fedkace_flwr.storage.client_state import read_state
from fedkace_flwr.storage.client_store import ClientStore

Keys = Callable[..., None]


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Set the present key, the former one, and whether unprotected files are taken over."""

    def use(now: str | None, former: str | None = None, *, migrate: bool = False) -> None:
        for variable, text in (
            (encryption.VARIABLE, now),
            (encryption.FORMER, former),
            (encryption.MIGRATE, "1" if migrate else None),
        ):
            monkeypatch.delenv(variable, raising=False)
            if text is not None:
                monkeypatch.setenv(variable, text)

    return use


def lay_in(root: Path) -> None:
    """Two clients, one with an earlier run and models, and a server."""
    trained(root / "state" / "cam1", "0", 1)
    trained(root / "state" / "cam1", "1", 1, 2)
    trained(root / "state" / "cam2", "1", 1)
    atomic.write_body(root / "state" / "cam1" / "models-000002.safetensors", b"tensors")
    Checkpoints(root / "results" / "run" / "server").save(Checkpoint(2, "1", {"w": np.zeros(3)}))


def check(root: Path) -> None:
    """Everything is as it was laid in, with the keys that are set."""
    with heard() as warned:
        store = ClientStore(root / "state" / "cam1", of_run("1"))
        assert_same(store.before(3), of_run("1", 2))
        assert_same(store.before(2), of_run("1", 1))
        assert_bit_identical(store.answer(2), reply(2))
        assert_same(ClientStore(root / "state" / "cam2", of_run("1")).before(2), of_run("1", 1))
    assert warned == []
    assert read_state(root / "state" / "cam1" / "earlier" / "0" / "state-000001.npz").run == "0"
    assert atomic.read_body(root / "state" / "cam1" / "models-000002.safetensors") == b"tensors"
    found = Checkpoints(root / "results" / "run" / "server").newest()
    assert found is not None and found.round == 2


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*-0*"))}


def test_a_rotated_key_opens_what_the_former_one_did_and_that_opens_nothing_more(
    tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = new_key(), new_key()
    keys(old)
    lay_in(tmp_path)
    before = files(tmp_path)
    keys(new, old)
    check(tmp_path)
    assert main(["rotate-key", str(tmp_path / "state"), str(tmp_path / "results")]) == 0
    assert capsys.readouterr().out == "11 files encrypted, 0 already were, 0 left as they are\n"
    after = files(tmp_path)
    assert list(after) == list(before) and not any(after[name] == before[name] for name in before)
    keys(new)
    check(tmp_path)
    trained(tmp_path / "state" / "cam1", "1", 3)
    trained(tmp_path / "state" / "cam1", "0", 2)
    keys(old)
    with pytest.raises(UnreadableStateError, match="another key"):
        read_state(tmp_path / "state" / "cam2" / "state-000001.npz")
    keys(new, old)
    assert main(["rotate-key", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("0 files encrypted, ")


@pytest.mark.slow
def test_a_rotation_that_is_killed_at_any_call_can_be_used_and_finished(
    tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = new_key(), new_key()
    keys(old)
    lay_in(tmp_path / "pristine")
    step, killed, halves = 0, True, 0
    while killed:
        step += 1
        root = tmp_path / "root"
        shutil.copytree(tmp_path / "pristine", root)
        keys(new, old)
        killed = killed_at(step, partial(main, ["rotate-key", str(root)]))
        secret = base64.b64decode(new)
        changed = [encryption.is_current(content, secret) for content in files(root).values()]
        halves += any(changed) and not all(changed)
        check(root)  # whoever has both keys
        keys(old)
        shutil.copytree(root, tmp_path / "copy")
        for path in (tmp_path / "copy").rglob(
            "cam2/state-*.npz"
        ):  # whoever has the former one alone is refused at worst
            try:
                read_state(path)
            except UnreadableStateError as error:
                assert "another key" in str(error)
        keys(new, old)
        assert main(["rotate-key", str(root)]) == 0
        keys(new)
        check(root)
        assert not list(root.rglob("*.partial"))
        shutil.rmtree(root)
        shutil.rmtree(tmp_path / "copy")
    assert step > 40 and halves > 30
    capsys.readouterr()


@pytest.mark.slow
def test_a_client_goes_on_between_a_killed_rotation_and_its_end(tmp_path: Path, keys: Keys) -> None:
    old, new = new_key(), new_key()
    for step in (1, 10, 20, 30):
        root = tmp_path / str(step)
        keys(old)
        lay_in(root)
        keys(new, old)
        assert killed_at(step, partial(main, ["rotate-key", str(root)]))
        trained(root / "state" / "cam1", "1", 3)
        assert main(["rotate-key", str(root)]) == 0
        keys(new)
        trained(root / "state" / "cam1", "1", 4)
        assert_same(ClientStore(root / "state" / "cam1", of_run("1")).before(4), of_run("1", 3))


def test_plain_files_are_encrypted_by_a_migration_and_need_no_setting_afterwards(
    tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_in(tmp_path)
    keys(new_key())
    assert main(["migrate", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "9 files encrypted, 0 already were, 0 left as they are\n"
    assert all(encryption.is_sealed(content) for content in files(tmp_path).values())
    check(tmp_path)
    old = (tmp_path / "state" / "cam2" / "state-000001.npz").read_bytes()
    trained(tmp_path / "state" / "cam1", "1", 3)
    ClientStore(tmp_path / "state" / "cam2", of_run("1")).save(of_run("1", 1))
    (tmp_path / "state" / "cam2" / "state-000001.npz").write_bytes(old)
    with pytest.raises(UnreadableStateError, match="not what this client wrote last"):
        ClientStore(tmp_path / "state" / "cam2", of_run("1")).before(2)


def test_a_migration_replaces_a_damaged_ledger(tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    keys(new_key())
    lay_in(tmp_path)
    ledger = tmp_path / "state" / "cam1" / "ledger.npz"
    ledger.write_bytes(b"damage")
    with pytest.raises(UnreadableStateError, match="ledger"):
        check(tmp_path)
    assert main(["migrate", str(tmp_path)]) == 1  # it names the damaged file, and replaces it
    assert f"{ledger}: its checksum does not match" in capsys.readouterr().err
    check(tmp_path)
    assert main(["migrate", str(tmp_path)]) == 0


@pytest.mark.slow
def test_a_migration_that_is_killed_at_any_call_can_be_finished(
    tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_in(tmp_path / "pristine")
    key, step, killed = new_key(), 0, True
    while killed:
        step += 1
        root = tmp_path / "root"
        shutil.copytree(tmp_path / "pristine", root)
        keys(key)
        killed = killed_at(step, partial(main, ["migrate", str(root)]))
        keys(key, migrate=True)
        check(root)
        keys(key)
        assert main(["migrate", str(root)]) == 0
        check(root)
        shutil.rmtree(root)
    assert step > 30
    capsys.readouterr()


def test_a_rotation_does_not_take_over_what_the_key_does_not_protect(
    tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_in(tmp_path)
    before = files(tmp_path)
    keys(new_key(), new_key())
    assert main(["rotate-key", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out == "0 files encrypted, 0 already were, 9 left as they are\n"
    lines = told.err.splitlines()
    assert len(lines) == 9 and all("is not encrypted although" in line for line in lines)
    assert files(tmp_path) == before


def test_files_in_the_wrong_place_and_damaged_ones_are_left_and_named(
    tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = new_key(), new_key()
    keys(old)
    lay_in(tmp_path)
    cam1, cam2 = tmp_path / "state" / "cam1", tmp_path / "state" / "cam2"
    shutil.copy(cam1 / "answer-000002.npz", cam2 / "answer-000002.npz")
    damaged = cam1 / "state-000001.npz"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (cam1 / "state-000009.corrupt").write_bytes(b"damage")
    (cam1 / "state-000010.npz").symlink_to(cam1 / "none")
    keys(new, old)
    assert main(["rotate-key", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out.startswith(
        "10 files encrypted, 0 already were, 3 left as they are\n1 damaged files that were set aside"
    )
    assert {line.split(": ")[1] for line in told.err.splitlines()} == {
        str(damaged),
        str(cam2 / "answer-000002.npz"),
        str(cam1 / "state-000010.npz"),
    }


def test_a_client_that_is_at_work_is_left_alone(tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = new_key(), new_key()
    keys(old)
    lay_in(tmp_path)
    before = files(tmp_path / "state" / "cam1")
    with ClientStore(tmp_path / "state" / "cam1", of_run("1")).locked():
        keys(new, old)
        assert main(["rotate-key", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "cam1: a process is at work on it" in told.err and len(told.err.splitlines()) == 1
    assert files(tmp_path / "state" / "cam1") == before
    assert main(["rotate-key", str(tmp_path)]) == 0
    keys(new)
    check(tmp_path)


@pytest.mark.parametrize(
    ("command", "now", "former", "says"),
    [
        ("rotate-key", None, "key", "FEDKACE_STATE_KEY: is not set"),
        ("rotate-key", "key", None, "FEDKACE_STATE_KEY_OLD: is not set"),
        ("rotate-key", "key", "x", "FEDKACE_STATE_KEY_OLD: must be 32 random bytes"),
        ("migrate", None, None, "FEDKACE_STATE_KEY: is not set"),
        ("migrate", "x", None, "FEDKACE_STATE_KEY: must be 32 random bytes"),
    ],
)
def test_without_its_keys_a_command_does_nothing_and_says_so_in_one_line(
    command: str,
    now: str | None,
    former: str | None,
    says: str,
    tmp_path: Path,
    keys: Keys,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lay_in(tmp_path)
    before = files(tmp_path)
    keys(*(new_key() if text == "key" else text for text in (now, former)))
    assert main([command, str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert says in told.err and told.err.count("\n") == 1 and told.out == ""
    assert files(tmp_path) == before


def test_a_folder_that_is_none_is_named(tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    keys(new_key(), new_key())
    assert main(["rotate-key", str(tmp_path / "none")]) == 2
    assert f"{tmp_path / 'none'}: is not a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_runs_as_documented(tmp_path: Path, keys: Keys) -> None:
    old, new = new_key(), new_key()
    keys(old)
    lay_in(tmp_path)
    keys(new, old)
    command = [sys.executable, "-m", "fedkace_flwr.storage", "rotate-key", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "11 files encrypted" in done.stdout and new not in done.stdout
    keys(new)
    check(tmp_path)
