"""Helpers for tests of every kind."""

import json
from pathlib import Path
from typing import Any

from support.doubles.recording import recordings as recordings

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


class FakeTime:
    """A clock that only ``sleep`` advances."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.slept.append(seconds)
        self.now += seconds


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's ``rounds.jsonl`` without times."""
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        del record["seconds"]
    return records


def make_events_earlier(folder: Path) -> None:
    """Backdate a folder's event files: TensorBoard reads them in the order of their names, which hold a start time."""
    for path in folder.glob("events.out.tfevents.*"):
        head, second, rest = path.name.removeprefix("events.out.").split(".", 2)
        path.rename(path.with_name(f"events.out.{head}.{int(second) - 60}.{rest}"))
