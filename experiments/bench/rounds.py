"""Whole rounds on Flower's simulation: what is not computing, and how that and memory grow with the clients."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.bench.measure import Figures, spread
from experiments.engines import FlowerEngine
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment

_WORKERS = 2
_QUICK = {"epochs": 1, "rounds": 4, "threads": 1}
_TINY = {**_QUICK, "width": 4, "samples-per-class": 2, "capacity": 10, "test-per-class": 1}
_PAPERS = {"image-size": 32, "width": 16, "window": 10, "overlap": 10, "samples-per-class": 40, "capacity": 1000}


def rounds(repeats: int) -> Figures:
    """Rounds of ten clients, of 200, and of ten at the paper's size per step; ``repeats`` is the number of rounds."""
    with _run({**_QUICK, "clients": 10}) as ten:
        parts = ("selection", "evaluation", "transport")
        figures: Figures = {
            f"quickstart, round of ten clients, {part}, seconds": spread([each["seconds"][part] for each in ten[1:]])
            for part in parts
        }
    per_client = {}
    for clients in (10, 200):
        with _run({**_TINY, "clients": clients}) as lines:
            # The first round also pays for the workers' imports.
            overheads = [line["seconds"]["transport"] / clients for line in lines[1:]]
            per_client[clients] = spread(overheads)
            figures[f"transport and bookkeeping per client, {clients} clients, seconds"] = per_client[clients]
    growth = per_client[200]["median"] / per_client[10]["median"]
    figures["200 clients against 10, per client"] = {"median": growth, "aim": "<= 1.5"}
    with _run({**_PAPERS, "clients": 10, "rounds": 3, "epochs": 2, "threads": 1}) as lines:
        shares = [_against_compute(line["seconds"]) for line in lines[1:]]
        figures["ten clients on two workers, round against compute / 2"] = spread(shares, "<= 1.10")
    return figures


def _against_compute(seconds: dict[str, float]) -> float:
    compute = seconds["training"] + seconds["selection"] + seconds["evaluation"]
    return seconds["round"] / (compute / _WORKERS)


@contextmanager
def _run(settings: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The records of a run of two workers."""
    with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder, FlowerEngine(_WORKERS, 0.0) as engine:
        config = Config.parse({**settings, "results-dir": folder, "run-name": "round"})
        Experiment(config)
        run = Path(folder) / "round"
        run.mkdir()
        engine.start(config, run / "app.log").check()
        yield [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
