"""Durable client state: what is saved comes back, and whatever happens to the files leaves a usable state."""

import hashlib
import io
import json
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.common import rounds_of
from support.stored import CLASSES, assert_bit_identical, assert_same, empty, heard, learned, names, reply

from experiments.running.inline import run_inline
from fedkace_flwr.config import Config
from fedkace_flwr.errors import StateError, UnreadableStateError
from fedkace_flwr.storage import atomic as durable
from fedkace_flwr.storage.client_store import Answer, ClientState, ClientStore, read_state

DIGEST = 32


def train(store: ClientStore, *rounds: int) -> None:
    for number in rounds:
        store.save_trained(learned(number), reply(number))


def seal(body: bytes) -> bytes:
    """A file's content with a checksum that is right."""
    return hashlib.sha256(body).digest() + body


def body_of(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A file's arrays and record, read without this project's code."""
    content = path.read_bytes()
    assert hashlib.sha256(content[DIGEST:]).digest() == content[:DIGEST]
    with np.load(io.BytesIO(content[DIGEST:]), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    return arrays, json.loads(arrays.pop("record").tobytes())


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray], dict[str, Any]], None]) -> None:
    """Change a file's content and give it a checksum that is right."""
    arrays, record = body_of(path)
    change(arrays, record)
    packed = io.BytesIO()
    np.savez(packed, record=np.frombuffer(json.dumps(record).encode(), dtype=np.uint8), **arrays)
    path.write_bytes(seal(packed.getvalue()))


# Saving and finding again


@pytest.mark.parametrize("pixels", [False, True], ids=["ids", "pixels"])
def test_a_state_comes_back_as_it_was(tmp_path: Path, pixels: bool) -> None:
    state = learned(3, pixels)
    ClientStore(tmp_path / "c", empty(pixels_of=(3, 4, 4) if pixels else None)).save_trained(state, reply(3))
    again = ClientStore(tmp_path / "c", empty(pixels_of=(3, 4, 4) if pixels else None)).before(4)
    assert_same(again, state)


def test_what_is_not_set_comes_back_as_not_set(tmp_path: Path) -> None:
    state = replace(empty(), round=1)
    store = ClientStore(tmp_path, empty())
    store.save_trained(state, reply(1))
    again = store.before(2)
    assert_same(again, state)
    assert again.switched_at is None
    assert again.local_accuracy is None
    assert again.gaps == ()
    assert again.extra == {}


def test_without_any_file_the_state_is_the_empty_one(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "never" / "made", empty())
    assert_same(store.before(7), empty())
    assert store.answer(7) is None
    assert not (tmp_path / "never").exists()


def test_saving_again_replaces_the_state_and_keeps_the_answer(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    changed = replace(learned(2), gaps=(0.5,), switched_at=None, evaluation={"accuracy": 1.0})
    for _ in range(3):
        store.save(changed)
    assert_same(store.before(3), changed)
    assert_same(store.before(2), learned(1))
    assert_bit_identical(store.answer(2), reply(2))


def test_an_answer_comes_back_bit_identical(tmp_path: Path) -> None:
    train(ClientStore(tmp_path, empty()), 2)
    assert_bit_identical(ClientStore(tmp_path, empty()).answer(2), reply(2))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4), st.binary(min_size=16, max_size=16))
def test_any_number_and_any_bits_survive(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[float], bits: bytes
) -> None:
    folder = tmp_path_factory.mktemp("store")
    answer = Answer({"w": np.frombuffer(bits, dtype=np.float32)}, 1, {"numbers": numbers})
    store = ClientStore(folder, empty())
    store.save_trained(replace(learned(1), gaps=tuple(numbers)), answer)
    assert_bit_identical(store.answer(1), answer)
    assert store.before(2).gaps == tuple(numbers)


def test_only_the_last_round_is_answered(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2, 3)
    assert_bit_identical(store.answer(3), reply(3))
    assert [store.answer(number) for number in (1, 2, 4)] == [None, None, None]


def test_two_generations_and_one_answer_are_kept(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2, 3, 4, 5)
    assert names(tmp_path) == ["answer-000005.npz", "state-000004.npz", "state-000005.npz"]


def test_training_an_earlier_round_again_drops_what_came_later(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2, 3, 4, 5)
    train(store, 4)
    assert names(tmp_path) == ["answer-000004.npz", "state-000004.npz"]
    assert_same(store.before(9), learned(4))
    assert store.answer(5) is None
    train(store, 1)
    assert names(tmp_path) == ["answer-000001.npz", "state-000001.npz"]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_before_a_round_stands_the_newest_generation_of_an_earlier_one(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[int]
) -> None:
    """Rounds may be missed, and the run may fall back to an earlier one."""
    folder = tmp_path_factory.mktemp("store")
    store, kept = ClientStore(folder, empty()), list[int]()
    for number in rounds:
        train(store, number)
        kept = sorted({*(other for other in kept if other < number), number})[-2:]
    for number in range(1, 15):
        expected = max((other for other in kept if other < number), default=0)
        assert store.before(number).round == expected
        assert (store.answer(number) is not None) == (number == kept[-1])


# The files themselves


def test_files_are_for_their_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        train(ClientStore(tmp_path / "clients" / "client-000", empty()), 1, 2)
    finally:
        os.umask(before)
    folder = tmp_path / "clients" / "client-000"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_files_hold_plain_arrays_and_json_and_no_pickle(tmp_path: Path) -> None:
    train(ClientStore(tmp_path, empty()), 2)
    arrays, record = body_of(tmp_path / "state-000002.npz")
    assert record["version"] == 1
    assert record["round"] == 2
    assert set(arrays) >= {"seen", "buffer.content", "buffer.labels", "buffer.rounds"}
    arrays, record = body_of(tmp_path / "answer-000002.npz")
    assert list(arrays) == list(reply(2).arrays)
    assert record["examples"] == 12


def test_a_number_that_json_does_not_know_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1)
    with pytest.raises(ValueError, match="JSON"):
        store.save_trained(replace(learned(2), gaps=(float("nan"),)), reply(2))
    assert_same(store.before(3), learned(1))


# Damage


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _bit_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _text(path: Path) -> None:
    path.write_bytes(seal(b"not an archive"))


def _nothing_sealed(path: Path) -> None:
    path.write_bytes(seal(b""))


def _one_array(path: Path) -> None:
    packed = io.BytesIO()
    np.save(packed, np.arange(3))
    path.write_bytes(seal(packed.getvalue()))


def _pickled(path: Path) -> None:
    packed = io.BytesIO()
    np.savez(packed, record=np.array([{"version": 1}], dtype=object))
    path.write_bytes(seal(packed.getvalue()))


def _version_that_never_was(path: Path) -> None:
    rewrite(path, lambda arrays, record: record.update(version=0))


def _without_version(path: Path) -> None:
    rewrite(path, lambda arrays, record: record.pop("version"))


DAMAGES = [
    _truncated,
    _half,
    _emptied,
    _lengthened,
    _bit_flipped,
    _text,
    _nothing_sealed,
    _one_array,
    _pickled,
    _version_that_never_was,
    _without_version,
]


def _named(damage: Callable[..., object]) -> str:
    return damage.__name__.strip("_").replace("_", " ")


@pytest.mark.parametrize("damage", DAMAGES, ids=_named)
def test_a_damaged_state_is_set_aside_with_a_warning_and_the_one_before_it_used(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store, path = ClientStore(tmp_path, empty()), tmp_path / "state-000002.npz"
    train(store, 1, 2)
    damage(path)
    content = path.read_bytes()
    with heard() as warned:
        assert_same(store.before(3), learned(1))
    assert len(warned) == 1
    assert str(path) in warned[0]
    assert "state-000002.corrupt" in warned[0]
    assert (tmp_path / "state-000002.corrupt").read_bytes() == content
    assert not path.exists()
    assert store.answer(2) is None  # its state is gone, so the round has not happened
    train(store, 2)
    assert_same(store.before(3), learned(2))
    assert_bit_identical(store.answer(2), reply(2))


@pytest.mark.parametrize("damage", DAMAGES, ids=_named)
def test_with_no_generation_left_the_state_is_the_empty_one(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    for number in (1, 2):
        damage(tmp_path / f"state-00000{number}.npz")
    with heard() as warned:
        assert_same(store.before(3), empty())
    assert len(warned) == 2


@pytest.mark.parametrize("damage", DAMAGES, ids=_named)
def test_a_damaged_answer_is_set_aside_and_its_round_trained_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store, path = ClientStore(tmp_path, empty()), tmp_path / "answer-000002.npz"
    train(store, 1, 2)
    damage(path)
    with heard() as warned:
        assert store.answer(2) is None
    assert len(warned) == 1
    assert str(path) in warned[0]
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
    (folder / "answer-000001.npz").write_bytes(seal(body))
    assert store.answer(1) is None
    (folder / "state-000001.npz").write_bytes(seal(body))
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
        (_drop("gaps"), "gaps"),
        (_put("gaps", None), ""),
        (_put("round", 3), "round 3"),
        (_put("unheard-of", 3), "unheard-of"),
        (_put("seen", np.zeros(CLASSES + 1, dtype=bool)), f"{CLASSES + 1} classes, not {CLASSES}"),
        (_put("buffer.content", np.zeros((4, 3, 4, 4), dtype=np.uint8)), "uint8"),
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
        (empty(CLASSES + 1), f"{CLASSES} classes, not {CLASSES + 1}"),
        (empty(pixels_of=(3, 4, 4)), "not torch.uint8 (3, 4, 4)"),
    ],
    ids=["another number of classes", "another kind of buffer"],
)
def test_the_state_of_another_experiment_is_not_taken_over(tmp_path: Path, other: ClientState, reason: str) -> None:
    train(ClientStore(tmp_path, empty()), 1)
    store = ClientStore(tmp_path, other)
    with heard() as warned:
        assert_same(store.before(2), other)
    assert reason in warned[0]
    assert store.answer(1) is None


def test_a_buffer_of_images_of_another_size_is_not_taken_over(tmp_path: Path) -> None:
    ClientStore(tmp_path, empty(pixels_of=(3, 4, 4))).save_trained(learned(1, pixels=True), reply(1))
    with heard() as warned:
        assert_same(ClientStore(tmp_path, empty(pixels_of=(3, 8, 8))).before(2), empty(pixels_of=(3, 8, 8)))
    assert "torch.uint8 (3, 4, 4), not torch.uint8 (3, 8, 8)" in warned[0]


def test_a_state_under_the_name_of_another_round_is_set_aside(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    shutil.copy(tmp_path / "state-000001.npz", tmp_path / "state-000005.npz")
    with heard() as warned:
        assert_same(store.before(6), learned(2))
    assert "holds round 1" in warned[0]
    assert (tmp_path / "state-000005.corrupt").exists()


@pytest.mark.parametrize("name", ["state-000002.npz", "answer-000002.npz"])
def test_a_file_of_a_younger_version_is_refused_and_left_alone(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "VERSION", 7)
        train(store, 2)
        assert store.before(3).round == 2
        kept = (tmp_path / name).read_bytes()
        shutil.rmtree(tmp_path)
    train(store, 1, 2)
    (tmp_path / name).write_bytes(kept)
    store = ClientStore(tmp_path, empty())
    with heard() as warned, pytest.raises(UnreadableStateError) as caught:
        store.answer(2)
    assert f"{name}: it is of version 7, this program reads 1" in str(caught.value)
    assert "\n" not in str(caught.value)
    if name.startswith("state"):
        for action in (lambda: store.before(3), lambda: train(store, 2), lambda: read_state(tmp_path / name)):
            with pytest.raises(UnreadableStateError, match="version 7"):
                action()
    assert warned == []
    assert (tmp_path / name).read_bytes() == kept


def test_other_files_in_the_folder_do_no_harm(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1)
    for name in ("state-000001.partial", "answer-000001.partial", "state-000002.partial"):
        (tmp_path / name).write_bytes(b"\xff" * 100_000)
    (tmp_path / "state-backup.npz").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    assert_same(store.before(3), learned(1))
    train(store, 2)
    assert_same(store.before(3), learned(2))
    assert_same(store.before(2), learned(1))
    assert_bit_identical(store.answer(2), reply(2))
    assert (tmp_path / "state-backup.npz").read_bytes() == b"mine"


# Crashes and full disks


def _killed_at(step: int, action: Callable[[], None]) -> bool:
    """Run ``action`` in a process of its own that is killed at its n-th call to the file system.

    Returns whether it came to be killed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside PyTorch's idle threads: nothing is computed
        child = os.fork()
    if child == 0:
        calls = 0

        def dying(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        status = 1
        try:
            for name in ("open", "write", "fsync", "replace", "unlink"):
                setattr(os, name, dying(getattr(os, name)))
            action()
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_killed_at_any_moment_the_round_has_either_happened_or_not(tmp_path: Path) -> None:
    outcomes, step = [], 0
    while True:
        step += 1
        folder = tmp_path / str(step)
        store = ClientStore(folder, empty())
        train(store, 1, 2)
        killed = _killed_at(step, lambda store=store: train(store, 3))  # type: ignore[misc]
        with heard() as warned:
            happened = store.answer(3) is not None
            assert_same(store.before(4), learned(3 if happened else 2))
            assert_same(store.before(3), learned(2))
            if happened:
                assert_bit_identical(store.answer(3), reply(3))
            train(store, 3)  # the message comes again
            assert_same(store.before(4), learned(3))
            assert_bit_identical(store.answer(3), reply(3))
        assert warned == []
        assert names(folder) == ["answer-000003.npz", "state-000002.npz", "state-000003.npz"]
        outcomes.append(happened)
        if not killed:
            break
    # Up to the renaming of the state nothing has happened, from then on all of it.
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) >= 6
    assert outcomes.count(True) >= 4


def test_a_crash_between_answer_and_state_leaves_the_round_before_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, replaced = ClientStore(tmp_path, empty()), list[str]()
    train(store, 1)
    real = os.replace

    def second_fails(source: Path, target: Path) -> None:
        replaced.append(target.name)
        if len(replaced) == 2:
            raise OSError("power cut")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", second_fails)
        with pytest.raises(StateError, match="power cut"):
            train(store, 2)
    assert replaced == ["answer-000002.npz", "state-000002.npz"]
    assert store.answer(2) is None
    assert_same(store.before(3), learned(1))
    assert_bit_identical(store.answer(1), reply(1))
    train(store, 2)
    assert_bit_identical(store.answer(2), reply(2))


def test_a_disk_that_fails_to_sync_leaves_the_old_state_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for action in (lambda: train(store, 3), lambda: store.save(replace(learned(2), gaps=()))):
            with pytest.raises(StateError, match="No space left"):
                action()
    after = {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")}
    assert after == before
    train(store, 3)
    assert_same(store.before(4), learned(3))
    assert not list(tmp_path.glob("*3.partial"))


def test_a_write_that_is_cut_short_leaves_the_old_state_whole(tmp_path: Path) -> None:
    """The kernel itself refuses to write more than 100 bytes."""
    store = ClientStore(tmp_path, empty())
    train(store, 1, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        for action in (lambda: train(store, 3), lambda: store.save(replace(learned(2), gaps=()))):
            with pytest.raises(StateError, match="File too large"):
                action()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(store.before(4), learned(2))
    assert_bit_identical(store.answer(2), reply(2))
    train(store, 3)
    assert_same(store.before(4), learned(3))
    assert not list(tmp_path.glob("*3.partial"))


def test_a_folder_that_cannot_be_made_is_an_error_and_not_a_lost_state(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file"):
        train(ClientStore(tmp_path / "file" / "client-000", empty()), 1)


# Between runs


def test_another_run_with_the_same_state_dir_trains_afresh(small: Callable[..., Config], tmp_path: Path) -> None:
    """What an earlier run left there, of other settings even, must not be taken for this run's first round."""

    def run(name: str, state_dir: str, **changes: Any) -> list[dict[str, Any]]:
        run_inline(small(run_name=name, state_dir=str(tmp_path / state_dir), clients=2, rounds=1, **changes))
        return rounds_of(tmp_path / name)

    run("first", "shared")
    assert run("second", "shared", seed=9) == run("alone", "own", seed=9)
