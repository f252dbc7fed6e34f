"""Past one worker, one machine and a handful of clients: Ray clusters, hundreds of clients, memory."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.common import SMALL, rounds_of

from experiments.bench.memory import Resident, resident
from experiments.running.engines import FlowerEngine, Job
from experiments.running.guard import all_of, end_all_of
from experiments.running.inline import run_inline
from fedkace_flwr.config import Config

Make = Callable[..., Config]
MARK = "FEDKACE_TEST_MARK"
ACTOR = "ray::ClientAppActor"
TINY = {**SMALL, "samples-per-class": 2, "capacity": 10, "test-per-class": 1}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="fedkace-", dir="/tmp") as place:  # Ray's sockets need a short path
        yield {**os.environ, MARK: str(tmp_path), "TMPDIR": place}
        end_all_of(MARK, str(tmp_path))


def ray(environment: dict[str, str], *arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "ray"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines_in(folder: Path) -> int:
    path = folder / "rounds.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def finish(job: Job, look: Callable[[], None]) -> None:
    """Wait for a run's end, looking on."""
    while job.running():
        look()
        time.sleep(0.2)
    job.check()


def typical(looks: list[dict[tuple[int, float], Resident]]) -> dict[tuple[int, float], Resident]:
    """Each process at its median: what it holds in the middle of one message comes and goes."""
    found: dict[tuple[int, float], list[Resident]] = {}
    for processes in looks:
        for key, process in processes.items():
            found.setdefault(key, []).append(process)
    return {key: sorted(seen, key=lambda process: process.size)[len(seen) // 2] for key, seen in found.items()}


def test_a_study_runs_on_two_nodes_of_a_ray_cluster_with_the_same_numbers(
    small: Make, tmp_path: Path, environment: dict[str, str]
) -> None:
    inline = small(run_name="inline", clients=6)
    run_inline(inline)
    place = environment["TMPDIR"]
    shared = ["--num-cpus=1", "--disable-usage-stats"]
    ray(environment, "start", "--head", "--port=0", f"--temp-dir={place}", "--include-dashboard=false", *shared)
    address = (Path(place) / "ray_current_cluster").read_text().strip()
    ray(environment, "start", f"--address={address}", *shared)

    config = small(run_name="cluster", clients=6)
    folder = tmp_path / "cluster"
    folder.mkdir()
    nodes: dict[int, set[int]] = {}

    def look() -> None:
        for process in all_of(MARK, str(tmp_path)):
            try:
                if process.name().startswith(ACTOR) or ACTOR in " ".join(process.cmdline()):
                    nodes.setdefault(process.ppid(), set()).add(process.pid)
            except psutil.Error:
                continue

    with FlowerEngine(2, 0.0, {**environment, "RAY_ADDRESS": address}) as engine:
        finish(engine.start(config, folder / "app.log"), look)
    assert rounds_of(folder) == rounds_of(tmp_path / "inline")
    assert len(nodes) == 2, nodes  # workers are children of their own node's raylet


def test_two_hundred_clients_for_twenty_rounds_take_no_more_memory(tmp_path: Path, environment: dict[str, str]) -> None:
    config = Config.parse({**TINY, "clients": 200, "rounds": 21, "results-dir": str(tmp_path), "run-name": "load"})
    folder = tmp_path / "load"
    folder.mkdir()
    after: dict[int, list[dict[tuple[int, float], Resident]]] = {5: [], 20: []}

    def look() -> None:
        number = lines_in(folder)
        if number in after:
            after[number].append(resident(MARK, str(tmp_path)))

    with FlowerEngine(2, 0.0, environment) as engine:
        finish(engine.start(config, folder / "app.log"), look)
    early, late = (typical(looks) for looks in after.values())
    both = [(early[key], late[key]) for key in set(early) & set(late)]
    assert len([before for before, _ in both if ACTOR in before.title]) == 2
    assert not [pair for pair in both if pair[1].size > 1.05 * pair[0].size]
    states = [path.stat().st_size for path in (folder / "clients").rglob("state-*.npz")]
    assert max(states) < 100 * 1024


def test_a_thousand_virtual_clients_stay_within_bounds(tmp_path: Path, environment: dict[str, str]) -> None:
    settings = {**TINY, "clients": 1000, "rounds": 2, "width": 4, "diagnostics": False}
    config = Config.parse({**settings, "results-dir": str(tmp_path), "run-name": "many"})
    folder = tmp_path / "many"
    folder.mkdir()
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, sum(process.size for process in resident(MARK, str(tmp_path)).values()))

    with FlowerEngine(2, 0.0, environment) as engine:
        finish(engine.start(config, folder / "app.log"), look)
    assert [len(line["client_accuracy"]) for line in rounds_of(folder)] == [1000, 1000]
    assert not any(line["failures"] for line in rounds_of(folder))
    assert most < 6 * 2**30
