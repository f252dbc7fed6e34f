"""Results folders with made-up values, for the tests of results and report."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkace_flwr.clients.fedkace import SINGULAR
from fedkace_flwr.config import Config
from fedkace_flwr.results.record import summarise

SMALL_RUN: dict[str, Any] = {
    "dataset": "digits",
    "clients": 2,
    "rounds": 4,
    "window": 2,
    "overlap": 1,
    "epochs": 3,
    "capacity": 20,
    "results-dir": "somewhere",
}


def made_round(number: int, accuracy: float | None, clients: int = 2, **changes: Any) -> dict[str, Any]:
    """Return a line of ``rounds.jsonl``; the first client switches in round 3, the other one never."""
    switched = [3 if number >= 3 else None, *[None] * (clients - 1)]
    return {
        "round": number,
        "accuracy": accuracy,
        "chance": 1 / (1 + number),
        "client_accuracy": [accuracy] * clients,
        "local_accuracy": [None if at else accuracy for at in switched],
        "global_accuracy": [accuracy if at else None for at in switched],
        "class_accuracy": [[accuracy if label <= number else None for label in range(10)]] * clients,
        "new_class_accuracy": [None] * clients,
        "seen_classes": [1 + number] * clients,
        "switched_at": switched,
        "gap": [None if at else 0.1 * number for at in switched],
        "buffer_accuracy": [None if at else 0.5 for at in switched],
        "buffer_probability": [None if at else 0.4 for at in switched],
        "replay_weights": [[1.0, 2.0, 8.0]] * clients,
        "replay_ratios_skipped": [0] * clients,
        "buffer_size": [20] * clients,
        "buffer_classes": [[number, 0, 1, 0, 0, 0, 0, 0, 0, 2]] * clients,
        "condition_number": [100.0 * number, *[None] * (clients - 1)],
        "class_condition_number": [10.0 * number, SINGULAR, *[None] * (clients - 2)],
        "interpolated": False,
        "client_drift": 4.0,
        "bytes": {"down": 1000, "up": 500},
        "failures": [],
        "seconds": {"round": 2.0, "training": 1.0, "selection": 0.5, "evaluation": 0.25, "transport": 0.25},
        **changes,
    }


def write_run(
    study: Path, name: str, accuracies: Sequence[float | None], *, finished: bool = True, **config: Any
) -> Path:
    """Write a run's folder with these accuracies; keywords are configuration keys with underscores."""
    folder = study / name
    folder.mkdir(parents=True)
    named = {key.replace("_", "-"): value for key, value in config.items()}
    flat = Config.parse({**SMALL_RUN, "rounds": len(accuracies), **named}).flat()
    (folder / "config.json").write_text(json.dumps(flat))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.7", "gpu": None, "started": "today"}))
    rounds = [made_round(number, value, flat["clients"]) for number, value in enumerate(accuracies, 1)]  # type: ignore[arg-type]
    (folder / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in rounds))
    if finished:
        (folder / "summary.json").write_text(json.dumps(summarise(Config.parse(flat), rounds)))
    return folder


def add_to_environment(folder: Path, **parts: Any) -> Path:
    """Add to what a run's ``environment.json`` tells, such as ``files`` or ``resumptions``; return the folder."""
    path = folder / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


def write_study(folder: Path, runs: Mapping[str, Mapping[str, Any]], **changes: Any) -> None:
    """Write a ``study.json`` for runs that exist or will exist."""
    told = {
        "schema": 1,
        "study": "table1",
        "scale": "reduced",
        "title": "Baselines",
        "paper": "table1",
        "axes": ["seed", "data", "overlap", "method"],
        "runs": runs,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(told))
