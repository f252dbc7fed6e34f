"""What every registered method must do when it runs; a new method is covered as soon as it is registered.

What crosses the wire is tested in ``test_contract_wire.py``.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, Message
from support.common import rounds_of
from support.doubles.faults import FaultyGrid
from support.systems.contract import (
    ALL_METHODS,
    DISTINCT_METHODS,
    SHAPE,
    EchoingGrid,
    Make,
    Watched,
    assert_a_run_in_pieces_equals,
    assert_same_weights,
    run_over,
)

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.storage.checkpoint import Checkpoints

every_method = pytest.mark.parametrize("method", ALL_METHODS)
every_distinct_method = pytest.mark.parametrize("method", DISTINCT_METHODS)
WatchedRun = Callable[[str], Watched]


@every_method
def test_a_run_leaves_sound_numbers(watched_run: WatchedRun, method: str) -> None:
    records = rounds_of(watched_run(method).folder)
    assert [record["round"] for record in records] == [1, 2, 3]
    assert all(0 <= value <= 1 for record in records for value in record["client_accuracy"])
    assert all(record["failures"] == [] for record in records)
    assert all(size is None or size <= 12 for record in records for size in record["buffer_size"])


@every_method
def test_a_second_run_gives_the_same_numbers_with_every_message_delivered_twice(
    small: Make, watched_run: WatchedRun, method: str
) -> None:
    """If a client learned anything twice, the numbers would differ."""
    twice = small(method=method, run_name="twice", **SHAPE)
    assert rounds_of(run_over(EchoingGrid(twice), twice)) == rounds_of(watched_run(method).folder)


@every_distinct_method
def test_a_client_that_drops_out_and_one_that_sends_nan_cost_the_others_nothing(small: Make, method: str) -> None:
    """Client 1 loses its replies of round 2 and comes back; client 2 sends no numbers in round 3."""
    config = small(method=method, **SHAPE)
    damaged: list[str] = []

    def meddle(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if (number, client) == (2, 1):
            return None
        if (number, client) == (3, 2) and reply.has_content():
            for record in reply.content.array_records.values():
                for name, array in record.items():
                    values = array.numpy()
                    if values.dtype.kind == "f" and values.size:
                        record[name] = Array(np.full_like(values, np.nan))
                        damaged.append(name)
        return reply

    records = rounds_of(run_over(FaultyGrid(config, meddle), config))
    failed = [{failure["client"] for failure in record["failures"]} for record in records]
    assert failed == [set(), {1}, {2} if damaged else set()]
    tested = [[accuracy is not None for accuracy in record["client_accuracy"]] for record in records]
    assert tested[:2] == [[True] * 3, [True, False, True]] and tested[2][:2] == [True, True]


@every_distinct_method
def test_a_run_that_is_cut_off_again_and_again_equals_an_undisturbed_one(
    small: Make, watched_run: WatchedRun, method: str
) -> None:
    pieces = small(method=method, run_name="pieces", resume=True, **SHAPE)
    assert_a_run_in_pieces_equals(watched_run(method).folder, pieces)


@every_distinct_method
def test_a_finished_run_that_goes_on_equals_one_that_was_planned_longer(
    small: Make, watched_run: WatchedRun, method: str
) -> None:
    """TFCL divides its network by the number of rounds, and Centralized interpolates here up to the last round."""

    def part(rounds: int, *, resume: bool) -> Path:
        config = small(method=method, run_name="longer", resume=resume, **{**SHAPE, "rounds": rounds})
        return run_over(FaultyGrid(config), config)

    part(2, resume=False)
    if method in ("tfcl", "centralized"):
        with pytest.raises(ConfigError, match=r"^rounds = 3: the run was begun with 2, and "):
            part(3, resume=True)
        return
    longer, whole = part(3, resume=True), watched_run(method).folder
    assert rounds_of(longer) == rounds_of(whole)
    assert_same_weights(Checkpoints(longer / "server"), Checkpoints(whole / "server"))
