"""Whole runs over a faulty grid, and the files that they leave."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, MessageType

from fedkace_flwr import server_app
from fedkace_flwr.clients import tfcl as tfcl_names
from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints
from support.common import rounds_of
from support.doubles.faults import Damage, FaultyGrid, failed, honest

TRAIN, EVALUATE = MessageType.TRAIN, MessageType.EVALUATE
TRAINING_KINDS = {TRAIN, tfcl_names.HEAD_ACTION}
METHODS = [
    "fedkace",
    *(pytest.param(method, marks=pytest.mark.slow) for method in ("dcfcl", "fedcbdr", "tfcl")),
    *(pytest.param(method, marks=pytest.mark.exhaustive) for method in ("fedavg", "er", "ofcl", "lkc", "refed")),
]
"""The four kinds of rounds on the server, and the methods that share the first."""


def run(config: Config, damage: Damage = honest) -> FaultyGrid:
    wire = FaultyGrid(config, damage)
    server_app.run(wire, config, run_id=1)
    return wire


def ran(config: Config) -> list[dict[str, Any]]:
    """Run a configuration on the inline engine, and return its records."""
    run_inline(config)
    return records(config)


def folder_of(config: Config) -> Path:
    return Path(config.run.results_dir) / config.run.run_name


def records(config: Config) -> list[dict[str, Any]]:
    return rounds_of(folder_of(config))


def last(config: Config) -> Checkpoint:
    found = Checkpoints(folder_of(config) / "server").newest()
    assert found is not None
    return found


def same(one: Checkpoint, other: Checkpoint) -> bool:
    pairs = ((one.weights, other.weights), (one.arrays, other.arrays))
    return all(list(a) == list(b) and all(a[name].tobytes() == b[name].tobytes() for name in a) for a, b in pairs)


def failing(*places: tuple[str, int, int], times: int = 10**6) -> Damage:
    """Replace replies of these kinds, rounds and clients by errors, ``times`` times each."""
    left = dict.fromkeys(places, times)

    def damage(kind: str, number: int, client: int, reply: Message) -> Message:
        if left.get((kind, number, client), 0) > 0:
            left[kind, number, client] -= 1
            return failed(reply)
        return reply

    return damage
