"""A cache of the Centralized reference: one accuracy per data set, stream, seed, client and round.

The reference costs far more than any method, and depends on nothing but the configuration: it is computed once
and then shared by every run that asks for it.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedkace_flwr.config import Config
from fedkace_flwr.data.datasets import cache_dir
from fedkace_flwr.keys import kebab, keys_of
from fedkace_flwr.sections import DataConfig, ModelConfig, StreamConfig, TrainingConfig

_VERSION = 1


def cached_accuracy(config: Config, client: int, round_number: int, compute: Callable[[], float]) -> float:
    """The reference accuracy of a client after a round, computed only if it is not in the cache.

    Parameters
    ----------
    config : Config
        What the reference depends on is part of the cache's key: data, stream, model, training, seed; neither the
        number of clients nor of rounds changes what a client has met by then.
    client, round_number : int
        Client from 0, round from 1.
    compute : callable
        Trains and tests.
    """
    path = cache_dir(config.data) / "centralized" / fingerprint(config) / f"client-{client:03d}-{round_number:06d}.json"
    known = _read(path)
    if known is not None:
        return known
    value = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({"accuracy": value}), encoding="utf-8")
    partial.replace(path)
    return value


def reference_keys() -> tuple[str, ...]:
    """Return the names of the keys that the reference's accuracies depend on, rounding aside.

    These are the keys of data, stream, model and training that affect numbers, and the seed. ``batching`` is not among
    them: it says how chunk and buffer are batched together, and the reference has no buffer.
    """
    names = [
        kebab(name)
        for section in (DataConfig, StreamConfig, ModelConfig, TrainingConfig)
        for name, declared in keys_of(section).items()
        if declared.affects == "numbers" and name != "batching"
    ]
    return (*names, "seed")


def fingerprint(config: Config) -> str:
    """Return a name for all that the reference depends on.

    It covers whole sections, so that a new key is never forgotten: at worst a reference is computed again. Of a data
    set of the user's own, ``data-dir`` says which one it is. A client's accuracy after a round depends neither on the
    number of clients nor on that of rounds.
    """
    stream: dict[str, Any] = asdict(config.stream)
    data: dict[str, Any] = asdict(config.data)
    for name in ("clients", "rounds"):
        del stream[name]
    data["data_dir"], data["cache_dir"] = str(Path(config.data.data_dir).expanduser().resolve()), None
    parts = [_VERSION, data, stream, asdict(config.model), asdict(config.training), config.run.seed]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def anchors(round_number: int, every: int, rounds: int) -> tuple[int, int]:
    """The trained rounds around a round: 1, 1 + m, 1 + 2m, ... and the last; equal if the round is one of them."""
    below = round_number - (round_number - 1) % every
    if round_number in (below, rounds):
        return round_number, round_number
    return below, min(below + every, rounds)


def _read(path: Path) -> float | None:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["accuracy"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or damaged: computed again
