"""What every registered method must do when it runs; a new method is covered as soon as it is registered.

What crosses the wire is tested in ``test_contract_wire.py``, the methods' own keys in ``test_contract_choices.py``.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, Message
from support.common import rounds_of
from support.systems.contract import (
    ALL_METHODS,
    DISTINCT_METHODS,
    SHAPE,
    EchoingWire,
    Make,
    Watched,
    Wire,
    assert_a_client_drops_out_and_comes_back,
    assert_a_run_in_pieces_equals,
    place,
    run_over,
)

from fedkace_flwr.experiments.running.inline import run_inline

every_method = pytest.mark.parametrize("method", ALL_METHODS)
every_distinct_method = pytest.mark.parametrize("method", DISTINCT_METHODS)
WatchedRun = Callable[[str], Watched]


@every_method
def test_a_second_run_gives_the_same_numbers(small: Make, watched_run: WatchedRun, method: str) -> None:
    config = small(method=method, run_name="again", **SHAPE)
    run_inline(config)
    first = rounds_of(watched_run(method).folder)
    assert first == rounds_of(Path(config.run.results_dir) / "again")
    assert [record["round"] for record in first] == [1, 2, 3]
    assert all(0 <= value <= 1 for record in first for value in record["client_accuracy"])
    assert all(record["failures"] == [] for record in first)
    assert all(size is None or size <= 12 for record in first for size in record["buffer_size"])


@every_distinct_method
def test_bf16_works(small: Make, method: str) -> None:
    config = small(method=method, precision="bf16", **{**SHAPE, "rounds": 2})
    run_inline(config)
    records = rounds_of(Path(config.run.results_dir) / config.run.run_name)
    assert len(records) == 2
    assert all(record["failures"] == [] and record["accuracy"] is not None for record in records)


@every_distinct_method
def test_a_client_that_drops_out_for_a_round_comes_back(small: Make, method: str) -> None:
    assert_a_client_drops_out_and_comes_back(small(method=method, deadline=0.05, **SHAPE))


@every_distinct_method
def test_a_reply_with_nan_is_discarded_and_the_others_continue(small: Make, method: str) -> None:
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


@every_distinct_method
def test_a_repeated_message_changes_nothing(small: Make, watched_run: WatchedRun, method: str) -> None:
    """Each message is delivered twice; if a client learned anything twice, the numbers would differ."""
    twice = small(method=method, run_name="twice", **SHAPE)
    assert rounds_of(run_over(EchoingWire(twice), twice)) == rounds_of(watched_run(method).folder)


@every_distinct_method
def test_a_run_that_is_cut_off_again_and_again_equals_an_undisturbed_one(
    small: Make, watched_run: WatchedRun, method: str
) -> None:
    pieces = small(method=method, run_name="pieces", resume=True, **SHAPE)
    assert_a_run_in_pieces_equals(watched_run(method).folder, pieces)
