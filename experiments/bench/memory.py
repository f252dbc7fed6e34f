"""How a simulation's memory grows with clients and rounds: the private memory of its processes, and the client state."""

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import psutil

from experiments.bench.measure import Figures
from experiments.running.engines import FlowerEngine
from experiments.running.guard import all_of
from fedkace_flwr.config import Config

_MARK = "FEDKACE_BENCH"
_WORKERS = 2
_LOOK_SECONDS = 0.2
_EARLY, _LATE = 10, 50
_FEW, _MANY, _SETTLED = 10, 200, 3
_KIB, _MIB = 1024, 2**20
_TINY = {
    "epochs": 1,
    "width": 4,
    "samples-per-class": 2,
    "capacity": 10,
    "test-per-class": 1,
    "threads": 1,
    "diagnostics": False,
}


class Resident(NamedTuple):
    """A process at one moment: its title, which Ray sets to an actor's current task, and its private bytes."""

    title: str
    size: int


def resident(name: str, value: str) -> dict[tuple[int, float], Resident]:
    """Measure the resident memory, without shared pages, of all processes with this environment variable.

    Their descendants are included.

    Parameters
    ----------
    name, value : str
        Name and value of the environment variable.

    Returns
    -------
    dict
        Processes by pid and start time, which unlike their titles do not change.
    """
    found = {}
    for process in all_of(name, value):
        try:
            memory = process.memory_info()
            size = memory.rss - getattr(memory, "shared", 0)
            found[process.pid, process.create_time()] = Resident(" ".join(process.cmdline())[:80], size)
        except psutil.Error:
            continue
    return found


def memory(repeats: int) -> Figures:
    """Compare processes and state of runs with few and many clients, and early and late in a long run."""
    few, many = (
        [_footprint(clients, {_SETTLED})[_SETTLED].processes for _ in range(max(1, repeats // 4))]
        for clients in (_FEW, _MANY)
    )
    another = (statistics.median(many) - statistics.median(few)) / (_MANY - _FEW) / _KIB
    long = _footprint(_FEW, {_EARLY, _LATE})
    early, late = long[_EARLY], long[_LATE]
    return {
        f"processes with {_FEW} clients, MiB": {"median": statistics.median(few) / _MIB},
        f"processes with {_MANY} clients, MiB": {"median": statistics.median(many) / _MIB},
        "processes, for each client more, KiB": {"median": another},
        f"processes in round {_LATE} against round {_EARLY}": {
            "median": late.processes / early.processes,
            "aim": "<= 1.05",
        },
        f"largest state in round {_LATE} against round {_EARLY}": {
            "median": late.state / early.state,
            "aim": "<= 1.05",
        },
    }


class _Footprint(NamedTuple):
    """Bytes of all processes together, and of the largest client state."""

    processes: int
    state: int


def _footprint(clients: int, rounds: Collection[int]) -> dict[int, _Footprint]:
    """Measure a run after each of these rounds; the run itself is one round longer."""
    token = secrets.token_hex(8)
    found: dict[int, _Footprint] = {}
    with (
        tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder,
        FlowerEngine(_WORKERS, 0.0, {**os.environ, _MARK: token}) as engine,
    ):
        settings = {**_TINY, "clients": clients, "rounds": max(rounds) + 1, "results-dir": folder, "run-name": "run"}
        run = Path(folder) / "run"
        run.mkdir()
        job = engine.start(Config.parse(settings), run / "app.log")
        while job.running():
            number = _rounds_in(run / "rounds.jsonl")
            if number in rounds and number not in found:
                size = sum(process.size for process in resident(_MARK, token).values())
                found[number] = _Footprint(size, max(path.stat().st_size for path in run.rglob("state-*.npz")))
            time.sleep(_LOOK_SECONDS)
        job.check()
    return found


def _rounds_in(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
