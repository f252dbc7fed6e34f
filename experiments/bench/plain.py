"""The same work without this project: a plain Flower app in the style of its quickstart, and a single process.

All three train ResNet-18 of the same width on digits of 32 pixels with ten clients, two rounds, and the same samples
and epochs, and average the models after each round. :func:`start` times the start and the end of runs alone, beside a
Flower app that does nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.bench.measure import Figures, ratio, spread
from fedkace_flwr.experiments.bench.training import Pictures, customary_epoch
from fedkace_flwr.experiments.running.engines import FlowerEngine
from fedkace_flwr.experiments.running.ports import free_ports
from fedkace_flwr.experiments.running.processes import end_all_of, finish, flower_environment, staged_app
from fedkace_flwr.networks.resnet import ResNet18, resnet18

_CLIENTS, _ROUNDS, _EPOCHS, _WORKERS = 10, 2, 3, 2
_SETTINGS = {
    "method": "fedavg",
    "clients": _CLIENTS,
    "rounds": _ROUNDS,
    "epochs": _EPOCHS,
    "image-size": 32,
    "width": 16,
    "window": 10,
    "overlap": 10,
    "samples-per-class": 40,
    "test-per-class": 1,
    "diagnostics": False,
    "threads": 1,
}


def plain(repeats: int) -> Figures:
    """Time whole runs and their rounds: this project's and the two others."""
    kinds = {"this project": _ours, "plain Flower app": _flower, "one process without Flower": _alone}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, run in kinds.items():
            begun = time.perf_counter()
            in_rounds = run()
            seconds[name].append((time.perf_counter() - begun, in_rounds))
    figures: Figures = {}
    for name, pairs in seconds.items():
        figures[f"{name}, rounds, seconds"] = spread([each for _, each in pairs])
        figures[f"{name}, with start and end, seconds"] = spread([each for each, _ in pairs])
    ours = [each for _, each in seconds["this project"]]
    for name in ("plain Flower app", "one process without Flower"):
        figures[f"{name}, rounds, against this project's"] = ratio([each for _, each in seconds[name]], ours)
    return figures


def _ours() -> float:
    with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder:
        config = Config.parse({**_SETTINGS, "results-dir": folder, "run-name": "ours"})
        run = Path(folder) / "ours"
        run.mkdir()
        FlowerEngine(_WORKERS, 0.0).start(config, run / "app.log").check()
        lines = (run / "rounds.jsonl").read_text().splitlines()
        return float(sum(json.loads(line)["seconds"]["round"] for line in lines))


def _flower() -> float:
    return _in_a_process("flower")


def _alone() -> float:
    return _in_a_process("alone")


def _in_a_process(kind: str) -> float:
    command = [sys.executable, "-m", "fedkace_flwr.experiments.bench.plain", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


_IDLE = """\
[project]
name = "idle"
version = "1.0.0"
description = "Does nothing."
license = "Apache-2.0"
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "idle.apps:server"
clientapp = "idle.apps:client"
"""
_IDLE_APPS = """\
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
import numpy as np

client = ClientApp()
server = ServerApp()

@client.train()
def train(message, context):
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

@server.main()
def main(grid, context):
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord({"w": Array(np.zeros(1))}), num_rounds=1)
"""


def start(repeats: int) -> Figures:
    """Time one round of the quickstart less the round itself, and one round of a Flower app that does nothing."""
    kinds = ("python -m experiments run", "flwr run", "flwr run, an idle app")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder:
        place = Path(folder)
        (place / "idle" / "idle").mkdir(parents=True)
        (place / "idle" / "pyproject.toml").write_text(_IDLE)
        (place / "idle" / "idle" / "__init__.py").touch()
        (place / "idle" / "idle" / "apps.py").write_text(_IDLE_APPS)
        app = staged_app(place / "app")
        link, control = free_ports(2)
        environment = {
            **flower_environment(place / "flwr", os.environ),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(link),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }
        nodes = ["--federation-config", f"num-supernodes={_CLIENTS} client-resources-num-cpus=1"]
        try:
            _flwr_run(place / "idle", nodes, environment)  # starts the SuperLink
            for turn in range(repeats):
                results = place / f"results-{turn}"
                command = [sys.executable, "-m", "experiments", "run", "quickstart", "--set", "rounds=1"]
                command += ["--only", "fedkace_*", "--workers", str(_WORKERS), "--results", str(results)]
                seconds[kinds[0]].append(_timed(command, environment) - _in_rounds(results))
                told = ["--run-config", f'rounds=1 results-dir="{results / "flwr"}" run-name="run"']
                seconds[kinds[1]].append(_flwr_run(app, [*nodes, *told], environment) - _in_rounds(results / "flwr"))
                seconds[kinds[2]].append(_flwr_run(place / "idle", nodes, environment))
        finally:
            end_all_of("FLWR_HOME", str(place / "flwr"))
    figures: Figures = {f"start and end, {kind}, seconds": spread(each) for kind, each in seconds.items()}
    for kind in kinds[:2]:
        figures[f"start and end, {kind}, against an idle app"] = ratio(seconds[kind], seconds[kinds[2]])
    return figures


def _flwr_run(app: Path, options: list[str], environment: dict[str, str]) -> float:
    return _timed(["flwr", "run", str(app), "--stream", *options], environment)


def _timed(command: list[str], environment: dict[str, str]) -> float:
    begun = time.perf_counter()
    done = finish(command, environment)
    if done.returncode:
        raise RunError(f"{command[0]} failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return time.perf_counter() - begun


def _in_rounds(results: Path) -> float:
    (path,) = results.rglob("rounds.jsonl")
    return float(sum(json.loads(line)["seconds"]["round"] for line in path.read_text().splitlines()))


def _pictures(client: int, number: int) -> Pictures:
    experiment = Experiment(Config.parse(_SETTINGS))
    chunk = experiment.chunk(client, number)
    return Pictures(chunk.images(experiment.dataset.fetch), chunk.labels)


def _network() -> ResNet18:
    return resnet18(10, 16, "cifar")


def _train(net: ResNet18, client: int, number: int) -> None:
    pictures = _pictures(client, number)
    for _ in range(_EPOCHS):
        customary_epoch(net, pictures)


def _run_alone() -> float:
    """Train the clients one after the other in one process, and average their models."""
    weights = _network().state_dict()
    begun = time.perf_counter()
    for number in range(1, _ROUNDS + 1):
        models = []
        for client in range(_CLIENTS):
            net = _network()
            net.load_state_dict(weights)
            _train(net, client, number)
            models.append(net.state_dict())
        weights = {
            name: torch.stack([model[name].double() for model in models]).mean(dim=0).to(weights[name].dtype)
            for name in weights
        }
    return time.perf_counter() - begun


def _run_flower() -> float:
    """Train with Flower's own FedAvg strategy and simulation, and a client written as in its quickstart."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()
    took: list[float] = []

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        net = _network()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        told: Any = message.content.config_records["config"]
        _train(net, int(context.node_config["partition-id"]), int(told["server-round"]))
        metrics = MetricRecord({"num-examples": 400})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=_CLIENTS)
        begun = time.perf_counter()
        strategy.start(grid, ArrayRecord(_network().state_dict()), num_rounds=_ROUNDS)
        took.append(time.perf_counter() - begun)

    backend: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": _WORKERS}}
    run_simulation(server_app, client_app, num_supernodes=_CLIENTS, backend_config=backend)
    return took[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(_run_flower() if sys.argv[1] == "flower" else _run_alone())
