"""What a round of FedKACE costs with each part of a network that trains, for two networks as backbones.

Two clients on digits at 64 pixels: five epochs over a chunk of 50 images and, in the second round, which is measured, a
buffer of 50, and a test of up to 100. Each run has a process of its own, whose memory is measured.
"""

import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.bench.measure import Figures, peak_memory, ratio, spread
from fedkace_flwr.experiments.running.inline import run_inline

_SETTINGS = {
    "clients": 2,
    "rounds": 2,
    "window": 5,
    "samples-per-class": 10,
    "capacity": 100,
    "test-per-class": 10,
    "image-size": 64,
    "threads": 1,
    "precision": "fp32",
    "diagnostics": False,
    "run-name": "run",
}
_NETWORKS: dict[str, dict[str, Any]] = {
    "ResNet-18": {"network": "resnet18", "width": 64, "stem": "imagenet"},
    "ViT-tiny": {"network": "timm:vit_tiny_patch16_224"},
}
_PARTS = ("all", "norm", "lora", "output")


def trainable(repeats: int) -> Figures:
    """Count bytes, time the rounds, and measure memory."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {each: [] for each in product(_NETWORKS, _PARTS)}
    for _ in range(repeats):
        for network, part in found:  # in turn, as the machine's speed changes
            found[network, part].append(_costs({**_SETTINGS, **_NETWORKS[network], "trainable": part}))
    figures: Figures = {}
    for (network, part), costs in found.items():
        columns = {name: [each[name] for each in costs] for name in costs[0]}
        told = f"{network}, {part}: "
        figures[f"{told}bytes of a client's round"] = {"median": columns["bytes"][0]}
        figures[f"{told}seconds of a round"] = spread(columns["round"])
        figures[f"{told}seconds of its training"] = spread(columns["training"])
        figures[f"{told}memory at the peak, MiB"] = spread(columns["memory"])
    for network in _NETWORKS:
        whole, head = found[network, "all"], found[network, "output"]
        aims = ("< 0.01", ">= 5") if network == "ResNet-18" else ("", "")
        sizes, times = ([[each[name] for each in costs] for costs in (whole, head)] for name in ("bytes", "training"))
        figures[f"{network}: bytes, output against all"] = ratio(sizes[1], sizes[0], aims[0])
        figures[f"{network}: training, all against output"] = ratio(times[0], times[1], aims[1])
    return figures


def _costs(keys: dict[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder:
        memory = peak_memory(_run, {**keys, "results-dir": folder})
        last = json.loads((Path(folder) / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert not last["failures"], last["failures"]
    seconds = last["seconds"]
    return {
        "bytes": sum(last["bytes"].values()) / keys["clients"],
        "round": seconds["round"],
        "training": seconds["training"],
        "memory": memory,
    }


def _run(keys: dict[str, Any]) -> None:
    run_inline(Config.parse(keys))
