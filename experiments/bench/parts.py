"""What each part that any method can use costs, added to balanced replay, and what FedFrame costs beside FedKACE.

Two clients, as the only one would receive its own model back, which is tested once. Three rounds of three epochs, chunks
of 100 and a buffer of 200 images of 32 pixels. Training includes selection; evaluation is of up to 200 test images and
includes what a client does with a received model before it predicts.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.bench.measure import Figures, peak_memory, ratio
from fedkace_flwr.experiments.running.inline import run_inline

_SETTINGS = {
    "method": "er-balanced",
    "clients": 2,
    "rounds": 3,
    "overlap": 3,
    "window": 5,
    "samples-per-class": 20,
    "capacity": 200,
    "epochs": 3,
    "image-size": 32,
    "width": 16,
    "test-per-class": 20,
    "threads": 1,
    "precision": "fp32",
    "diagnostics": False,
}
_PARTS: dict[str, dict[str, Any]] = {
    "augment": {"augment": "flip-shift"},
    "logit-adjustment": {"logit-adjustment": 1.0},
    "recalibrate-batchnorm": {"recalibrate-batchnorm": True},
    "classifier": {"classifier": "both"},
    "output-layer": {"output-layer": "simplex"},
    "predict-with = mean": {"predict-with": "mean"},
    "predict-with = mean, mirrored": {"predict-with": "mean", "test-time-augmentation": "mirrored"},
    "predict-with = prequential": {"predict-with": "prequential"},
}
_FEDKACE = {"method": "fedkace"}
_FEDFRAME = {"method": "fedframe", "mirroring": "allowed"}


@dataclass(frozen=True)
class _Pair:
    name: str
    changes: dict[str, Any]
    other: str
    base: dict[str, Any]


@dataclass(frozen=True)
class _Cost:
    training: float
    evaluation: float
    state: int
    messages: int


def parts(repeats: int) -> Figures:
    """Time the rounds, and count bytes on disk, in messages and in memory."""
    pairs = [_Pair(name, changes, "none", {}) for name, changes in _PARTS.items()]
    pairs.append(_Pair("FedFrame", _FEDFRAME, "FedKACE", _FEDKACE))
    costs: dict[str, list[tuple[_Cost, _Cost]]] = {pair.name: [] for pair in pairs}
    _run({})  # the first run in a process is slower
    for _ in range(repeats):
        for pair in pairs:  # each beside its own base, as the machine's speed changes within a turn
            costs[pair.name].append((_run(pair.changes), _run(pair.base)))
    plain = {"none": peak_memory(_run, {}), "FedKACE": peak_memory(_run, _FEDKACE)}
    figures: Figures = {}
    for pair in pairs:
        mine, base = zip(*costs[pair.name], strict=True)
        figures |= {
            f"{pair.name}: training, against {pair.other}": ratio(
                [each.training for each in mine],
                [each.training for each in base],
                "<= 1.15" if pair.name == "FedFrame" else "",
            ),
            f"{pair.name}: evaluation, against {pair.other}": ratio(
                [each.evaluation for each in mine], [each.evaluation for each in base]
            ),
            f"{pair.name}: more memory at the peak, MiB": {
                "median": peak_memory(_run, pair.changes) - plain[pair.other]
            },
            f"{pair.name}: more on disk, KiB": {"median": (mine[0].state - base[0].state) / 1024},
            f"{pair.name}: more in messages, KiB a round": {"median": (mine[0].messages - base[0].messages) / 1024},
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
