"""Sealed files are bound to their client, their name and their last write; files that no key protects are refused."""

import base64
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from support.made.models import constant
from support.made.stored import (
    assert_bit_identical,
    assert_same,
    body_of,
    empty,
    heard,
    learned,
    names,
    new_key,
    of_run,
    reply,
    train,
    trained,
)

from fedkace_flwr.errors import ConfigError, RunError, StateError, UnreadableStateError
from fedkace_flwr.inference import model_files
from fedkace_flwr.storage import atomic, client_state, encryption
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints
from fedkace_flwr.storage.client_state import read_state
from fedkace_flwr.storage.client_store import ClientStore


def sealed_as_before(body: bytes, key: str) -> bytes:
    """Encrypt as version 1 did, which bound a file to nothing but its key."""
    secret, mark = base64.b64decode(key), b"\x89FEDKACE-SEALED\n"
    name = hashlib.sha256(b"fedkace_flwr name of a key\0" + secret).digest()[:8]
    head = b"\1" + name + os.urandom(12)
    sealed = head + AESGCM(secret).encrypt(head[-12:], body, mark + head)
    return mark + hashlib.sha256(sealed).digest() + sealed


def to_version_1(folder: Path, key: str) -> None:
    """Rewrite a folder's plain files as an earlier version of the program encrypted them."""
    for path in folder.rglob("*.npz"):
        path.write_bytes(sealed_as_before(path.read_bytes()[32:], key))


# Files that the key does not protect


def plain(folder: Path, key: str) -> None:
    """Leave the files as they are."""


@pytest.mark.parametrize(
    ("kind", "says"), [(plain, "is not encrypted although FEDKACE_STATE_KEY is set"), (to_version_1, "in version 1")]
)
def test_what_the_key_does_not_protect_is_refused_and_left_alone(
    kind: Callable[[Path, str], None], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(ClientStore(tmp_path, empty()), 1, 2)
    key = new_key()
    kind(tmp_path, key)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")}
    monkeypatch.setenv(encryption.VARIABLE, key)
    store = ClientStore(tmp_path, empty())
    actions: list[Callable[[], object]] = [
        lambda: store.before(3),
        lambda: store.answer(2),
        lambda: train(store, 3),
        lambda: read_state(tmp_path / "state-000002.npz"),
        lambda: atomic.read_record(tmp_path / "state-000002.npz", client_state.VERSION),
    ]
    with heard() as warned:
        for action in actions:
            with pytest.raises(UnreadableStateError, match=says) as caught:
                action()
            assert "FEDKACE_STATE_MIGRATE=1" in str(caught.value) and "\n" not in str(caught.value)
    assert warned == []
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")} == before
    monkeypatch.setenv(encryption.MIGRATE, "1")
    assert_same(store.before(3), learned(2))
    assert_bit_identical(store.answer(2), reply(2))


def test_a_plain_checkpoint_and_plain_models_are_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Checkpoints(tmp_path / "run" / "server").save(Checkpoint(1, "1", {"w": np.zeros(3)}))
    model_files.write(tmp_path / "client", constant(1, 1))
    monkeypatch.setenv(encryption.VARIABLE, new_key())
    with pytest.raises(RunError, match="is not encrypted although"):
        Checkpoints(tmp_path / "run" / "server").newest()
    with pytest.raises(StateError, match="is not encrypted although"):
        model_files.load_newest(tmp_path / "client")


@pytest.mark.parametrize("kind", [plain, to_version_1])
def test_one_migrated_client_goes_on_without_the_setting(
    kind: Callable[[Path, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, "0", 1)
    trained(tmp_path, "1", 1, 2)
    key = new_key()
    kind(tmp_path, key)
    monkeypatch.setenv(encryption.VARIABLE, key)
    monkeypatch.setenv(encryption.MIGRATE, "1")
    trained(tmp_path, "1", 3, 4)
    monkeypatch.delenv(encryption.MIGRATE)
    store = ClientStore(tmp_path, of_run("1"))
    assert_same(store.before(5), of_run("1", 4))
    assert_same(store.before(4), of_run("1", 3))
    assert_bit_identical(store.answer(4), reply(4))
    trained(tmp_path, "1", 5)


@pytest.mark.parametrize("text", ["yes", "2", "true", "-1"])
def test_a_setting_that_is_none_is_refused_before_anything_is_done(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(encryption.MIGRATE, text)
    with pytest.raises(ConfigError, match=r"FEDKACE_STATE_MIGRATE = .*: must be 1"):
        train(ClientStore(tmp_path / "client", empty()), 1)
    assert list(tmp_path.iterdir()) == []


# Moved files


def test_a_sealed_file_of_another_client_is_refused_and_left_alone(tmp_path: Path, key: str) -> None:
    for name in ("client-000", "client-001"):
        train(ClientStore(tmp_path / name, empty()), 1, 2)
    for kind in ("state", "answer"):
        shutil.copy(tmp_path / "client-000" / f"{kind}-000002.npz", tmp_path / "client-001")
        store = ClientStore(tmp_path / "client-001", empty())
        with pytest.raises(UnreadableStateError, match=rf"written as 'client-000/{kind}-000002\.npz'") as caught:
            store.answer(2)
        assert f"client-001/{kind}-000002.npz" in str(caught.value) and "\n" not in str(caught.value)
        train(ClientStore(tmp_path / "again" / "client-001", empty()), 1, 2)
        shutil.rmtree(tmp_path / "client-001")
        (tmp_path / "again" / "client-001").rename(tmp_path / "client-001")


def test_a_sealed_file_under_another_name_is_set_aside(tmp_path: Path, key: str) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    shutil.copy(tmp_path / "state-000001.npz", tmp_path / "state-000005.npz")
    with heard() as warned:
        assert_same(store.before(6), learned(2))
    assert len(warned) == 1 and "written under the name 'state-000001.npz'" in warned[0]
    shutil.copy(tmp_path / "state-000002.npz", tmp_path / "answer-000002.npz")
    with heard() as warned:
        assert store.answer(2) is None
    assert len(warned) == 1 and "and not as 'answer-000002.npz'" in warned[0]


def test_a_reply_of_an_earlier_round_is_not_sent_again_as_that_of_a_later_one(tmp_path: Path, key: str) -> None:
    """A plain reply does not say which round it is of; a sealed one belongs to its name."""
    store = ClientStore(tmp_path, empty())
    train(store, 1)
    old = (tmp_path / "answer-000001.npz").read_bytes()
    train(store, 2)
    (tmp_path / "answer-000002.npz").write_bytes(old)
    with heard() as warned:
        assert store.answer(2) is None
    assert len(warned) == 1


def test_sealed_checkpoints_and_models_are_bound_to_their_run_and_client(tmp_path: Path, key: str) -> None:
    for run in ("first", "second"):
        Checkpoints(tmp_path / run / "server").save(Checkpoint(1, run, {"w": np.zeros(3)}))
    shutil.copy(tmp_path / "first/server/checkpoint-000001.npz", tmp_path / "second/server/checkpoint-000001.npz")
    with pytest.raises(RunError, match=r"written as 'first/server/checkpoint-000001\.npz'"):
        Checkpoints(tmp_path / "second" / "server").newest()
    model_files.write(tmp_path / "cam1", constant(1, 1))
    (tmp_path / "cam2").mkdir()
    shutil.copy(tmp_path / "cam1/models-000001.safetensors", tmp_path / "cam2/models-000001.safetensors")
    with pytest.raises(StateError, match=r"written as 'cam1/models-000001\.safetensors'"):
        model_files.load_newest(tmp_path / "cam2")


def test_a_folder_may_be_moved_and_reached_through_links_but_not_renamed(tmp_path: Path, key: str) -> None:
    train(ClientStore(tmp_path / "a" / "cam7", empty()), 1)
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "b" / "cam7")
    assert read_state(tmp_path / "b" / "cam7" / "state-000001.npz").round == 1
    assert_same(ClientStore(tmp_path / "link", empty()).before(2), learned(1))
    (tmp_path / "b" / "cam7").rename(tmp_path / "b" / "cam8")
    with pytest.raises(UnreadableStateError, match="give the folder its former name"):
        ClientStore(tmp_path / "b" / "cam8", empty()).before(2)


@pytest.mark.parametrize("name", ["server", "earlier", "ledger", "state-000001.npz", "\u00dcbung 1"])
def test_a_client_may_have_any_name(name: str, tmp_path: Path, key: str) -> None:
    for client in (name, "other"):
        trained(tmp_path / client, "0", 1)
        trained(tmp_path / client, "1", 1, 2)
    shutil.copy(tmp_path / "other" / "state-000002.npz", tmp_path / name / "state-000002.npz")
    with pytest.raises(UnreadableStateError, match=r"written as 'other/state-000002\.npz'"):
        ClientStore(tmp_path / name, of_run("1")).before(3)
    assert read_state(tmp_path / name / "earlier" / "0" / "state-000001.npz").run == "0"


def test_the_place_cannot_be_changed_in_the_file(tmp_path: Path, key: str) -> None:
    train(ClientStore(tmp_path / "client-000", empty()), 1)
    content = (tmp_path / "client-000" / "state-000001.npz").read_bytes().replace(b"client-000", b"client-001")
    content = content[:16] + hashlib.sha256(content[48:]).digest() + content[48:]
    (tmp_path / "client-001").mkdir(mode=0o700)
    (tmp_path / "client-001" / "state-000001.npz").write_bytes(content)
    with pytest.raises(StateError, match="changed by someone without the key"):
        read_state(tmp_path / "client-001" / "state-000001.npz")


def test_earlier_runs_are_moved_and_taken_up_again(tmp_path: Path, key: str) -> None:
    trained(tmp_path, "1", 1, 2)
    trained(tmp_path, "2", 1, 2, 3)
    trained(tmp_path, "1", 3)
    assert_bit_identical(ClientStore(tmp_path, of_run("1")).answer(3), reply(3))
    assert ClientStore(tmp_path, of_run("2")).before(4).round == 3
    for run in ("3", "4"):
        trained(tmp_path, run, 1)
    assert ClientStore(tmp_path, of_run("3")).before(2).round == 1


# Older versions that are put back


def test_an_older_version_of_a_state_that_is_put_back_is_noticed(tmp_path: Path, key: str) -> None:
    """The same round, before its evaluation: name, client and round are right."""
    store = ClientStore(tmp_path, empty())
    train(store, 1)
    old = (tmp_path / "state-000001.npz").read_bytes()
    store.save(learned(1))
    (tmp_path / "state-000001.npz").write_bytes(old)
    fresh = ClientStore(tmp_path, empty())
    for action in (lambda: fresh.before(2), lambda: fresh.answer(1)):
        with pytest.raises(UnreadableStateError, match="not what this client wrote last") as caught:
            action()
        assert str(tmp_path / "state-000001.npz") in str(caught.value) and "\n" not in str(caught.value)


def test_files_of_earlier_rounds_that_take_the_place_of_later_ones_are_noticed(tmp_path: Path, key: str) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    old = {path.name: path.read_bytes() for path in tmp_path.glob("[as]*.npz")}
    train(store, 3, 4)
    for path in tmp_path.glob("[as]*.npz"):
        path.unlink()
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableStateError, match="not what this client wrote last"):
        ClientStore(tmp_path, empty()).before(5)


def test_an_older_ledger_does_not_vouch_for_newer_files_nor_a_lost_one_for_any(tmp_path: Path, key: str) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1)
    old = (tmp_path / "ledger.npz").read_bytes()
    train(store, 2)
    kept = (tmp_path / "ledger.npz").read_bytes()
    (tmp_path / "ledger.npz").write_bytes(old)
    with pytest.raises(UnreadableStateError, match="not what this client wrote last"):
        store.before(3)
    (tmp_path / "ledger.npz").write_bytes(kept[:-1])
    with pytest.raises(UnreadableStateError, match=r"ledger\.npz: its checksum does not match"):
        store.before(3)
    (tmp_path / "ledger.npz").unlink()
    for action in (lambda: store.before(3), lambda: train(store, 3)):
        with pytest.raises(UnreadableStateError, match=r"ledger\.npz is missing") as caught:
            action()
        assert "\n" not in str(caught.value)
    (tmp_path / "ledger.npz").write_bytes(kept)
    assert_same(store.before(3), learned(2))


@pytest.mark.parametrize("damaged", [False, True])
def test_whoever_trusts_what_is_there_can_go_on_from_it(
    damaged: bool, tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ledger = ClientStore(tmp_path, empty()), tmp_path / "ledger.npz"
    train(store, 1, 2)
    ledger.write_bytes(ledger.read_bytes()[:-1]) if damaged else ledger.unlink()
    with monkeypatch.context() as patch:
        patch.setenv(encryption.MIGRATE, "1")
        assert_same(store.before(3), learned(2))
        train(store, 3)
    assert_same(store.before(4), learned(3))
    assert_same(store.before(3), learned(2))


def test_a_newest_state_that_is_gone_is_told(tmp_path: Path, key: str) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    (tmp_path / "state-000002.npz").unlink()
    with heard() as warned:
        assert_same(ClientStore(tmp_path, empty()).before(3), learned(1))
        assert_same(
            ClientStore(tmp_path, empty()).before(2), learned(1)
        )  # where it would not be used, nobody misses it
    assert len(warned) == 1 and "state-000002.npz is gone, although this client stored it" in warned[0]
    train(ClientStore(tmp_path, empty()), 2)
    with heard() as warned:
        assert_same(ClientStore(tmp_path, empty()).before(3), learned(2))
    assert warned == []


def test_a_server_that_goes_back_is_followed(tmp_path: Path, key: str) -> None:
    """It resumes from an earlier checkpoint: later rounds are given up, and that is no attack."""
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2, 3)
    with heard() as warned:
        assert_same(ClientStore(tmp_path, empty()).before(3), learned(2))
        train(ClientStore(tmp_path, empty()), 3)
        train(ClientStore(tmp_path, empty()), 4)
        assert_same(ClientStore(tmp_path, empty()).before(4), learned(3))
        train(ClientStore(tmp_path, empty()), 3)
        assert_same(ClientStore(tmp_path, empty()).before(4), learned(3))
        assert_same(ClientStore(tmp_path, empty()).before(9), learned(3))
    assert warned == []


def test_the_ledger_stays_small(tmp_path: Path, key: str) -> None:
    sizes = []
    for number in range(1, 20):
        train(ClientStore(tmp_path, empty()), number)
        sizes.append((tmp_path / "ledger.npz").stat().st_size)
    assert sizes[-1] <= sizes[2] + 1  # the round has a digit more


def test_without_a_key_there_is_no_ledger(tmp_path: Path) -> None:
    train(ClientStore(tmp_path, empty()), 1, 2)
    assert names(tmp_path) == ["answer-000002.npz", "state-000001.npz", "state-000002.npz"]
    body_of(tmp_path / "state-000002.npz")
