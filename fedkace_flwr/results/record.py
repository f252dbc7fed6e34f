"""The summary of a run, and the description of the machine, as JSON-ready values."""

import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fedkace_flwr
from fedkace_flwr.compute.numerics import described
from fedkace_flwr.config import Config
from fedkace_flwr.messaging.metrics import COMMON
from fedkace_flwr.metrics import average_accuracy
from fedkace_flwr.results.transfer import transfer

_PARTS = ("round", *(metric.column for metric in COMMON if metric.is_timed), "transport")
_DEFENCE = frozenset({"norm", "direction", "retention", "copy"})  # of failures; earlier versions looked for copies
_PACKAGES = ("flwr", "ray", "torch", "torchvision", "numpy")


def summarise(config: Config, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of ``summary.json``."""
    return {
        "method": config.method,
        "dataset": config.data.name,
        "clients": config.stream.clients,
        "rounds": rounds[-1]["round"] if rounds else 0,
        "seed": config.run.seed,
        **totals(rounds),
    }


def totals(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the totals over a run's rounds: accuracy, chance, forgetting and transfer, switches, failures, bytes and seconds.

    Parameters
    ----------
    rounds : sequence of mapping
        Lines of ``rounds.jsonl``.
    """
    accuracies = known(record["accuracy"] for record in rounds)
    chances = known(record["chance"] for record in rounds)
    alarms = sum(len(record.get("alarms", ())) for record in rounds)
    return {
        "average_accuracy": average_accuracy(accuracies) if accuracies else None,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "average_chance": average_accuracy(chances) if chances else None,
        **transfer(rounds),
        "switched_at": rounds[-1]["switched_at"] if rounds else [],
        "failures": sum(len(record["failures"]) for record in rounds),
        "failures_by_client": failures_by_client(rounds),
        **({"alarms": alarms} if alarms else {}),
        "bytes": {way: sum(record["bytes"][way] for record in rounds) for way in ("down", "up")},
        "seconds": {
            part: sum(record["seconds"].get(part, 0.0) for record in rounds)
            for part in (rounds[0]["seconds"] if rounds else _PARTS)
        },
    }


def known(values: Iterable[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def failures_by_client(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Count each client's rejected replies by kind of reason; clients and kinds without any are absent."""
    counts = Counter(
        (failure["client"], failure.get("kind", "other")) for record in rounds for failure in record["failures"]
    )
    named: dict[str, dict[str, int]] = {}
    for (client, kind), count in sorted(counts.items()):
        named.setdefault(str(client), {})[kind] = count
    return named


def defended(rounds: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Count the updates that were rejected, and those that were clipped, because they were unlike the others'.

    Parameters
    ----------
    rounds : sequence of mapping
        Lines of ``rounds.jsonl``; earlier versions compared updates in every run.
    """
    kinds = [failure.get("kind") for record in rounds for failure in record["failures"]]
    layers = [count for record in rounds for count in record.get("clipped_layers", ())]
    return sum(kind in _DEFENCE for kind in kinds), sum(bool(count) for count in layers)


def defence_note(rejected: int, clipped: int) -> str:
    """Say in half a sentence what :func:`defended` counted; empty if there was nothing."""
    updates = "update" if rejected == 1 else "updates"
    return f"{rejected} {updates} rejected, {clipped} clipped by the defence" if rejected or clipped else ""


def accuracy_so_far(rounds: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the average accuracy over the rounds that have one, or None if none has."""
    accuracies = known(record["accuracy"] for record in rounds)
    return average_accuracy(accuracies) if accuracies else None


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions and hardware of the server process, and how it computes on a GPU."""
    return {
        "fedkace_flwr": fedkace_flwr.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        **described(device),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def title(config: Config) -> str:
    """Describe a run in one line."""
    words = [f"{config.stream.clients} clients", config.chunks, f"M = {config.buffer.capacity}"]
    return f"{config.method} on {config.data.name}: {', '.join(filter(None, words))}"
