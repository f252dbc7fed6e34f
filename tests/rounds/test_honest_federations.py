"""An honest federation loses nothing to the defence, whatever its method and its stream."""

from pathlib import Path
from typing import Any

import pytest
from support.common import SMALL, rounds_of

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import run_inline

FEW_CLASSES = {"stream": "dirichlet:0.05:0.2"}
STREAMS: dict[str, dict[str, Any]] = {
    "few classes, often one": FEW_CLASSES,
    "few classes, and clients that join late": {**FEW_CLASSES, "fraction-train": 0.6},
    "one class each": {"window": 1, "overlap": 0},
    "new classes in every round": {"overlap": 0},
    "always the same classes": {"overlap": 2},
    "blurred": {"stream": "blurred"},
    "unequal numbers of samples": {"stream": "quantity-skew:0.3"},
}
METHODS = (
    *("fedkace", "fedframe", "fedavg", "fedcbdr", "ofcl", "refed", "tfcl", "dcfcl"),
    *("er", "er-balanced", "er-ace", "derpp", "fedprox", "flwf", "fed-talora"),
)


CASES = [
    pytest.param(method, stream, marks=[] if column == row % len(STREAMS) else [pytest.mark.exhaustive])
    for row, method in enumerate(METHODS)
    for column, stream in enumerate(STREAMS)
]
"""Each method with one stream and each stream with one or two methods; `make test-all` runs all pairs."""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "stream"), CASES)
def test_no_honest_update_is_rejected_or_clipped(method: str, stream: str, tmp_path: Path) -> None:
    shape = {"defence": "on", "clients": 5, "rounds": 4, "seed": 0, "report-classes": False, "diagnostics": False}
    run_inline(
        Config.parse(
            {**SMALL, **shape, **STREAMS[stream], "method": method, "results-dir": str(tmp_path), "run-name": "run"}
        )
    )
    for record in rounds_of(tmp_path / "run"):
        assert record["failures"] == []
        assert "clipped_layers" not in record
