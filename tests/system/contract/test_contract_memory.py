"""What every registered method must do with the buffer that an earlier run of another method has left."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import Message, MessageType
from support.common import rounds_of
from support.doubles.faults import FaultyGrid
from support.made.stored import read_state
from support.systems.contract import DISTINCT_METHODS, SHAPE, Make, assert_a_run_in_pieces_equals, run_over
from support.systems.in_process import Federation

from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.registry import METHODS
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState


@pytest.fixture(scope="module")
def remembered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Make], Path]:
    """Clients' folders after two rounds of ER."""
    folder = tmp_path_factory.mktemp("before")

    def made(small: Make) -> Path:
        if not (folder / "states").exists():
            er = small(
                method="er", seed=1, results_dir=str(folder), state_dir=str(folder / "states"), **{**SHAPE, "rounds": 2}
            )
            run_inline(er)
        return folder / "states"

    return made


@pytest.mark.matrix
@pytest.mark.parametrize(
    "method", ["fedkace", "fedframe", *(each for each in DISTINCT_METHODS if "fedkace" not in each.values)]
)
def test_a_run_takes_up_the_memory_of_the_run_before(
    small: Make, tmp_path: Path, remembered: Callable[[Make], Path], method: str
) -> None:
    """One of the three clients does not train in the first round."""
    for name in ("whole", "pieces"):
        shutil.copytree(remembered(small), tmp_path / f"states-{name}")
    before = {client: newest(tmp_path / "states-whole", client) for client in range(3)}
    assert all(len(state.buffer) == SHAPE["capacity"] for state in before.values())
    begun: dict[int, ClientState] = {}

    def look(kind: str, number: int, client: int, reply: Message) -> Message:
        if number == 1 and kind == MessageType.EVALUATE:
            begun[client] = read_state(folder_of(tmp_path / "states-whole", client) / "state-000000.npz")
        return reply

    keys = {**SHAPE, "method": method, "memory": "keep", "fraction_train": 0.67, "resume": True}
    whole = small(**keys, run_name="whole", state_dir=str(tmp_path / "states-whole"))
    folder = run_over(FaultyGrid(whole, look), whole)
    records = rounds_of(folder)
    assert [record["failures"] for record in records] == [[], [], []]
    for client, state in begun.items():
        held = state.buffer if METHODS[method].replays else state.waiting
        assert sorted(held.content.tolist()) == sorted(before[client].buffer.content.tolist())
        assert bool((held.rounds == 0).all())
        if method != "centralized":  # which knows its own stream alone
            assert torch.equal(state.seen, before[client].seen)
            assert not bool((state.seen & ~newest(tmp_path / "states-whole", client).seen).any())
    if method not in ("tfcl", "centralized"):  # the others have a global model to answer with
        assert all(accuracy is not None for accuracy in records[0]["client_accuracy"])
    pieces = small(**keys, run_name="pieces", state_dir=str(tmp_path / "states-pieces"))
    assert_a_run_in_pieces_equals(folder, pieces)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("method", ["ofcl", "fedkace", "er", "derpp", "refed", "fedcbdr"])
def test_a_class_that_gets_its_label_within_a_run_comes_out_of_the_memory(small: Make, method: str) -> None:
    """Whatever a method has stored for the samples of its full buffer must still fit."""
    federation = Federation(small(**SHAPE, method=method))
    for number in (1, 2):
        federation.train(0, number)
        federation.evaluate(0, number)
    store = federation.store(0)
    state = store.before(3)
    assert len(state.buffer) == SHAPE["capacity"]
    label = int((~state.seen).nonzero()[0])
    waiting = Samples.arrived(torch.from_numpy(federation.experiment.dataset.train_ids(label)[:4].copy()), zeros(4), 0)
    name = federation.experiment.dataset.class_names[label]
    store.save(replace(state, waiting=waiting, waiting_names=[name, "not yet"]))
    federation.train(0, 3)
    before, after = (read_state(federation.state(0, number)) for number in (2, 3))
    assert len(before.buffer) == SHAPE["capacity"] and before.buffer.class_counts(10)[label] > 1
    assert list(before.waiting_names) == ["not yet"] and len(before.waiting) == 0
    assert bool(after.seen[label]) and len(after.buffer) == SHAPE["capacity"]


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


def folder_of(states: Path, client: int) -> Path:
    return states / f"client-{client:03d}"


def newest(states: Path, client: int) -> ClientState:
    return read_state(max(folder_of(states, client).glob("state-*.npz")))
