"""What every registered method must do with a gate: hold nothing if nothing is bad enough, or refuse it."""

from collections.abc import Callable

import pytest
from support.common import rounds_of
from support.doubles.faults import FaultyGrid
from support.systems.contract import DISTINCT_METHODS, SHAPE, Make, Watched, assert_same_weights, run_over

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.storage.checkpoint import Checkpoints

WITHOUT_GLOBAL_MODEL = {"centralized", "dcfcl", "lkc", "tfcl"}


@pytest.mark.parametrize("method", DISTINCT_METHODS)
def test_with_a_gate_that_holds_nothing_the_numbers_are_those_without_one(
    small: Make, watched_run: Callable[[str], Watched], method: str
) -> None:
    config = small(method=method, gate="hold", gate_tolerance=1.0, **SHAPE)
    if method in WITHOUT_GLOBAL_MODEL:
        with pytest.raises(ConfigError, match=rf"^gate = 'hold' with method = '{method}': .*; must be 'off'$"):
            run_over(FaultyGrid(config), config)
        return
    folder, without = run_over(FaultyGrid(config), config), watched_run(method).folder
    lines, others = rounds_of(folder), rounds_of(without)
    assert [("gate" in line, line.pop("gate", {}).get("held", False)) for line in lines] == [
        (False, False),
        (True, False),
        (True, False),
    ]
    for line in (*lines, *others):
        del line["bytes"]
    assert lines == others
    assert_same_weights(Checkpoints(folder / "server"), Checkpoints(without / "server"))
