"""What a year costs the hub and each node, round by round: files, disk, memory, descriptors and processor time."""

import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import psutil

from fedkace_flwr.experiments.soak.federation import CLIENT, HUB, Federation

MOST_GROWTH = 1.1
"""Most that a figure at the end may be, in units of the same figure at a quarter."""

COMPARED = ("files", "disk", "memory", "descriptors")
"""The figures that must not grow."""

_QUARTER, _END = (0.2, 0.3), (0.9, 1.0)  # parts of a member's time
_LOGS = ("log", "log.1", "rounds.jsonl")


@dataclass
class Figures:
    """A member's figures after a round.

    Attributes
    ----------
    round : int
        The round.
    files : int
        Number of its files, without those that wait in its inbox.
    disk : int
        Their bytes, without logs, the record of rounds, and the copy of each version of the app that a SuperLink keeps.
    logs : int
        Bytes of those.
    memory : int
        Resident bytes of the processes that stay between messages, at the quietest moment since the last round.
    descriptors : int
        Descriptors that these have open, likewise.
    seconds : float
        Processor time of all its processes since the beginning.
    peak : int
        Most resident bytes of all its processes at once.
    """

    round: int
    files: int = 0
    disk: int = 0
    logs: int = 0
    memory: int = 0
    descriptors: int = 0
    seconds: float = 0.0
    peak: int = 0


@dataclass
class _Moment:
    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    peak: int = 0


class Measures:
    """Figures of the hub and of each node.

    Parameters
    ----------
    federation : Federation
        What is measured.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._now: defaultdict[str, _Moment] = defaultdict(_Moment)
        self._spent: defaultdict[str, dict[tuple[int, float], float]] = defaultdict(dict)
        self.members: defaultdict[str, list[Figures]] = defaultdict(list)

    def look(self) -> None:
        """Look at all processes; to be called again and again during a round."""
        running = self._federation.processes()
        for member in ("hub", *(name for name in running if name not in HUB)):
            memory = descriptors = peak = 0
            for process, line in [
                each for name in (HUB if member == "hub" else (member,)) for each in running.get(name, ())
            ]:
                with suppress(psutil.Error), process.oneshot():
                    resident = process.memory_info().rss
                    times = process.cpu_times()
                    # A child that has ended is in its parent's time; one that was killed with its parent was seen here.
                    spent = (
                        times.user
                        + times.system
                        + (0.0 if CLIENT in line else times.children_user + times.children_system)
                    )
                    peak += resident
                    if CLIENT not in line:
                        self._spent[member][process.pid, process.create_time()] = spent
                        memory += resident
                        descriptors += process.num_fds()
            if memory:
                now = self._now[member]
                now.memory.append(memory)
                now.descriptors.append(descriptors)
                now.peak = max(now.peak, peak)

    def seconds(self, members: Iterable[str]) -> float:
        """Return the processor time that members have spent so far."""
        return sum(sum(self._spent[member].values()) for member in members)

    def after(self, number: int) -> None:
        """Note the figures after a round."""
        homes = {"hub": [*(self._federation.folder / name for name in HUB), self._federation.run]}
        homes |= {home.name: [home] for home in self._federation.folder.glob("node-*")}
        for member, folders in homes.items():
            now = self._now.pop(member, None)
            if now is None:
                continue
            files, disk, logs = _weighed(folders)
            disk -= _apps(folders[0]) if member == "hub" else 0
            seconds = self.seconds([member])
            self.members[member].append(
                Figures(number, files, disk, logs, min(now.memory), min(now.descriptors), seconds, now.peak)
            )

    def record(self) -> dict[str, list[dict[str, float]]]:
        """Return JSON-ready values."""
        return {member: [asdict(each) for each in figures] for member, figures in self.members.items()}


def quarter_and_end(figures: Sequence[Figures], name: str) -> tuple[float, float]:
    """Return a figure about a quarter of a member's time, and at its end: medians over a tenth of that time."""
    parts = []
    for first, last in (_QUARTER, _END):
        chosen = figures[int(first * len(figures)) : max(int(first * len(figures)) + 1, int(last * len(figures)))]
        parts.append(float(median(getattr(each, name) for each in chosen)))
    return parts[0], parts[1]


def _weighed(folders: Iterable[Path]) -> tuple[int, int, int]:
    """Number of files, bytes, and bytes of logs, below folders; what waits in an inbox is left out."""
    files = disk = logs = 0
    for folder in folders:
        for place, below, names in os.walk(folder):
            if Path(place).parent.name == "inbox" and Path(place).name in ("new", "taken"):
                below.clear()
                continue
            for name in names:
                with suppress(FileNotFoundError):
                    size = (Path(place) / name).stat().st_size
                    files += 1
                    disk += 0 if name in _LOGS else size
                    logs += size if name in _LOGS else 0
    return files, disk, logs


def _apps(superlink: Path) -> int:
    """Bytes of the versions of the app in a SuperLink's database."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{superlink / 'state.db'}?mode=ro", uri=True)) as state:
        (size,) = state.execute("SELECT SUM(LENGTH(content)) FROM fab").fetchone()
        return int(size or 0)
    return 0
