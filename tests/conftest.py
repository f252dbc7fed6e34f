"""Shared by all tests: one cache of prepared data sets per session, one thread, small configurations."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import recordings as recordings

from fedkace_flwr import cohort
from fedkace_flwr.config import Config
from strategies import base, exchange, roster, transport

SMALL = {
    "clients": 3,
    "rounds": 3,
    "epochs": 1,
    "width": 4,
    "samples-per-class": 8,
    "capacity": 20,
    "threads": 1,
    "seed": 7,
}


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


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Config]:
    """Make a small configuration on digits; keys as keyword arguments with underscores."""

    def make(**changes: Any) -> Config:
        named = {key.replace("_", "-"): value for key, value in changes.items()}
        return Config.parse({**SMALL, "results-dir": str(tmp_path), "run-name": "run", **named})

    return make


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move on."""
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The clock of everything in ``strategies`` that waits."""
    fake = FakeTime()
    for module in (base, exchange, roster, transport):
        monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many networks each training of several held."""
    found: list[int] = []
    run = cohort._train_stacked

    def watched(learners: Any, *rest: Any) -> Any:
        found.append(len(learners))
        return run(learners, *rest)

    monkeypatch.setattr(cohort, "_train_stacked", watched)
    return found


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``rounds.jsonl``, times taken away."""
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        del record["seconds"]
    return records


def make_events_earlier(folder: Path) -> None:
    """Date a folder's event files back: TensorBoard reads them by name, which holds the second of their start."""
    for path in folder.glob("events.out.tfevents.*"):
        head, second, rest = path.name.removeprefix("events.out.").split(".", 2)
        path.rename(path.with_name(f"events.out.{head}.{int(second) - 60}.{rest}"))
