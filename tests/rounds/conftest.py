"""Shared by the tests of rounds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.common import SMALL, FakeTime

from fedkace_flwr.config import Config
from fedkace_flwr.results import run_folder


@pytest.fixture
def quick(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for real, and nothing draws."""
    monkeypatch.setattr(run_folder, "draw_accuracy", lambda *args, **kwargs: None)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Config]:
    def make(name: str = "run", **changes: Any) -> Config:
        keyed = {key.replace("_", "-"): value for key, value in changes.items()}
        shape = {"rounds": 3, "capacity": 12, "tfcl-server-epochs": 2}
        return Config.parse({**SMALL, **shape, "results-dir": str(tmp_path), "run-name": name, **keyed})

    return make
