"""A damaged or foreign file is set aside or refused; what can be read is used."""

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made.stored import (
    CLASSES,
    assert_bit_identical,
    assert_same,
    empty,
    heard,
    learned,
    names,
    reply,
    rewrite,
    sealed,
    train,
)

from fedkace_flwr.errors import UnreadableStateError
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _text(path: Path) -> None:
    path.write_bytes(sealed(b"not an archive"))


def _pickled(path: Path) -> None:
    packed = io.BytesIO()
    np.savez(packed, record=np.array([{"version": 1}], dtype=object))
    path.write_bytes(sealed(packed.getvalue()))


def _without_version(path: Path) -> None:
    rewrite(path, lambda arrays, record: record.pop("version"))


damaged = pytest.mark.parametrize(
    "damage", [_half, _emptied, _text, _pickled, _without_version], ids=lambda damage: damage.__name__.strip("_")
)


@damaged
def test_a_damaged_state_is_set_aside_with_a_warning_and_the_one_before_it_used(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store, path = ClientStore(tmp_path, empty()), tmp_path / "state-000002.npz"
    train(store, 1, 2)
    damage(path)
    content = path.read_bytes()
    with heard() as warned:
        assert_same(store.before(3), learned(1))
    assert len(warned) == 1 and str(path) in warned[0] and "state-000002.corrupt" in warned[0]
    assert (tmp_path / "state-000002.corrupt").read_bytes() == content
    assert not path.exists()
    assert store.answer(2) is None  # its state is gone, so the round has not happened
    train(store, 2)
    assert_same(store.before(3), learned(2))
    assert_bit_identical(store.answer(2), reply(2))


def test_with_no_generation_left_the_state_is_the_empty_one(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    for number in (1, 2):
        _half(tmp_path / f"state-00000{number}.npz")
    with heard() as warned:
        assert_same(store.before(3), empty())
    assert len(warned) == 2


@damaged
def test_a_damaged_answer_is_set_aside_and_its_round_trained_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store, path = ClientStore(tmp_path, empty()), tmp_path / "answer-000002.npz"
    train(store, 1, 2)
    damage(path)
    with heard() as warned:
        assert store.answer(2) is None
    assert len(warned) == 1 and str(path) in warned[0]
    assert (tmp_path / "answer-000002.corrupt").exists()
    assert_same(store.before(2), learned(1))
    train(store, 2)
    assert_bit_identical(store.answer(2), reply(2))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("pristine")
    train(ClientStore(folder, empty()), 2)
    return (folder / "state-000002.npz").read_bytes()


@given(st.data())
def test_no_flipped_bit_and_no_cut_goes_unseen(
    tmp_path_factory: pytest.TempPathFactory, pristine: bytes, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("store")
    content = bytearray(pristine)
    if data.draw(st.booleans(), label="cut"):
        del content[data.draw(st.integers(0, len(pristine) - 1), label="length") :]
    else:
        content[data.draw(st.integers(0, len(pristine) - 1), label="byte")] ^= 1 << data.draw(st.integers(0, 7))
    path = folder / "state-000002.npz"
    path.write_bytes(content)
    assert_same(ClientStore(folder, empty()).before(3), empty())
    assert names(folder) == ["state-000002.corrupt"]


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda tail: b"PK\x03\x04" + tail))
def test_no_garbage_under_a_right_checksum_is_read_or_raises(
    tmp_path_factory: pytest.TempPathFactory, body: bytes
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = ClientStore(folder, empty())
    train(store, 1)
    (folder / "answer-000001.npz").write_bytes(sealed(body))
    assert store.answer(1) is None
    (folder / "state-000001.npz").write_bytes(sealed(body))
    assert_same(store.before(2), empty())
    assert names(folder) == ["answer-000001.corrupt", "state-000001.corrupt"]


def _drop(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda arrays, record: (arrays if name in arrays else record).pop(name)


def _put(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda arrays, record: (arrays if name in arrays else record).__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_drop("seen"), "seen"),
        (_drop("buffer.labels"), "buffer.labels"),
        (_put("global_since", 0.5), "global_since = 0.5"),
        (_put("local_accuracy", "high"), "an accuracy"),
        (_put("local_class_accuracy", ["a"]), "an accuracy"),
        (_put("round", 3), "round 3"),
        (_put("unheard-of", 3), "unheard-of"),
        (_put("buffer.rounds", np.zeros(3, dtype=np.int64)), "unequal"),
        (_put("buffer.labels", np.array(["a", "b", "c", "d"])), ""),
    ],
)
def test_a_whole_file_with_the_wrong_content_is_set_aside_with_the_reason(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], reason: str
) -> None:
    store, path = ClientStore(tmp_path, empty()), tmp_path / "state-000002.npz"
    train(store, 1, 2)
    rewrite(path, change)
    with heard() as warned:
        assert_same(store.before(3), learned(1))
    assert len(warned) == 1
    assert str(path) in warned[0]
    assert reason in warned[0]
    assert (tmp_path / "state-000002.corrupt").exists()


@pytest.mark.parametrize("name", ["examples", "metrics"])
def test_a_whole_answer_with_a_field_missing_is_set_aside(tmp_path: Path, name: str) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    rewrite(tmp_path / "answer-000002.npz", _drop(name))
    with heard() as warned:
        assert store.answer(2) is None
    assert len(warned) == 1
    assert name in warned[0]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (empty(CLASSES + 1, (3, 4, 4)), f"{CLASSES} classes, not {CLASSES + 1}"),
        (empty(), "torch.uint8 (3, 4, 4), not torch.int64 ()"),
        (empty(pixels_of=(3, 8, 8)), "torch.uint8 (3, 4, 4), not torch.uint8 (3, 8, 8)"),
    ],
    ids=["another number of classes", "another kind of buffer", "another size of images"],
)
def test_the_state_of_another_experiment_is_refused_and_left_alone(
    tmp_path: Path, other: ClientState, reason: str
) -> None:
    """The server names the run and its keys, and must not make a client forget with either."""
    ClientStore(tmp_path, empty(pixels_of=(3, 4, 4))).save_trained(learned(1, pixels=True), reply(1))
    before = (tmp_path / "state-000001.npz").read_bytes()
    store = ClientStore(tmp_path, other)
    for action in (lambda: store.before(2), lambda: store.answer(1)):
        with pytest.raises(UnreadableStateError, match=re.escape(reason)):
            action()
    assert (tmp_path / "state-000001.npz").read_bytes() == before


def test_a_state_under_the_name_of_another_round_is_set_aside(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    shutil.copy(tmp_path / "state-000001.npz", tmp_path / "state-000005.npz")
    with heard() as warned:
        assert_same(store.before(6), learned(2))
    assert "holds round 1" in warned[0]
    assert (tmp_path / "state-000005.corrupt").exists()


def test_an_answer_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    train(ClientStore(tmp_path, empty()), 1, 2)
    path = tmp_path / "answer-000002.npz"
    rewrite(path, _put("version", 2))
    kept = path.read_bytes()
    with heard() as warned, pytest.raises(UnreadableStateError) as caught:
        ClientStore(tmp_path, empty()).answer(2)
    assert f"{path}: it has version 2, this program reads 1; use the one" in str(caught.value)
    assert "\n" not in str(caught.value) and warned == []
    assert path.read_bytes() == kept


def test_other_files_in_the_folder_do_no_harm(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1)
    for name in ("state-000001.npz.partial", "answer-000001.npz.partial", "state-000002.npz.partial"):
        (tmp_path / name).write_bytes(b"\xff" * 100_000)
    (tmp_path / "state-backup.npz").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    assert_same(store.before(3), learned(1))
    train(store, 2)
    assert_same(store.before(3), learned(2))
    assert_same(store.before(2), learned(1))
    assert_bit_identical(store.answer(2), reply(2))
    assert (tmp_path / "state-backup.npz").read_bytes() == b"mine"
