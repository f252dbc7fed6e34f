"""What Ray needs before a run is started."""

import json
import socket
from pathlib import Path

import pytest
from rich.console import Console
from support.common import SMALL

from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.running.engines import check_ray
from fedkace_flwr.experiments.running.runner import run_study
from fedkace_flwr.experiments.studies.study import Study, load_study


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "trial.yaml"
    path.write_text(json.dumps({"config": SMALL}))
    return load_study(path, {}, tmp_path / "results", workers=1)


def nothing_listens() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "[::1]:{}", "127.0.0.1:1{}"])
def test_a_cluster_that_is_gone_is_named_with_its_variable(
    form: str, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = form.format(nothing_listens())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunError, match=r"^RAY_ADDRESS = '.*': no Ray cluster answers .* unset RAY_ADDRESS") as caught:
        run_study(study, Console(quiet=True))
    assert address in str(caught.value) and not any(study.folder.glob("*/app.log"))


def test_what_ray_cannot_use_is_told_with_a_way_around_it(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", f"/tmp/{'long' * 20}")
    with pytest.raises(
        RunError, match=r"^TMPDIR = /tmp/long.*: is too long .* RAY_TMPDIR=/tmp, or run with --engine inline"
    ):
        run_study(study, Console(quiet=True))
    monkeypatch.undo()
    check_ray()
