"""Whole runs whose steps are recorded and kept over rounds and clients, with a stand-in that records."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.common import rounds_of
from support.doubles.recording import Recording

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import run_inline

pytestmark = pytest.mark.slow


METHODS = ["fedkace", "fedavg", "fedcbdr", "ofcl", "refed", "dcfcl", "fedframe", "derpp", "fedprox", "flwf"]


@pytest.mark.matrix
@pytest.mark.parametrize("method", METHODS)
def test_a_recorded_run_is_the_plain_run(
    method: str,
    small: Callable[..., Config],
    tmp_path: Path,
    recordings: list[Recording],
) -> None:
    """Three clients train three times; if nothing were kept, there would be nine times one or two recordings."""
    changes = {"method": method, "batch_size": 8, "capacity": 12}
    run_inline(small(run_name="plain", cuda_graphs="off", **changes))
    assert not recordings
    run_inline(small(run_name="recorded", cuda_graphs="on", **changes))
    assert rounds_of(tmp_path / "recorded") == rounds_of(tmp_path / "plain")
    assert 1 <= len(recordings) <= 3
    assert all(recording.played for recording in recordings)
