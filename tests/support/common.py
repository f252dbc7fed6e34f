"""What tests of every kind share."""

import json
from pathlib import Path
from typing import Any

from support.recording import recordings as recordings

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
