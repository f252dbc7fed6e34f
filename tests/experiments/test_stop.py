"""The command that ends a run after its present round, and takes that back."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from support.common import SMALL
from support.made.results import write_run
from support.systems.engines import InProcessEngine

from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.runner import run_study
from fedkace_flwr.experiments.studies.study import load_study
from fedkace_flwr.results.orders import Orders


def told(folder: Path, stopped: bool) -> Path:
    """A run of two rounds that has ended, perhaps because it was ordered to."""
    run = write_run(folder, "run", [0.5, 0.6], rounds=2 + stopped)
    path = run / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ({"stopped": True} if stopped else {})))
    (run / "environment.json").write_text(json.dumps({"fedkace_flwr": "1.0.0"}))
    return run


def test_a_finished_run_is_not_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = told(tmp_path, stopped=False)
    assert main(["stop", str(run)]) == 2
    assert "run: is finished; its rounds can only be gone on with" in capsys.readouterr().err
    assert not (run / "orders").exists()
    Orders(run).stop()  # as earlier versions let it be
    assert main(["stop", str(run), "--undo"]) == 0 and not Orders(run).stopped


def test_a_stopped_run_is_not_said_to_have_a_present_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = told(tmp_path, stopped=True)
    assert main(["stop", str(run)]) == 0 and Orders(run).stopped
    assert "has ended, and stays so until stop --undo" in capsys.readouterr().out
    (run / "summary.json").unlink()
    assert main(["stop", str(run)]) == 0
    assert "ends after its present round" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_an_order_keeps_from_going_on_says_how_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    (tmp_path / "trial.yaml").write_text(json.dumps({"config": SMALL}))
    failures = {}
    for rounds in (2, 3):
        asked = load_study(
            tmp_path / "trial.yaml", {"rounds": rounds}, tmp_path / "results", engine="inline", workers=1
        )
        failures = run_study(asked, Console(file=io.StringIO())).failures
        (folder,) = (asked.folder / name for name in asked.runs)
        Orders(folder).stop()
    assert list(failures.values()) == [
        f"{folder.name}: ended, as it was ordered; fedkace stop {folder} --undo lets it go on"
    ]


def test_one_shows_a_status_again_and_again_or_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "run", "--watch", "--json"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err
