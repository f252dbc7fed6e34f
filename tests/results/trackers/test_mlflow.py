"""Runs in MLflow's database, read back by MLflow's own client."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from support.common import SMALL
from support.systems.cut_off import cut_after_round

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.results.run_folder import RunFolder
from fedkace_flwr.results.trackers.catalogue import check_server

Make = Callable[..., Config]


@pytest.fixture
def client(tmp_path: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")


def only_run(client: MlflowClient, experiment: str) -> Any:
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    return run


def steps(client: MlflowClient, run: Any, name: str) -> dict[int, float]:
    """Value by step; a step that came twice would show as one too many."""
    found = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
    assert len(dict(found)) == len(found), name
    return dict(found)


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_says_in_mlflow_what_its_record_says(small: Make, tmp_path: Path, client: MlflowClient) -> None:
    run_inline(small(tracker="mlflow"))
    folder = tmp_path / "run"
    run, records = only_run(client, tmp_path.name), records_of(folder)
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    config = Config.parse(json.loads((folder / "config.json").read_text()))
    assert run.data.params == {key: str(value) for key, value in config.effective().items()}
    assert run.data.tags["folder"] == str(folder)
    assert steps(client, run, "accuracy/mean") == {r["round"]: pytest.approx(r["accuracy"]) for r in records}
    assert steps(client, run, "gap/0") == {r["round"]: r["gap"][0] for r in records if r["gap"][0] is not None}
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("average_accuracy", "forgetting", "backward_transfer"):
        assert run.data.metrics[f"summary/{name}"] == pytest.approx(summary[name])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_runs_that_begin_at_once_share_one_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"{key}={value}" for key, value in {**SMALL, "rounds": 1, "tracker": "mlflow", "seed": "0,1"}.items()]
    study = [
        "run",
        "quickstart",
        "--engine",
        "inline",
        "--workers",
        "2",
        "--only",
        "fedkace",
        "--results",
        str(tmp_path),
    ]
    assert main([*study, "--set", *keys]) == 0
    assert "retrying" not in capsys.readouterr().out
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'quickstart' / 'mlflow.db'}")
    assert (found := client.get_experiment_by_name("quickstart")) is not None
    assert len(client.search_runs([found.experiment_id])) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["what? größe", "50%25 #1"])
def test_the_store_is_made_in_the_study_s_folder_whatever_its_name(name: str, small: Make, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    check_server(small(tracker="mlflow", results_dir=str(tmp_path / name)))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "mlflow.db").stat().st_size


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_one_and_shows_each_round_once(
    small: Make, tmp_path: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_after_round(small(tracker="mlflow"), 2, monkeypatch)
    first = only_run(client, tmp_path.name)
    assert first.info.status == "KILLED"
    assert set(steps(client, first, "accuracy/mean")) == {1, 2}
    run_inline(small(tracker="mlflow", resume=True))
    run = only_run(client, tmp_path.name)
    assert run.info.run_id == first.info.run_id and run.info.status == "FINISHED"
    assert set(steps(client, run, "accuracy/mean")) == {1, 2, 3}


@pytest.mark.slow
def test_mlflow_s_own_variables_name_store_and_experiment(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'other.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits of many")
    run_inline(small(tracker="mlflow", rounds=1, clients=1, epochs=1))
    other = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'other.db'}")
    assert only_run(other, "digits of many").info.status == "FINISHED"
    assert not (tmp_path / "mlflow.db").exists()


def test_a_store_that_cannot_be_used_is_named_before_any_round(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.db").write_text("no database")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'text.db'}")
    with pytest.raises(RunError) as caught:
        run_inline(small(tracker="mlflow"))
    message = str(caught.value)
    assert message.startswith("tracker = 'mlflow': MLflow at sqlite:///") and "\n" not in message
    assert message.endswith("MLFLOW_TRACKING_URI names another")
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


@pytest.mark.slow
def test_a_tracker_that_fails_costs_the_run_nothing(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    added, add = [], RunFolder.add_round

    def lose(self: RunFolder, record: Any) -> None:
        add(self, record)
        added.append(record["round"])
        if record["round"] == 1:  # the database is gone from now on, and its place is taken
            (tmp_path / "mlflow.db").unlink()
            (tmp_path / "mlflow.db").write_text("no database")

    monkeypatch.setattr(RunFolder, "add_round", lose)
    with caplog.at_level(logging.WARNING):
        run_inline(small(tracker="mlflow"))
    assert added == [1, 2, 3] and len(records_of(tmp_path / "run")) == 3
    assert (tmp_path / "run" / "summary.json").exists()
    (said,) = [text for text in caplog.messages if "tracker" in text]
    assert said.startswith("tracker = 'mlflow' fails (") and said.endswith("rounds.jsonl has every round")


@pytest.mark.slow
def test_a_damaged_name_of_the_run_is_answered_with_the_file(small: Make, tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").close()
    (tmp_path / "run" / "tracker.json").write_text("{")
    with pytest.raises(RunError, match=r"tracker.json: cannot be read .*; remove it"):
        run_inline(small(tracker="mlflow"))
