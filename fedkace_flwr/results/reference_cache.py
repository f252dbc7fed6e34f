"""A cache of the Centralized reference: one accuracy per data set, stream, seed, client and round.

The reference costs far more than any method and depends only on the configuration, so it is computed once and shared
by every run that needs it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedkace_flwr.config import Config
from fedkace_flwr.data import pixels
from fedkace_flwr.data.datasets import cache_dir
from fedkace_flwr.data.readers.catalogue import DATASETS
from fedkace_flwr.keys import kebab, keys_of
from fedkace_flwr.sections import DataConfig, ModelConfig, StreamConfig, TrainingConfig
from fedkace_flwr.storage.files import read_text, write_text
from fedkace_flwr.storage.folders import absolute

_VERSION = 1


def cached_accuracy(
    config: Config, client: int, round_number: int, compute: Callable[[], float], data: str = ""
) -> float:
    """Return the reference accuracy of a client after a round; compute it only if it is not in the cache.

    Parameters
    ----------
    config : Config
        The cache is keyed by everything that the reference depends on: data, stream, model, training and seed. The
        numbers of clients and rounds are not part of the key if they do not change what a client has seen.
    client, round_number : int
        Client from 0, round from 1.
    compute : callable
        Trains and tests; returns the accuracy.
    data : str
        Digest of the data set. An accuracy on other data that had the same place is computed again; of one that an
        earlier version has stored, the data are not known.
    """
    path = cache_dir() / "centralized" / fingerprint(config) / f"client-{client:03d}-{round_number:06d}.json"
    known = _read(path, data)
    if known is not None:
        return known
    value = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"accuracy": value, "data": data}))
    return value


def reference_keys() -> tuple[str, ...]:
    """Return the names of the keys that the reference's accuracies depend on, apart from rounding.

    These are the seed and the keys of data, stream, model and training that affect numbers. ``batching`` is excluded:
    it determines how chunk and buffer are batched together, and the reference has no buffer. So is ``mirroring``: it
    acts through ``augment`` alone.
    """
    training = _affecting_numbers(ModelConfig, TrainingConfig)
    return (*_affecting_numbers(DataConfig, StreamConfig), *training, "seed")


def stream_keys() -> tuple[str, ...]:
    """Return the names of the keys that decide which samples a client learns in which round."""
    return (*_affecting_numbers(DataConfig, StreamConfig), "seed")


def _affecting_numbers(*sections: type) -> list[str]:
    return [
        kebab(name)
        for section in sections
        for name, declared in keys_of(section).items()
        if declared.affects == "numbers" and name not in ("batching", "mirroring")
    ]


def fingerprint(config: Config) -> str:
    """Return a hash of everything that the reference depends on.

    It covers whole sections, so that a new key cannot be forgotten: at worst, a reference is computed again. It
    includes ``data-dir``, which identifies the user's own data sets, how image files are read, and size and time of
    ``weights-file``. A client's accuracy after a round depends neither on the number of clients nor on the number of
    rounds, so these are left out, unless a client's samples depend on them: if samples are dealt out to the clients, on
    the clients' shares, on exchanges with later rounds, or on which clients are drawn to train.
    """
    stream: dict[str, Any] = asdict(config.stream)
    data: dict[str, Any] = asdict(config.data)
    everyone = config.stream.participants_per_round == config.stream.clients
    if everyone:
        del stream["fraction_train"]
    if everyone and config.stream.shared_samples and config.stream.kind != "quantity-skew":
        del stream["clients"]
    if not config.stream.why_not_longer:
        del stream["rounds"]
    del data["mirroring"]
    data["data_dir"] = str(absolute(config.data.data_dir, "data-dir"))
    model = asdict(config.model)
    if config.model.weights_file:
        model["weights_file"] = _identity(absolute(config.model.weights_file, "weights-file"))
    parts = [_VERSION, data, stream, model, asdict(config.training), config.run.seed]
    known = DATASETS.get(config.data.source)
    if known is not None and known.framing(1).scaling == "pillow":  # a data set of image files
        parts.append(pixels.READING)
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _identity(path: Path) -> list[Any]:
    """What changes if another file takes a file's place: path, size and modification time."""
    try:
        facts = path.stat()
    except OSError:
        return [str(path)]  # whoever needs the file says what is wrong with it
    return [str(path), facts.st_size, facts.st_mtime_ns]


def _read(path: Path, data: str) -> float | None:
    try:
        stored = json.loads(read_text(path))
        return float(stored["accuracy"]) if stored.get("data", data) == data else None
    except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError):
        return None  # missing or damaged: compute it again
