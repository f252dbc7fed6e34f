"""Encrypted files: what others can read and change, which keys open them, and where they belong."""

import base64
import hashlib
import mmap
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.common import rounds_of
from support.made.stored import (
    assert_bit_identical,
    assert_same,
    body_of,
    empty,
    heard,
    is_sealed,
    learned,
    new_key,
    of_run,
    read_state,
    reply,
    train,
    trained,
)

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, RunError, StateError, UnreadableStateError
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.inference import model_files
from fedkace_flwr.results.run_folder import RunFolder
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage import atomic, encryption
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore

Make = Callable[..., Config]


def pixels(round_number: int) -> ClientState:
    """A state with a buffer of images that would be seen in a file."""
    content = torch.full((4, 3, 4, 4), 0xAB, dtype=torch.uint8)
    labels = torch.zeros(4, dtype=torch.int64)
    return replace(learned(round_number), buffer=Samples(content, labels, labels))


NO_PIXELS = empty(pixels_of=(3, 4, 4))
ZIP = b"PK\x03\x04"  # of two bytes, chance alone writes one in a file of some kilobytes now and then


def test_what_is_encrypted_comes_back_and_cannot_be_read(tmp_path: Path, key: str) -> None:
    store = ClientStore(tmp_path, NO_PIXELS)
    store.save_trained(pixels(1), reply(1))
    assert_same(store.before(2), pixels(1))
    assert_bit_identical(store.answer(1), reply(1))
    weights = reply(1).arrays["z.weight"].tobytes()
    told = (b"\xab" * 8, weights, b"buffer", b"record", ZIP, b"NUMPY", b"z.weight")
    for path in tmp_path.glob("*.npz"):
        content = path.read_bytes()
        assert not [part for part in told if part in content]
        assert base64.b64decode(key) not in content


def test_without_a_key_the_same_search_finds_the_pixels(tmp_path: Path) -> None:
    ClientStore(tmp_path, NO_PIXELS).save_trained(pixels(1), reply(1))
    content = (tmp_path / "state-000001.npz").read_bytes()
    assert b"\xab" * 8 in content
    assert ZIP in content


def test_no_two_writes_of_one_state_are_alike(tmp_path: Path, key: str) -> None:
    store, met = ClientStore(tmp_path, NO_PIXELS), set()
    for _ in range(5):
        store.save(pixels(1))
        met.add((tmp_path / "state-000001.npz").read_bytes()[48:])
    assert len(met) == len({content[1:13] for content in met}) == 5


@pytest.mark.parametrize(
    ("held", "says"), [(None, "FEDKACE_STATE_KEY is not set"), ("another", "no key in FEDKACE_STATE_KEY opens it")]
)
def test_without_the_right_key_a_file_is_refused_and_left_alone(
    tmp_path: Path, key: str, held: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ClientStore(tmp_path, NO_PIXELS)
    store.save_trained(pixels(1), reply(1))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")}
    if held:
        monkeypatch.setenv(encryption.VARIABLE, new_key())
    else:
        monkeypatch.delenv(encryption.VARIABLE)
    path = tmp_path / "state-000001.npz"
    fresh = ClientStore(tmp_path, NO_PIXELS)
    actions: list[Callable[[], object]] = [
        lambda: fresh.before(2),
        lambda: fresh.answer(1),
        lambda: fresh.save_trained(pixels(2), reply(2)),
        lambda: read_state(path),
    ]
    with heard() as warned:
        for action in actions:
            with pytest.raises(UnreadableStateError, match=says) as caught:
                action()
            assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert warned == []
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")} == before
    monkeypatch.setenv(encryption.VARIABLE, key)
    assert_same(fresh.before(2), pixels(1))


ZEROS = base64.b64encode(bytes(32)).decode()


@pytest.mark.parametrize("text", ["x", base64.b64encode(bytes(16)).decode(), f"{ZEROS},"])
def test_what_is_no_key_is_refused_before_anything_is_done(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(encryption.VARIABLE, text)
    for action in (lambda: trained(tmp_path / "c", "1", 1), lambda: RunFolder(tmp_path / "run")):
        with pytest.raises(ConfigError, match="FEDKACE_STATE_KEY: must be 32 random bytes in base64") as caught:
            action()
        assert text not in str(caught.value).replace("openssl rand -base64 32", "").replace("base64", "") or text == "x"
    assert list(tmp_path.iterdir()) == []


def test_plain_files_are_refused_with_a_key_unless_it_says_that_they_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone could have written them."""
    client, server = tmp_path / "client", tmp_path / "run" / "server"
    train(ClientStore(client, empty()), 1, 2)
    atomic.write_body(client / "models-000001.safetensors", b"a model")
    Checkpoints(server).save(Checkpoint(1, "1", {"w": np.zeros(3)}))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*-0*")}
    key = new_key()
    monkeypatch.setenv(encryption.VARIABLE, key)
    store = ClientStore(client, empty())
    actions: list[Callable[[], object]] = [
        lambda: store.before(3),
        lambda: store.answer(2),
        lambda: train(store, 3),
        lambda: read_state(client / "state-000002.npz"),
        lambda: model_files.load_newest(client),
        lambda: Checkpoints(server).newest(),
    ]
    with heard() as warned:
        for action in actions:
            with pytest.raises((StateError, RunError), match="is not encrypted although") as caught:
                action()
            assert "FEDKACE_STATE_KEY is set; to take over plain files, append ,plain" in str(caught.value)
            assert "\n" not in str(caught.value)
    assert warned == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*-0*")} == before
    monkeypatch.setenv(encryption.VARIABLE, f"{key},plain")
    assert_same(store.before(3), learned(2))
    assert_bit_identical(store.answer(2), reply(2))
    train(store, 3, 4)
    monkeypatch.setenv(encryption.VARIABLE, key)
    assert_same(ClientStore(client, empty()).before(5), learned(4))
    assert_same(ClientStore(client, empty()).before(4), learned(3))
    assert_bit_identical(ClientStore(client, empty()).answer(4), reply(4))


def test_a_new_key_in_front_is_that_of_all_files_after_two_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = new_key(), new_key()
    monkeypatch.setenv(encryption.VARIABLE, old)
    train(ClientStore(tmp_path, empty()), 1, 2)
    monkeypatch.setenv(encryption.VARIABLE, f"{new}, {old}")
    for number in (3, 4):
        assert_same(ClientStore(tmp_path, empty()).before(number), learned(number - 1))
        assert_bit_identical(ClientStore(tmp_path, empty()).answer(number - 1), reply(number - 1))
        train(ClientStore(tmp_path, empty()), number)
    monkeypatch.setenv(encryption.VARIABLE, new)
    assert_same(ClientStore(tmp_path, empty()).before(5), learned(4))
    assert_same(ClientStore(tmp_path, empty()).before(4), learned(3))
    assert_bit_identical(ClientStore(tmp_path, empty()).answer(4), reply(4))
    monkeypatch.setenv(encryption.VARIABLE, f"plain,{new}")  # no more encryption is a change of the key as well
    train(ClientStore(tmp_path, empty()), 5, 6)
    monkeypatch.delenv(encryption.VARIABLE)
    assert_same(ClientStore(tmp_path, empty()).before(7), learned(6))
    body_of(tmp_path / "state-000006.npz")


@pytest.mark.parametrize("at", [0, 20, 48, 90])
def test_a_changed_encrypted_file_is_set_aside(tmp_path: Path, key: str, at: int) -> None:
    store = ClientStore(tmp_path, NO_PIXELS)
    for number in (1, 2):
        store.save_trained(pixels(number), reply(number))
    path = tmp_path / "state-000002.npz"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with heard() as warned:
        assert_same(ClientStore(tmp_path, NO_PIXELS).before(3), pixels(1))
    assert len(warned) == 1
    assert (tmp_path / "state-000002.corrupt").read_bytes() == content


def test_who_does_not_have_the_key_cannot_write_a_file_that_is_read(tmp_path: Path, key: str) -> None:
    """A checksum can be made right by anyone; the cipher's own can not."""
    path = tmp_path / "file.npz"
    atomic.write(path, {"w": np.zeros(100)}, {})
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    content[16:48] = hashlib.sha256(content[48:]).digest()
    path.write_bytes(content)
    with pytest.raises(UnreadableStateError, match="someone without the key has changed it"):
        atomic.read(path)


@pytest.mark.parametrize("version", [2, 4])
def test_another_version_of_the_encryption_is_refused_and_left_alone(tmp_path: Path, key: str, version: int) -> None:
    train(ClientStore(tmp_path, empty()), 1)
    path = tmp_path / "state-000001.npz"
    rest = bytes([version]) + path.read_bytes()[49:]
    path.write_bytes(path.read_bytes()[:16] + hashlib.sha256(rest).digest() + rest)
    with pytest.raises(UnreadableStateError, match=f"encrypted in version {version} and this program reads version 3"):
        ClientStore(tmp_path, empty()).before(2)
    assert path.read_bytes()[48:] == rest


def test_what_is_too_large_to_be_encrypted_is_refused_in_one_line(tmp_path: Path, key: str) -> None:
    with mmap.mmap(-1, 2**31) as body, pytest.raises(StateError, match=r"state\.npz: would have 2147483648 bytes"):
        encryption.seal(body, tmp_path / "state.npz")  # type: ignore[arg-type]


def test_a_file_that_was_written_elsewhere_or_under_another_name_is_refused_and_left_alone(
    tmp_path: Path, key: str
) -> None:
    """Another client's, another round's, another kind's; a checkpoint of another run, models of another client."""
    for client in ("client-000", "client-001"):
        train(ClientStore(tmp_path / client, empty()), 1, 2)
        atomic.write_body(tmp_path / client / "models-000001.safetensors", b"a model")
    for run in ("first", "second"):
        Checkpoints(tmp_path / run / "server").save(Checkpoint(1, run, {"w": np.zeros(3)}))
    store = ClientStore(tmp_path / "client-001", empty())
    answer = store.answer(2)
    moves: list[tuple[str, str, Callable[[], object]]] = [
        ("client-000/state-000002.npz", "client-001/state-000002.npz", lambda: store.before(3)),
        ("client-000/answer-000002.npz", "client-001/answer-000002.npz", lambda: store.answer(2)),
        ("client-001/state-000001.npz", "client-001/state-000002.npz", lambda: store.before(3)),
        ("client-001/state-000002.npz", "client-001/answer-000002.npz", lambda: store.answer(2)),
        (
            "client-000/models-000001.safetensors",
            "client-001/models-000001.safetensors",
            lambda: model_files.load_newest(tmp_path / "client-001"),
        ),
        (
            "first/server/checkpoint-000001.npz",
            "second/server/checkpoint-000001.npz",
            lambda: Checkpoints(tmp_path / "second" / "server").newest(),
        ),
    ]
    for source, target, read in moves:
        kept, moved = (tmp_path / target).read_bytes(), (tmp_path / source).read_bytes()
        (tmp_path / target).write_bytes(moved)
        with pytest.raises((StateError, RunError), match=r"put it back where it was written") as caught:
            read()
        assert f"opens it as '{target.replace('server/', '')}'" in str(caught.value)
        assert str(tmp_path / target) in str(caught.value) and "\n" not in str(caught.value)
        assert (tmp_path / target).read_bytes() == moved
        (tmp_path / target).write_bytes(kept)
    assert_same(store.before(3), learned(2))
    assert answer is not None
    assert_bit_identical(store.answer(2), answer)


def test_a_folder_may_be_moved_and_reached_through_links_but_not_renamed(tmp_path: Path, key: str) -> None:
    train(ClientStore(tmp_path / "a" / "cam7", empty()), 1)
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "b" / "cam7")
    assert read_state(tmp_path / "b" / "cam7" / "state-000001.npz").round == 1
    assert_same(ClientStore(tmp_path / "link", empty()).before(2), learned(1))
    (tmp_path / "b" / "cam7").rename(tmp_path / "b" / "cam8")
    with pytest.raises(UnreadableStateError, match=r"opens it as 'cam8/state-000001\.npz'"):
        ClientStore(tmp_path / "b" / "cam8", empty()).before(2)


@pytest.mark.parametrize("name", ["server", "earlier", "\u00dcbung 1"])
def test_a_client_may_have_any_name(name: str, tmp_path: Path, key: str) -> None:
    for client in (name, "other"):
        trained(tmp_path / client, "0", 1)
        trained(tmp_path / client, "1", 1, 2)
    assert read_state(tmp_path / name / "earlier" / "0" / "state-000001.npz").run == "0"
    shutil.copy(tmp_path / "other" / "state-000002.npz", tmp_path / name / "state-000002.npz")
    with pytest.raises(UnreadableStateError, match="put it back where it was written"):
        ClientStore(tmp_path / name, of_run("1")).before(3)


def test_earlier_runs_are_moved_and_taken_up_again(tmp_path: Path, key: str) -> None:
    trained(tmp_path, "1", 1, 2)
    trained(tmp_path, "2", 1, 2, 3)
    trained(tmp_path, "1", 3)
    assert_bit_identical(ClientStore(tmp_path, of_run("1")).answer(3), reply(3))
    assert ClientStore(tmp_path, of_run("2")).before(4).round == 3


@pytest.mark.slow
def test_a_run_with_a_key_makes_the_numbers_of_one_without(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_inline(small(run_name="plain", rounds=2))
    monkeypatch.setenv(encryption.VARIABLE, new_key())
    run_inline(small(run_name="sealed", rounds=2))
    assert rounds_of(tmp_path / "sealed") == rounds_of(tmp_path / "plain")
    files = list((tmp_path / "sealed").rglob("*.npz"))
    assert len(files) >= 10 and all(is_sealed(path) for path in files)
    monkeypatch.delenv(encryption.VARIABLE)
    summary = tmp_path / "sealed" / "summary.json"
    summary.unlink()
    with pytest.raises(RunError, match="is encrypted and FEDKACE_STATE_KEY is not set"):
        run_inline(small(run_name="sealed", rounds=2, resume=True))
