"""More than one machine and a handful of clients: a Ray cluster, two hundred clients."""

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

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.engines import FlowerEngine
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.jobs import Job
from fedkace_flwr.experiments.running.processes import all_of, end_all_of
from fedkace_flwr.results.run_folder import HOLDS
from fedkace_flwr.storage.targets import claim

Make = Callable[..., Config]
MARK = "FEDKACE_TEST_MARK"
ACTOR = "ray::ClientAppActor"
TINY = {**SMALL, "samples-per-class": 2, "capacity": 10, "test-per-class": 1}

pytestmark = [pytest.mark.slow, pytest.mark.federation, pytest.mark.timeout(1800)]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="fedkace-", dir="/tmp") as place:  # Ray's sockets need a short path
        monkeypatch.setenv(MARK, str(tmp_path))
        monkeypatch.setenv("TMPDIR", place)
        yield dict(os.environ)
        end_all_of(MARK, str(tmp_path))


def ray(environment: dict[str, str], *arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "ray"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def finish(job: Job, look: Callable[[], None]) -> None:
    """Wait for the end of a run and call ``look`` again and again meanwhile."""
    while job.running():
        look()
        time.sleep(0.2)
    job.check()


def test_a_study_runs_on_two_nodes_of_a_ray_cluster_with_the_same_numbers(
    small: Make, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inline = small(run_name="inline", clients=4, rounds=2)
    run_inline(inline)
    place = environment["TMPDIR"]
    shared = ["--num-cpus=1", "--disable-usage-stats"]
    ray(environment, "start", "--head", "--port=0", f"--temp-dir={place}", "--include-dashboard=false", *shared)
    address = (Path(place) / "ray_current_cluster").read_text().strip()
    ray(environment, "start", f"--address={address}", *shared)

    config = small(run_name="cluster", clients=4, rounds=2)
    folder = tmp_path / "cluster"
    claim(folder, HOLDS)
    nodes: dict[int, set[int]] = {}

    def look() -> None:
        for process in all_of(MARK, str(tmp_path)):
            try:
                if process.name().startswith(ACTOR) or ACTOR in " ".join(process.cmdline()):
                    nodes.setdefault(process.ppid(), set()).add(process.pid)
            except psutil.Error:
                continue

    monkeypatch.setenv("RAY_ADDRESS", address)
    finish(FlowerEngine(2, 0.0).start(config, folder / "app.log"), look)
    assert rounds_of(folder) == rounds_of(tmp_path / "inline")
    assert len(nodes) == 2, nodes  # workers are children of their own node's raylet


def test_two_hundred_virtual_clients_take_part(tmp_path: Path, environment: dict[str, str]) -> None:
    """All of them, in one round."""
    settings = {**TINY, "clients": 200, "rounds": 1, "diagnostics": False}
    config = Config.parse({**settings, "results-dir": str(tmp_path), "run-name": "many"})
    folder = tmp_path / "many"
    claim(folder, HOLDS)
    FlowerEngine(2, 0.0).start(config, folder / "app.log").check()
    (record,) = rounds_of(folder)
    assert len(record["client_accuracy"]) == 200 and not record["failures"]
    states = [path.stat().st_size for path in (folder / "clients").rglob("state-*.npz")]
    assert len(states) == 200 and max(states) < 100 * 1024
