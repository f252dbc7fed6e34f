"""Keys in the environment."""

import pytest
from support.made.stored import new_key

from fedkace_flwr.storage import encryption


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    text = new_key()
    monkeypatch.setenv(encryption.VARIABLE, text)
    return text
