"""What a run leaves of a round, of the whole, and of the machine, as plain JSON-ready values."""

import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fedkace_flwr
from fedkace_flwr.config import Config
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.metrics import average_accuracy

_PACKAGES = ("flwr", "ray", "torch", "torchvision", "numpy")


def round_record(
    number: int,
    clients: int,
    trained: Mapping[int, Mapping[str, Any]],
    evaluated: Mapping[int, Mapping[str, Any]],
    *,
    drift: float | None,
    failures: Sequence[Mapping[str, Any]],
    bytes_down: int,
    bytes_up: int,
    seconds: float,
) -> dict[str, Any]:
    """One line of ``rounds.jsonl``.

    Parameters
    ----------
    number, clients : int
        t from 1, and K.
    trained, evaluated : mapping
        Each client's metrics of the two phases; a client that is missing becomes null.
    drift : float, optional
        Mean squared distance of local models from the global one.
    failures : sequence of mapping
        Client, phase, reason and the reason's kind.
    bytes_down, bytes_up : int
        Records sent to clients and received from them.
    seconds : float
        Wall time of the round.

    Returns
    -------
    dict
        JSON-ready. Every time stands under ``seconds``, so that the rest is equal for equal seeds.
    """

    def column(source: Mapping[int, Mapping[str, Any]], name: str) -> list[Any]:
        return [source.get(client, {}).get(name) for client in range(clients)]

    # A method may choose its buffer only after the new global model has come; then the later report counts.
    settled = {client: {**metrics, **evaluated.get(client, {})} for client, metrics in trained.items()}
    accuracies = [value for value in column(evaluated, keys.ACCURACY) if value is not None]
    seen = [value for value in column(evaluated, keys.SEEN_CLASSES) if value is not None]
    record = {
        "round": number,
        "accuracy": sum(accuracies) / len(accuracies) if accuracies else None,
        "chance": sum(1 / value for value in seen) / len(seen) if seen else None,
        "client_accuracy": column(evaluated, keys.ACCURACY),
        "local_accuracy": column(evaluated, keys.LOCAL_ACCURACY),
        "global_accuracy": column(evaluated, keys.GLOBAL_ACCURACY),
        "seen_classes": column(evaluated, keys.SEEN_CLASSES),
        "switched_at": column(evaluated, keys.SWITCHED_AT),
        "gap": column(evaluated, keys.GAP),
        "buffer_accuracy": column(evaluated, keys.BUFFER_ACCURACY),
        "buffer_probability": column(evaluated, keys.BUFFER_PROBABILITY),
        "replay_weights": column(trained, keys.REPLAY_WEIGHTS),
        "replay_ratios_skipped": column(trained, keys.REPLAY_SKIPPED),
        "buffer_size": column(settled, keys.BUFFER_SIZE),
        "buffer_classes": column(settled, keys.BUFFER_CLASSES),
        "condition_number": column(trained, keys.CONDITION_NUMBER),
        "interpolated": any(column(evaluated, keys.INTERPOLATED)),
        "client_drift": drift,
        "bytes": {"down": bytes_down, "up": bytes_up},
        "failures": list(failures),
    }
    both = [metrics for phase in (trained, evaluated) for metrics in phase.values()]

    def total(name: str) -> float:
        return float(sum(metrics.get(name, 0.0) for metrics in both))

    record["seconds"] = {
        "round": seconds,
        "training": total(keys.TRAINING_SECONDS),
        "selection": total(keys.SELECTION_SECONDS),
        "evaluation": total(keys.EVALUATION_SECONDS),
        "transport": max(0.0, seconds - busy_seconds(both)),
    }
    return record


def busy_seconds(spans: Sequence[Mapping[str, Any]]) -> float:
    """Seconds during which at least one client computed; what is left of a round is transport and bookkeeping."""
    edges = sorted((span[keys.STARTED], span[keys.FINISHED]) for span in spans if keys.STARTED in span)
    busy, reached = 0.0, float("-inf")
    for started, finished in edges:
        busy += max(0.0, finished - max(started, reached))
        reached = max(reached, finished)
    return busy


def summarise(config: Config, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of ``summary.json``."""
    accuracies = [record["accuracy"] for record in rounds if record["accuracy"] is not None]
    chances = [record["chance"] for record in rounds if record["chance"] is not None]
    switched = rounds[-1]["switched_at"] if rounds else []
    times = {
        name: sum(record["seconds"][name] for record in rounds)
        for name in ("round", "training", "selection", "evaluation", "transport")
    }
    return {
        "method": config.method,
        "dataset": config.data.dataset,
        "clients": config.stream.clients,
        "rounds": len(rounds),
        "seed": config.run.seed,
        "average_accuracy": accuracy_so_far(rounds),
        "final_accuracy": accuracies[-1] if accuracies else None,
        "average_chance": average_accuracy(chances) if chances else None,
        "switched_at": switched,
        "failures": sum(len(record["failures"]) for record in rounds),
        "failures_by_client": failures_by_client(rounds),
        "bytes": {way: sum(record["bytes"][way] for record in rounds) for way in ("down", "up")},
        "seconds": times,
    }


def failures_by_client(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """How many replies of each client were left out, by kind of reason; clients and kinds without any are not named."""
    counts = Counter(
        (failure["client"], failure.get("kind", "other")) for record in rounds for failure in record["failures"]
    )
    named: dict[str, dict[str, int]] = {}
    for (client, kind), count in sorted(counts.items()):
        named.setdefault(str(client), {})[kind] = count
    return named


def accuracy_so_far(rounds: Sequence[Mapping[str, Any]]) -> float | None:
    """Average accuracy over the rounds that have one; None if none has."""
    accuracies = [record["accuracy"] for record in rounds if record["accuracy"] is not None]
    return average_accuracy(accuracies) if accuracies else None


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware of the server process."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "fedkace_flwr": fedkace_flwr.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": gpu,
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
    """What was run, in a line."""
    stream = config.stream
    return (
        f"{config.method} on {config.data.dataset}: {stream.clients} clients, window {stream.window}, "
        f"overlap {stream.overlap}, M = {config.buffer.capacity}"
    )
