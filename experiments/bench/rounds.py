"""Whole rounds in Flower's simulation: the overhead beyond the clients' computation, and its growth with the clients."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.bench.measure import Figures, spread
from fedkace_flwr.experiments.running.engines import FlowerEngine

_WORKERS = 2
_QUICK = {"epochs": 1, "rounds": 4, "threads": 1}
_TINY = {**_QUICK, "width": 4, "samples-per-class": 2, "capacity": 10, "test-per-class": 1}
_PAPERS = {"image-size": 32, "width": 16, "window": 10, "overlap": 10, "samples-per-class": 40, "capacity": 1000}


def rounds(repeats: int) -> Figures:
    """Time rounds of ten clients on digits, of 10 to 1000 tiny clients, and of ten clients with the paper's sizes."""
    with _run({**_QUICK, "clients": 10}) as ten:
        parts = ("selection", "evaluation", "transport")
        figures: Figures = {
            f"quickstart, round of ten clients, {part}, seconds": spread([each["seconds"][part] for each in ten[1:]])
            for part in parts
        }
    per_client = {}
    for clients, number in {10: 4, 200: 4, 1000: 3}.items():
        with _run({**_TINY, "clients": clients, "rounds": number}) as lines:
            # The first round is left out because it includes the workers' imports.
            overheads = [
                (line["seconds"]["round"] - _compute(line["seconds"]) / _WORKERS) / clients for line in lines[1:]
            ]
            per_client[clients] = spread(overheads)
            figures[f"round less compute / 2, per client, {clients} clients, seconds"] = per_client[clients]
    for clients, aim in {200: {"aim": "<= 1.5"}, 1000: {}}.items():
        growth = per_client[clients]["median"] / per_client[10]["median"]
        figures[f"{clients} clients against 10, per client"] = {"median": growth, **aim}
    with _run({**_PAPERS, "clients": 10, "rounds": 3, "epochs": 2, "threads": 1}) as lines:
        shares = [line["seconds"]["round"] / (_compute(line["seconds"]) / _WORKERS) for line in lines[1:]]
        figures["ten clients on two workers, round against compute / 2"] = spread(shares, "<= 1.10")
    return figures


def _compute(seconds: dict[str, float]) -> float:
    """Return the computing time of all clients together."""
    return seconds["training"] + seconds["selection"] + seconds["evaluation"]


@contextmanager
def _run(settings: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Run a configuration on two workers and return its records."""
    with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder:
        config = Config.parse({**settings, "results-dir": folder, "run-name": "round"})
        Experiment(config)
        run = Path(folder) / "round"
        run.mkdir()
        FlowerEngine(_WORKERS, 0.0).start(config, run / "app.log").check()
        yield [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
