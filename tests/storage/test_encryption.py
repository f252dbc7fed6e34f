"""Encrypted files: what others can read and change, and which key opens them."""

import base64
import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.common import rounds_of
from support.made.stored import assert_bit_identical, assert_same, empty, heard, learned, new_key, reply, trained

from experiments.running.inline import run_inline
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, RunError, StateError, UnreadableStateError
from fedkace_flwr.results.run_folder import RunFolder
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage import atomic as durable
from fedkace_flwr.storage import encryption as sealing
from fedkace_flwr.storage.client_state import ClientState, read_state
from fedkace_flwr.storage.client_store import ClientStore

ROOT = Path(__file__).parents[2]
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
    assert len(met) == len({content[9:21] for content in met}) == 5


@pytest.mark.parametrize(("held", "says"), [(None, "FEDKACE_STATE_KEY is not set"), ("another", "another key")])
def test_without_the_right_key_a_file_is_refused_and_left_alone(
    tmp_path: Path, key: str, held: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ClientStore(tmp_path, NO_PIXELS)
    store.save_trained(pixels(1), reply(1))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")}
    if held:
        monkeypatch.setenv(sealing.VARIABLE, new_key())
    else:
        monkeypatch.delenv(sealing.VARIABLE)
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
    monkeypatch.setenv(sealing.VARIABLE, key)
    assert_same(fresh.before(2), pixels(1))


@pytest.mark.parametrize("text", ["x", "A" * 44, base64.b64encode(bytes(16)).decode(), "not base64!"])
def test_what_is_no_key_is_refused_before_anything_is_done(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sealing.VARIABLE, text)
    for action in (lambda: trained(tmp_path / "c", "1", 1), lambda: RunFolder(tmp_path / "run")):
        with pytest.raises(ConfigError, match="FEDKACE_STATE_KEY: must be 32 random bytes in base64") as caught:
            action()
        assert text not in str(caught.value).replace("openssl rand -base64 32", "").replace("base64", "") or text == "x"
    assert list(tmp_path.iterdir()) == []


def test_plain_files_are_taken_over_on_request_and_encrypted_when_they_are_next_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ClientStore(tmp_path, NO_PIXELS)
    store.save_trained(pixels(1), reply(1))
    monkeypatch.setenv(sealing.VARIABLE, new_key())
    monkeypatch.setenv(sealing.MIGRATE, "1")
    logger, told = logging.getLogger("fedkace_flwr.storage.encryption"), list[str]()
    ear = logging.Handler()
    ear.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(ear)
    try:
        for number in (1, 2, 3):
            assert_same(ClientStore(tmp_path, NO_PIXELS).before(number + 1), pixels(number))
            ClientStore(tmp_path, NO_PIXELS).save_trained(pixels(number + 1), reply(number + 1))
    finally:
        logger.removeHandler(ear)
    assert len(told) == 1 and "does not protect" in told[0] and tmp_path.name in told[0]
    assert all(sealing.is_sealed(path.read_bytes()) for path in tmp_path.glob("*.npz"))
    monkeypatch.delenv(sealing.MIGRATE)
    assert_same(ClientStore(tmp_path, NO_PIXELS).before(5), pixels(4))


@pytest.mark.parametrize("at", [0, 20, 48, 50, 60, 90, -1])
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
    durable.write(path, {"w": np.zeros(100)}, {})
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    content[16:48] = hashlib.sha256(content[48:]).digest()
    path.write_bytes(content)
    with pytest.raises(StateError, match="changed by someone without the key"):
        durable.read(path)


def test_a_younger_encryption_is_refused(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sealing, "VERSION", 3)
        durable.write(tmp_path / "state-000001.npz", *pixels(1).to_record(), version=2)
    with pytest.raises(UnreadableStateError, match="encrypted in version 3, this program reads up to 2"):
        ClientStore(tmp_path, NO_PIXELS).before(2)


@pytest.mark.slow
def test_a_run_with_a_key_makes_the_numbers_of_one_without(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_inline(small(run_name="plain", rounds=2))
    monkeypatch.setenv(sealing.VARIABLE, new_key())
    run_inline(small(run_name="sealed", rounds=2))
    assert rounds_of(tmp_path / "sealed") == rounds_of(tmp_path / "plain")
    files = list((tmp_path / "sealed").rglob("*.npz"))
    assert len(files) >= 10 and all(sealing.is_sealed(path.read_bytes()) for path in files)
    monkeypatch.delenv(sealing.VARIABLE)
    summary = tmp_path / "sealed" / "summary.json"
    summary.unlink()
    with pytest.raises(RunError, match="is encrypted and FEDKACE_STATE_KEY is not set"):
        run_inline(small(run_name="sealed", rounds=2, resume=True))
