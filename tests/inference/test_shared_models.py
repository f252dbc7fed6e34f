"""Models in a folder that another user may read, who may read nothing else of the client."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.common import rounds_of
from support.made.models import constant
from support.made.stored import new_key

from fedkace_flwr.config import Config
from fedkace_flwr.errors import StateError, UnreadableStateError
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.inference import model_files as serving
from fedkace_flwr.inference.model_files import load_newest
from fedkace_flwr.storage import atomic, encryption

Make = Callable[..., Config]


def another_group() -> int:
    """A group to which this user may give files; not that of the user's files, if there is one."""
    if os.geteuid() == 0:
        return 4711
    return next((group for group in os.getgroups() if group != os.getegid()), os.getegid())


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    os.chown(folder, -1, another_group())
    folder.chmod(0o750)
    return folder


@pytest.fixture
def strict_umask():  # type: ignore[no-untyped-def]
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.usefixtures("strict_umask")
def test_only_the_models_are_open_to_the_group(small: Make, shared: Path, tmp_path: Path) -> None:
    config = small(clients=2, rounds=2, keep_models="always")
    run_inline(config, node_config=lambda _: {"models-dir": str(shared)})
    for client in ("client-000", "client-001"):
        models, state = shared / client, tmp_path / "run" / "clients" / client
        assert (mode(models), models.stat().st_gid) == (0o750, another_group())
        files = sorted(path.name for path in models.iterdir())
        assert files == ["models-000001.safetensors", "models-000002.safetensors"]
        assert {(mode(path), path.stat().st_gid) for path in models.iterdir()} == {(0o640, another_group())}
        assert load_newest(models).kept.round == 2
        assert mode(state) == 0o700 and {mode(path) for path in state.iterdir()} == {0o600}
        assert not list(state.glob("models-*"))


def test_a_folder_that_is_missing_is_named(small: Make, tmp_path: Path) -> None:
    config = small(clients=2, rounds=1, below_quorum="skip", keep_models="always")
    run_inline(config, node_config=lambda _: {"models-dir": str(tmp_path / "none")})
    (record,) = rounds_of(tmp_path / "run")
    assert f"models-dir = {tmp_path}/none: cannot be used (No such file" in str(record)


def test_a_folder_that_cannot_be_given_to_its_group_is_named(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(StateError, match=rf"^{shared}/a: cannot be opened to group 4711, .*Operation not permitted"):
        serving.write(shared / "a", constant(1, 1), 4711)


def test_models_have_a_key_of_their_own(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever serves them need not have the key of the images."""
    of_state, of_models = (new_key() for _ in range(2))
    monkeypatch.setenv(encryption.VARIABLE, of_state)
    monkeypatch.setenv(encryption.MODELS, of_models)
    serving.write(shared / "a", constant(1, 1), another_group())
    atomic.write(shared / "state.npz", {}, {})
    assert load_newest(shared / "a").kept.round == 1
    monkeypatch.delenv(encryption.VARIABLE)
    assert load_newest(shared / "a").kept.round == 1
    with pytest.raises(UnreadableStateError, match="it is encrypted"):
        atomic.read(shared / "state.npz")
    monkeypatch.delenv(encryption.MODELS)
    with pytest.raises(UnreadableStateError, match="FEDKACE_MODELS_KEY or FEDKACE_STATE_KEY is not set"):
        atomic.read_body(shared / "a" / "models-000001.safetensors")


def test_without_a_key_of_their_own_models_are_encrypted_like_the_state(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(encryption.VARIABLE, new_key())
    serving.write(shared / "a", constant(1, 1), another_group())
    assert load_newest(shared / "a").kept.round == 1
    monkeypatch.delenv(encryption.VARIABLE)
    with pytest.raises(UnreadableStateError):
        atomic.read_body(shared / "a" / "models-000001.safetensors")


def test_the_key_of_models_opens_models_only(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has it can write no state that the client would take for its own."""
    of_state, of_models = (new_key() for _ in range(2))
    monkeypatch.setenv(encryption.VARIABLE, of_models)
    atomic.write(shared / "a" / "state-000001.npz", {}, {})
    monkeypatch.setenv(encryption.VARIABLE, of_state)
    monkeypatch.setenv(encryption.MODELS, of_models)
    with pytest.raises(UnreadableStateError, match="no key in FEDKACE_STATE_KEY opens it"):
        atomic.read(shared / "a" / "state-000001.npz")


def test_with_a_key_of_models_plain_ones_are_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving.write(shared / "a", constant(1, 1), another_group())
    atomic.write(shared / "a" / "state-000001.npz", {}, {})
    monkeypatch.setenv(encryption.MODELS, new_key())
    with pytest.raises(StateError, match="it is not encrypted although FEDKACE_MODELS_KEY or FEDKACE_STATE_KEY is set"):
        load_newest(shared / "a")
    assert atomic.read(shared / "a" / "state-000001.npz") is not None  # which this key does not protect


def test_a_service_with_both_keys_reads_on_while_the_key_of_the_models_changes(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, present = new_key(), new_key()
    monkeypatch.setenv(encryption.MODELS, former)
    serving.write(shared / "a", constant(1, 1), another_group())
    monkeypatch.setenv(encryption.MODELS, f"{present},{former}")
    assert load_newest(shared / "a").kept.round == 1
    serving.write(shared / "a", constant(2, 1), another_group())
    monkeypatch.setenv(encryption.MODELS, present)
    assert load_newest(shared / "a").kept.round == 2


def test_what_a_killed_client_left_half_written_is_removed(shared: Path) -> None:
    serving.write(shared / "a", constant(1, 1), another_group())
    (shared / "a" / "models-000002.safetensors.0badcafe.partial").touch()
    serving.write(shared / "a", constant(2, 1), another_group())
    assert sorted(path.name for path in (shared / "a").iterdir()) == [
        "models-000001.safetensors",
        "models-000002.safetensors",
    ]
