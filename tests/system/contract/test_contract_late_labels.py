"""Labels that come a round late, and to half of the images, with every method."""

from pathlib import Path

import pytest
from support.common import rounds_of
from support.doubles.faults import FaultyGrid
from support.systems.contract import ALL_METHODS, SHAPE, Make, assert_a_run_in_pieces_equals, run_over

from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.registry import METHODS

LATE = {
    **SHAPE,
    "label_delay": 1,
    "label_share": 0.5,
    "window": 5,
    "overlap": 5,
    "samples_per_class": 4,
    "capacity": 12,
}


@pytest.mark.parametrize("method", ALL_METHODS)
def test_labels_that_come_late_or_never(small: Make, method: str, tmp_path: Path) -> None:
    """Resumed in pieces, so that predictions that wait are taken from the clients' files."""
    if METHODS[method].needs_stream:
        with pytest.raises(ConfigError, match="label-delay = 1"):
            configured(small(method=method, **LATE))
        return
    config = small(method=method, run_name="whole", **LATE)
    folder = run_over(FaultyGrid(config), config)
    records = rounds_of(folder)
    assert records[0]["sat_out"] == [0, 1, 2] and records[0]["accuracy"] is None
    for record in records[1:]:
        assert record["failures"] == [] and all(0 <= value <= 1 for value in record["client_accuracy"])
    assert any(records[2]["prequential_samples"])
    assert_a_run_in_pieces_equals(folder, small(method=method, run_name="pieces", resume=True, **LATE))
