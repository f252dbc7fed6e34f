"""The record of a run that has no end: bounded in memory and on disk, and with more clients as time goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.results.keep import keep
from fedkace_flwr.experiments.results.loading import load_results
from fedkace_flwr.results import run_folder
from fedkace_flwr.results.run_folder import RunFolder
from fedkace_flwr.rounds.server_round import RoundReport
from fedkace_flwr.storage.checkpoint import Checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def config(small: Callable[..., Config]) -> Config:
    return small(dataset="inbox", class_names="a,b", image_size=8, rounds=0, clients=2)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_IN_FILE", 5)
    monkeypatch.setattr(run_folder, "_IN_MEMORY", 3)


def record(number: int, clients: int = 2) -> dict[str, Any]:
    report = RoundReport(number, tuple(range(clients)))
    report.evaluated = {
        k: {"accuracy": 0.5, "class-accuracy": [0.5, -1.0], "seen-classes": 1, "started": 0.0, "finished": 1.0}
        for k in range(clients)
    }
    return report.record(clients)


def live(folder: RunFolder, first: int, last: int, clients: int = 2) -> None:
    for number in range(first, last + 1):
        folder.add_round(record(number, clients))
        folder.save(Checkpoint(number, "r", {}))


def lines(path: Path) -> list[int]:
    return [json.loads(line)["round"] for line in path.read_text().splitlines()]


def test_what_it_keeps_is_bounded_and_goes_on_after_any_round(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run"
    folder = RunFolder(path)
    folder.begin(config, CPU, "r")
    live(folder, 1, 4)
    folder.close()
    for last in range(5, 17):
        folder = RunFolder(path, resume=True)
        found = folder.go_on(config, CPU)
        assert found is not None and found.round == last - 1
        live(folder, last, last)
        folder.close()
        shown = lines(path / "rounds.jsonl")
        assert shown == list(range(shown[0], last + 1)) and len(shown) <= 5
    assert lines(path / "rounds-earlier.jsonl") == [11, 12, 13, 14, 15] and shown == [16]
    summary = folder.finish(config)
    assert summary["rounds"] == 16


def test_a_line_that_is_missing_is_found(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run"
    folder = RunFolder(path)
    folder.begin(config, CPU, "r")
    live(folder, 1, 8)
    folder.close()
    kept = (path / "rounds.jsonl").read_text().splitlines(keepends=True)
    (path / "rounds.jsonl").write_text("".join(kept[:-1]))
    with pytest.raises(RunError, match="is not the record of round 8"):
        RunFolder(path, resume=True).go_on(config, CPU)


def test_a_large_file_of_rounds_is_followed_by_another(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_FILE_BYTES", 1)
    folder = RunFolder(tmp_path / "run")
    folder.begin(config, CPU, "r")
    live(folder, 1, 3)
    folder.close()
    assert lines(tmp_path / "run" / "rounds.jsonl") == [3]
    again = RunFolder(tmp_path / "run", resume=True)
    again.go_on(config, CPU)
    live(again, 4, 4)
    assert lines(tmp_path / "run" / "rounds-earlier.jsonl") == [3]


def test_a_run_whose_clients_become_more_is_summarised(config: Config, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(config, CPU, "r")
    live(folder, 1, 2)
    live(folder, 3, 3, clients=4)
    summary = folder.finish(config)
    assert summary["average_accuracy"] == 0.5 and len(summary["switched_at"]) == 4


def test_what_is_left_of_it_is_reported_and_kept_with_the_clients_that_joined(config: Config, tmp_path: Path) -> None:
    path, kept = tmp_path / "run", tmp_path / "kept"
    folder = RunFolder(path)
    folder.begin(config, CPU, "r")
    live(folder, 1, 8)
    live(folder, 9, 12, clients=3)
    folder.finish(config, stopped=True)
    folder.close()
    keep(path, kept)
    for source in (path, kept):
        results = load_results(source)
        (row,) = results.runs.to_dict("records")
        assert row["finished"] and row["rounds_done"] == 7 and results.rounds["round"].tolist() == [*range(6, 13)]
        columns = [each["client_accuracy"] for each in results.records(row["folder"])]
        assert columns == [[0.5, 0.5, None]] * 3 + [[0.5, 0.5, 0.5]] * 4


def test_a_run_that_is_stopped_before_its_first_round_ends(config: Config, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(config, CPU, "r")
    summary = folder.finish(config, stopped=True)
    folder.close()
    assert summary["rounds"] == 0 and summary["stopped"] and not (tmp_path / "run" / "accuracy.png").exists()
