"""Helpers of the contract tests: grids that record and change messages, and the runs over them."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict

from fedkace_flwr import server_app
from fedkace_flwr.clients import fedcbdr as fedcbdr_names
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.messaging import wire
from fedkace_flwr.registry import METHODS
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.checkpoint import Checkpoints
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore
from support.common import rounds_of
from support.doubles.faults import Crossing, FaultyGrid

Make = Callable[..., Config]
SHAPE = {"rounds": 3, "epochs": 2, "capacity": 12, "centralized_rounds": "every:2", "tfcl_server_epochs": 2}


def _parameters(names: Iterable[str]) -> list[Any]:
    """Parametrise by method; one worker runs all tests of a method.

    `make quick` runs those of ``fedkace``, and `make test` those of all methods that are not another one's presets.
    """
    return [pytest.param(name, marks=[pytest.mark.xdist_group(name), *_marks(name)]) for name in names]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    slow = [] if name == "fedkace" else [pytest.mark.slow]
    return [*slow, pytest.mark.exhaustive] if is_preset(name) else slow


def is_preset(name: str) -> bool:
    """Return whether a method is another method with some keys fixed, and runs that method's code.

    ``lkc`` is a preset too, but without aggregation each client has a model of its own; and the server of ``fed-talora``
    is its own.
    """
    return bool(METHODS[name].preset) and name not in ("lkc", "fed-talora")


ALL_METHODS = _parameters(sorted(METHODS))
"""For tests that are cheap or depend on a preset."""

DISTINCT_METHODS = _parameters(sorted(name for name in METHODS if not is_preset(name)))
"""For tests that depend only on a method's code and messages."""


class TappedGrid(FaultyGrid):
    """Notes the labels that a client holds."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._experiment = Experiment(config)
        self._states = Path(config.run.results_dir) / config.run.run_name / "clients"

    def labels(self, kind: str, number: int, client: int) -> dict[str, np.ndarray]:
        nothing = torch.zeros(self._experiment.num_classes, dtype=torch.bool)
        empty = ClientState(seen=nothing, buffer=Samples.none(), run=f"{1:020d}")
        store = ClientStore(self._states / f"client-{client:03d}", empty)
        before, after = (store.before(number + later).buffer for later in (0, 1))
        chunk = self._experiment.chunk(client, number)
        held = {"chunk": chunk, "old buffer": before, "new buffer": after, "pool": before.followed_by(chunk)}
        return {name: samples.labels.numpy() for name, samples in held.items()}


class EchoingGrid(FaultyGrid):
    """Delivers each message twice and loses the second reply."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        numbers = list(super().push_messages(messages))
        for message in messages:
            self._answer(message)
        return numbers


def run_over(grid: FaultyGrid, config: Config) -> Path:
    """Run a configuration over a grid, and return the run's folder."""
    server_app.run(grid, config, run_id=1)
    return Path(config.run.results_dir) / config.run.run_name


@dataclass(frozen=True)
class Watched:
    """A finished run: its configuration, its folder, and everything that crossed the wire."""

    config: Config
    folder: Path
    crossings: list[Crossing]


def watch(config: Config) -> Watched:
    """Run a configuration and record everything that crosses the wire."""
    _, config = configured(config)
    grid = TappedGrid(config)
    return Watched(config, run_over(grid, config), grid.crossings)


# Assertions shared by several tests


def assert_a_run_in_pieces_equals(whole: Path, pieces: Config) -> None:
    """The server repeatedly dies in the middle of a round, and each time a new one resumes the run."""
    folder, cuts = Path(pieces.run.results_dir) / pieces.run.run_name, 0
    while not (folder / "summary.json").exists():
        left = 1 + 2 * cuts

        def cut(kind: str, number: int, client: int, reply: Message) -> Message:
            nonlocal left
            left -= 1
            if left < 0:
                raise SystemExit("cut off")
            return reply

        with contextlib.suppress(SystemExit):
            run_over(FaultyGrid(pieces, cut), pieces)
        cuts += 1
    assert cuts > 2
    assert rounds_of(folder) == rounds_of(whole)
    assert_same_weights(Checkpoints(folder / "server"), Checkpoints(whole / "server"))


def assert_same_weights(one: Checkpoints, other: Checkpoints) -> None:
    """The newest checkpoints of two finished runs are identical, byte by byte."""
    first, second = one.newest(), other.newest()
    assert first is not None and second is not None and first.round == second.round == SHAPE["rounds"]
    for mine, theirs in ((first.weights, second.weights), (first.arrays, second.arrays)):
        assert list(mine) == list(theirs)
        assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)


def assert_bytes_are_as_declared(run: Watched) -> None:
    """The bytes in each round's record equal the registry's formulas, evaluated and summed over the clients."""
    traffic = METHODS[run.config.method].traffic
    config, experiment, records = run.config, Experiment(run.config), rounds_of(run.folder)
    longest = max(experiment.num_classes, config.training.epochs)
    image = torch.zeros(1, *experiment.dataset.images.shape[1:])
    with torch.inference_mode():
        maps = experiment.network(experiment.initial_weights()).eval().lower_half()(image)
    digest = len("frozen") + 64 if experiment.frozen_weights else 0
    initial = {name: 128 + len(name) + value.nbytes for name, value in experiment.initial_weights().items()}
    constant = {
        "c": len("run") + 20 + len("round") + 8 + len("client") + 8 + digest,
        "S": sum(initial[name] for name in experiment.travelling.sent),
        "P": sum(initial[name] for name in experiment.travelling.replied),
        "V": sum(initial[name] + len("control.") for name in experiment.travelling.parameters),
        "C": experiment.num_classes,
        "F": 8 * config.model.width,
        "A": maps.numel(),
        "M": config.buffer.capacity,
    }
    held = [0] * config.stream.clients
    for record in records:
        assert record["failures"] == []
        expected = {"down": 0, "up": 0}
        for client in range(config.stream.clients):
            own = [c for c in run.crossings if (c.round, c.client) == (record["round"], client)]
            numbers = [told for crossing in own for told in crossing.numbers()]
            assert all(len(value) <= longest for _, value in numbers if isinstance(value, list)), "arrays go as arrays"
            n = len(experiment.chunk(client, record["round"]))
            symbols = constant | {
                "n": n,
                "m": held[client] + n,
                "k": record["buffer_size"][client],
                "r": max((_rank_of(crossing.down) for crossing in own), default=0),
                "R": sum(len(name) + 8 * np.size(value) for name, value in numbers),
            }
            expected["down"] += eval(traffic.down, {"__builtins__": {}}, symbols)
            expected["up"] += eval(traffic.up, {"__builtins__": {}}, symbols)
        assert record["bytes"] == expected
        held = [size or 0 for size in record["buffer_size"]]


def _rank_of(content: RecordDict) -> int:
    record = content.array_records.get(wire.ARRAYS)
    return record[fedcbdr_names.ROWS].shape[1] if record and fedcbdr_names.ROWS in record else 0
