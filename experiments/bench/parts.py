"""What each part that any method can use costs, added to balanced replay.

One client, four rounds, chunks of 100 and a buffer of 200 images of 32 pixels, 12 epochs. Training includes selection;
evaluation is of 200 test images and includes what a client does with a received model before it predicts.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.bench.measure import Figures, peak_memory, ratio
from experiments.running.inline import run_inline
from fedkace_flwr.config import Config

_SETTINGS = {
    "method": "er-balanced",
    "clients": 1,
    "rounds": 4,
    "overlap": 3,
    "window": 5,
    "samples-per-class": 20,
    "capacity": 200,
    "epochs": 12,
    "image-size": 32,
    "width": 16,
    "test-per-class": 20,
    "threads": 1,
    "precision": "fp32",
    "diagnostics": False,
}
_RUNS: dict[str, dict[str, Any]] = {
    "": {},
    "augment": {"augment": "flip-shift"},
    "logit-adjustment": {"logit-adjustment": 1.0},
    "stored-logits": {"stored-logits": 0.5},
    "recalibrate": {"recalibrate": True},
    "classifier": {"classifier": "both"},
    "output-layer": {"output-layer": "simplex"},
    "inference = mean, views": {"inference": "mean", "views": "mirrored"},
    "inference = mean": {"inference": "mean"},
    "inference = prequential": {"inference": "prequential"},
    "inference = mean, model-average": {"inference": "mean", "model-average": 0.5},
}


@dataclass(frozen=True)
class _Cost:
    training: float
    evaluation: float
    state: int
    messages: int


def parts(repeats: int) -> Figures:
    """Time the rounds, and count bytes on disk, in messages and in memory."""
    costs: dict[str, list[_Cost]] = {name: [] for name in _RUNS}
    for _ in range(repeats):
        for name, changes in _RUNS.items():
            costs[name].append(_run(changes))
    memory = {name: peak_memory(_run, changes) for name, changes in _RUNS.items()}
    plain, figures = costs.pop(""), Figures()
    for name, mine in costs.items():
        training = [each.training for each in mine], [each.training for each in plain]
        evaluation = [each.evaluation for each in mine], [each.evaluation for each in plain]
        figures |= {
            f"{name}: training, against none": ratio(*training),
            f"{name}: evaluation, against none": ratio(*evaluation),
            f"{name}: more memory at the peak, MiB": {"median": memory[name] - memory[""]},
            f"{name}: more on disk, KiB": {"median": (mine[0].state - plain[0].state) / 1024},
            f"{name}: more in messages, KiB a round": {"median": (mine[0].messages - plain[0].messages) / 1024},
        }
    return figures


def _run(changes: dict[str, Any]) -> _Cost:
    with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder:
        run_inline(Config.parse({**_SETTINGS, **changes, "results-dir": folder, "run-name": "run"}))
        run = Path(folder) / "run"
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
        seconds = [line["seconds"] for line in lines]
        last = max((run / "clients" / "client-000").glob("state-*.npz"))
        return _Cost(
            sum(each["training"] + each["selection"] for each in seconds),
            sum(each["evaluation"] for each in seconds),
            last.stat().st_size,
            sum(lines[-1]["bytes"].values()),
        )
