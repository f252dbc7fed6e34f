"""What every registered method owes: one test file over all of them, so that a new one is covered at once."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import rounds_of
from flwr.app import Array, Message, MessageType

from experiments.inline import InlineGrid, run_inline
from fedkace_flwr import client_app, server_app
from fedkace_flwr import messages as keys
from fedkace_flwr.checkpoint import Checkpoints
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.methods import METHODS

Make = Callable[..., Config]
SHAPE = {"rounds": 3, "epochs": 2, "capacity": 12, "centralized_every": 2, "tfcl_server_epochs": 2}

# Presets of another method run the same code; `make quick` leaves them out.
every_method = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] if METHODS[name].preset else []) for name in sorted(METHODS)]
)

# Values with which a rival's round takes another path than by default.
every_reading = pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("fedcbdr", "fedcbdr_temperatures", "published-code"),
        ("fedcbdr", "fedcbdr_scores", "published-code"),
        ("fedcbdr", "fedcbdr_replacement", True),
        ("ofcl", "ofcl_merge", "half"),
        ("ofcl", "ofcl_aggregation", "class-mean"),
        ("refed", "refed_start", "local"),
        ("refed", "refed_start", "persistent"),
        ("refed", "refed_anchor", "previous"),
    ],
)


class Wire(InlineGrid):
    """An inline grid that keeps all content that crosses it, and lets a test meddle with each exchange."""

    def __init__(self, config: Config, meddle: Callable[[Message, Message], Message | None] | None = None) -> None:
        super().__init__(client_app.app, config.stream.clients, config.flat(), run_id=1)
        self._meddle = meddle
        self.arrays: list[np.ndarray] = []
        self.kinds: set[str] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            self.kinds.add(message.metadata.message_type)
            self._note(message)
            (number,) = super().push_messages([message])
            numbers.append(number)
            reply = self._replies[number]
            if reply.has_content():
                self._note(reply)
            if self._meddle is not None:
                changed = self._meddle(message, reply)
                if changed is None:
                    del self._replies[number]
                else:
                    self._replies[number] = changed
        return numbers

    def _note(self, message: Message) -> None:
        for record in message.content.array_records.values():
            self.arrays += [array.numpy() for array in record.values()]


def place(message: Message) -> tuple[int, int]:
    told = message.content.config_records[keys.CONFIG]
    return int(told.get(keys.ROUND, 0)), int(told[keys.CLIENT])


def run_over(grid: Wire, config: Config) -> Path:
    server_app.run(grid, config, run_id=1)
    return Path(config.run.results_dir) / config.run.run_name


def rounds_of_run(config: Config) -> list[dict[str, Any]]:
    run_inline(config)
    return rounds_of(Path(config.run.results_dir) / config.run.run_name)


@every_method
def test_three_rounds_twice_give_the_same_numbers(small: Make, method: str) -> None:
    for name in ("first", "again"):
        run_inline(small(method=method, run_name=name, **SHAPE))
    root = Path(small().run.results_dir)
    first = rounds_of(root / "first")
    assert first == rounds_of(root / "again")
    assert [record["round"] for record in first] == [1, 2, 3]
    assert all(0 <= value <= 1 for record in first for value in record["client_accuracy"])
    assert all(record["failures"] == [] for record in first)
    assert all(size is None or size <= 12 for record in first for size in record["buffer_size"])


@every_reading
def test_every_reading_repeats_and_differs_from_the_default(small: Make, method: str, key: str, value: object) -> None:
    root = Path(small().run.results_dir)
    for name, changes in (("usual", {}), ("first", {key: value}), ("again", {key: value})):
        run_inline(small(method=method, run_name=name, **SHAPE, **changes))
    first = rounds_of(root / "first")
    assert first == rounds_of(root / "again") != rounds_of(root / "usual")
    assert all(record["failures"] == [] and record["accuracy"] is not None for record in first)
    assert all(size <= 12 for record in first for size in record["buffer_size"])


@every_method
def test_every_method_computes_in_bf16(small: Make, method: str) -> None:
    records = rounds_of_run(small(method=method, precision="bf16", **SHAPE))
    assert all(record["failures"] == [] and record["accuracy"] is not None for record in records)


@every_method
def test_a_client_that_drops_out_for_a_round_comes_back(small: Make, method: str) -> None:
    config = small(method=method, deadline=0.05, **SHAPE)

    def lose(message: Message, reply: Message) -> Message | None:
        return None if place(message) == (2, 1) else reply

    records = rounds_of(run_over(Wire(config, lose), config))
    assert records[1]["failures"] and {failure["client"] for failure in records[1]["failures"]} == {1}
    assert records[0]["failures"] == records[2]["failures"] == []
    assert records[1]["client_accuracy"][1] is None and records[2]["client_accuracy"][1] is not None


@every_method
def test_a_reply_with_nan_is_left_out_and_the_others_go_on(small: Make, method: str) -> None:
    config = small(method=method, **SHAPE)
    damaged: list[str] = []

    def spoil(message: Message, reply: Message) -> Message:
        if place(message) == (2, 1) and reply.has_content():
            for record in reply.content.array_records.values():
                for name, array in record.items():
                    values = array.numpy()
                    if values.dtype.kind == "f" and values.size:
                        record[name] = Array(np.full_like(values, np.nan))
                        damaged.append(name)
        return reply

    records = rounds_of(run_over(Wire(config, spoil), config))
    named = {failure["client"] for record in records for failure in record["failures"]}
    assert named == ({1} if damaged else set())
    assert all(record["client_accuracy"][client] is not None for record in records for client in (0, 2))


@every_method
def test_a_repeated_message_is_answered_alike(small: Make, method: str) -> None:
    """Each message is delivered a second time; were anything learnt twice, the run would come out different."""
    once, twice = small(method=method, run_name="once", **SHAPE), small(method=method, run_name="twice", **SHAPE)

    class Echo(Wire):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            numbers = list(super().push_messages(messages))
            for message in messages:
                self._answer(message)
            return numbers

    run_over(Wire(once), once)
    run_over(Echo(twice), twice)
    root = Path(once.run.results_dir)
    assert rounds_of(root / "once") == rounds_of(root / "twice")


@every_method
def test_a_run_cut_off_again_and_again_ends_as_one_that_was_not(small: Make, method: str) -> None:
    assert_pieces_make_the_whole(small, method=method)


@pytest.mark.slow
@every_reading
def test_a_run_by_every_reading_can_be_cut_off_too(small: Make, method: str, key: str, value: object) -> None:
    assert_pieces_make_the_whole(small, method=method, **{key: value})


def assert_pieces_make_the_whole(small: Make, **changes: Any) -> None:
    """The server dies in one phase of a round or another; each time another one takes up the run."""
    whole = small(run_name="whole", **SHAPE, **changes)
    run_inline(whole)
    pieces = small(run_name="pieces", resume=True, **SHAPE, **changes)
    folder, cuts = Path(pieces.run.results_dir) / "pieces", 0
    while not (folder / "summary.json").exists():
        left = 4 + 3 * cuts

        def cut(message: Message, reply: Message) -> Message:
            nonlocal left
            left -= 1
            if left < 0 and place(message)[0] > 0:
                raise SystemExit("cut off")
            return reply

        with contextlib.suppress(SystemExit):
            run_over(Wire(pieces, cut), pieces)
        cuts += 1
    assert cuts > 2
    assert rounds_of(folder) == rounds_of(folder.with_name("whole"))
    assert_same_weights(Checkpoints(folder / "server"), Checkpoints(folder.with_name("whole") / "server"))


def assert_same_weights(one: Checkpoints, other: Checkpoints) -> None:
    first, second = one.newest(), other.newest()
    assert first is not None and second is not None and first.round == second.round == SHAPE["rounds"]
    for mine, theirs in ((first.weights, second.weights), (first.arrays, second.arrays)):
        assert list(mine) == list(theirs)
        assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)


@every_method
def test_no_pixel_crosses_the_wire(small: Make, method: str) -> None:
    config = small(method=method, **SHAPE)
    grid = Wire(config)
    run_over(grid, config)
    experiment = Experiment(config)
    rows = {bytes(image.tobytes()) for image in np.asarray(experiment.dataset.images)}
    shape = experiment.dataset.images.shape[1:]
    for array in grid.arrays:
        assert array.dtype != np.uint8 or array.size < int(np.prod(shape)), array.shape
        if array.ndim == 4 and array.shape[1:] == shape:
            scaled = np.clip(np.rint(array * 255 if array.max() <= 1 else array), 0, 255).astype(np.uint8)
            assert not any(bytes(row.tobytes()) in rows for row in scaled)


@every_method
def test_the_methods_own_messages_are_the_registered_ones(small: Make, method: str) -> None:
    config = small(method=method, **SHAPE)
    grid = Wire(config)
    run_over(grid, config)
    own = grid.kinds - {MessageType.TRAIN, MessageType.EVALUATE, MessageType.QUERY}
    assert own == set(METHODS[method].actions)


@every_method
def test_only_declared_state_is_on_disk(small: Make, method: str) -> None:
    config = small(method=method, **SHAPE)
    folder = run_over(Wire(config), config)
    files = {path.name for path in folder.glob("clients/client-*/*")}
    assert files and all(name.startswith(("state-", "answer-")) and name.endswith(".npz") for name in files)
    top = {path.name for path in folder.iterdir()}
    assert top == {
        *("config.json", "environment.json", "rounds.jsonl", "summary.json", "accuracy.png"),
        *("clients", "server", ".lock"),
    }
