"""Shared by all tests: one cache of prepared data sets per session, one thread, small configurations."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.common import SMALL, FakeTime
from support.doubles.recording import recordings as recordings
from support.properties import load_profile

from fedkace_flwr.config import Config
from fedkace_flwr.results import run_folder
from fedkace_flwr.results.plot import draw_accuracy
from fedkace_flwr.rounds import directory, driver, exchange, members, pace

load_profile()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``matrix``, leave the first case to ``make test`` and mark the others ``exhaustive``."""
    met = set[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("matrix"):
            if name in met:
                item.add_marker(pytest.mark.exhaustive)
            met.add(name)


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing leaks into the user's cache, nor from it."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("FEDKACE_CACHE_DIR")
    os.environ["FEDKACE_CACHE_DIR"] = str(folder)
    torch.set_num_threads(1)
    yield folder
    os.environ.pop("FEDKACE_CACHE_DIR")
    if before is not None:
        os.environ["FEDKACE_CACHE_DIR"] = before


@pytest.fixture(scope="session", autouse=True)
def no_pictures() -> Iterator[None]:
    """Runs inside this process draw nothing: a picture takes a sixth of a small run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "draw_accuracy", lambda rounds, path, title: path.write_bytes(b"a picture"))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Runs inside this process do not wait until their files survive a power cut; no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's runs draw their pictures."""
    monkeypatch.setattr(run_folder, "draw_accuracy", draw_accuracy)


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Config]:
    """Make a small configuration on digits; keys as keyword arguments with underscores."""

    def make(**changes: Any) -> Config:
        named = {key.replace("_", "-"): value for key, value in changes.items()}
        return Config.parse({**SMALL, "results-dir": str(tmp_path), "run-name": "run", **named})

    return make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """A fake clock for everything at the server that waits."""
    fake = FakeTime()
    for module in (directory, driver, exchange, members, pace):
        monkeypatch.setattr(module, "time", fake)
    return fake
