"""The overhead of a round in a federation of real processes on the loopback, with TLS and keys as on devices."""

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from experiments.bench.measure import Figures, spread, unmeasured
from experiments.running.processes import CHECKOUT, finish, flower_environment, staged_app
from fedkace_flwr.errors import RunError

_NODES, _CONNECTION = 2, "bench"
_LOOK_SECONDS = 5
_RUN = {
    "clients": _NODES,
    "rounds": 4,
    "epochs": 1,
    "width": 16,
    "samples-per-class": 8,
    "capacity": 20,
    "threads": 1,
    "diagnostics": False,
}
_NAMES = {
    "link": f"{_NODES} SuperNodes, a round: the SuperLink's processor seconds",
    "transport": f"{_NODES} SuperNodes, a round: transport and bookkeeping, seconds",
    "megabytes": f"{_NODES} SuperNodes, a round: MB up and down, as the method counts them",
}


def machines(repeats: int) -> Figures:
    """Measure four rounds of a ResNet-18 of width 16; like the scripts of ``deploy/``, needs OpenSSL and ssh-keygen."""
    federation = [str(CHECKOUT / "deploy" / "federation.sh")]
    missing = [tool for tool in ("openssl", "ssh-keygen") if shutil.which(tool) is None]
    if missing or not Path(*federation).exists():
        reason = f"needs {' and '.join(missing)}" if missing else "needs a checkout of the project, for deploy/"
        return {name: unmeasured(reason=reason) for name in _NAMES.values()}
    with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder:
        place = Path(folder)
        environment = _environment(place)
        nodes = ["--nodes", str(_NODES), "--port", "0", "--connection", _CONNECTION]
        _must([*federation, "setup", str(place / "federation"), *nodes], environment)
        try:
            _must([*federation, "start", str(place / "federation")], environment)
            seconds, records = _run(place, environment)
        finally:
            finish([*federation, "stop", str(place / "federation")], environment)
    moved = [sum(record["bytes"].values()) / 1e6 for record in records[1:]]
    return {
        _NAMES["link"]: {"median": seconds / len(records)},
        _NAMES["transport"]: spread([record["seconds"]["transport"] for record in records[1:]]),
        _NAMES["megabytes"]: {"median": statistics.median(moved)},
    }


def _run(place: Path, environment: dict[str, str]) -> tuple[float, list[dict[str, dict[str, float]]]]:
    """Return the SuperLink's CPU seconds during a run, and the run's records."""
    told = {**_RUN, "results-dir": str(place / "results"), "run-name": "run"}
    settings = place / "run.toml"
    settings.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items()))
    link = psutil.Process(int((place / "federation" / "superlink" / "pid").read_text()))
    before = _processor_seconds(link)
    _must(["flwr", "run", str(staged_app(place / "app")), _CONNECTION, "--run-config", str(settings)], environment)
    summary = place / "results" / "run" / "summary.json"
    while not summary.exists():
        time.sleep(_LOOK_SECONDS)
        answer = json.loads(_must(["flwr", "list", _CONNECTION, "--format", "json"], environment))
        if answer["runs"][0]["status"].startswith("finished") and not summary.exists():
            raise RunError(f"the benchmark's run ended as {answer['runs'][0]['status']}")
    lines = summary.with_name("rounds.jsonl").read_text().splitlines()
    return _processor_seconds(link) - before, [json.loads(line) for line in lines]


def _processor_seconds(process: psutil.Process) -> float:
    family = [process, *process.children(recursive=True)]
    return float(sum(sum(each.cpu_times()[:2]) for each in family))


def _environment(place: Path) -> dict[str, str]:
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR", "RAY"))}
    return flower_environment(place / "flwr", outside)


def _must(command: list[str], environment: dict[str, str]) -> str:
    """Run a command and return its output; raise RunError if it fails."""
    done = finish(command, environment)
    if done.returncode != 0:
        raise RunError(f"{' '.join(command[:2])}: {(done.stdout + done.stderr).strip().splitlines()[-1]}")
    return done.stdout
