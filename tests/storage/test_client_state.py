"""The records of states: what they must hold, and of which version they must be."""

from pathlib import Path

import pytest
from support.made.stored import body_of, empty, put, read_state, train

from fedkace_flwr.errors import UnreadableStateError
from fedkace_flwr.storage.client_state import VERSION
from fedkace_flwr.storage.client_store import ClientStore


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_state_of_another_version_is_refused_and_left_alone(tmp_path: Path, version: int) -> None:
    train(ClientStore(tmp_path, empty()), 1, 2)
    path = tmp_path / "state-000002.npz"
    arrays, record = body_of(path)
    put(path, arrays, {**record, "version": version})
    kept = path.read_bytes()
    store = ClientStore(tmp_path, empty())
    for action in (lambda: store.before(3), lambda: train(store, 2), lambda: read_state(path)):
        with pytest.raises(
            UnreadableStateError, match=rf"{path}: it has version {version}, this program reads {VERSION}"
        ):
            action()
    assert path.read_bytes() == kept
