"""A runner that continues an earlier one's work, or waits for another's, says so."""

import io
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.common import SMALL, rounds_of
from support.systems.cut_off import cut_after_round
from support.systems.engines import InProcessEngine

from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.report.comparison import draw_comparisons
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.cells import Cell
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.runner import describe, run_study
from fedkace_flwr.experiments.studies.study import Study, load_study
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.storage.targets import claim

NAME = "fedkace_seed-7"

Make = Callable[..., Study]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A study on the inline engine, which starts no processes."""
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)

    def make(keys: dict[str, Any] | None = None, **grid: Any) -> Study:
        path = tmp_path / "trial.yaml"
        path.write_text(json.dumps({"config": {**SMALL, **(keys or {})}, "grid": grid}), encoding="utf-8")
        return load_study(path, {}, tmp_path / "results", engine="inline", workers=1)

    return make


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("fedkace_")]


def test_a_continued_run_says_after_which_round_and_does_not_list_the_earlier_ones(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make()
    folder = cut_after_round(study.runs[NAME], 2, monkeypatch)
    assert list(run_study(study, Console(width=200)).summaries) == [NAME]
    first, *rounds, last = lines_of(capsys)
    assert first == f"{NAME}: continuing after round 2 of 3"
    assert [line.split(",")[0] for line in rounds] == [f"{NAME}: round 3 of 3"]
    assert last == f"{NAME}: done (1 of 1)"
    average = json.loads((folder / "summary.json").read_text())["average_accuracy"]
    assert rounds[0].endswith(f"so far {100 * average:.2f} %")  # over all rounds, those of the earlier runner too


def extended(make: Make, **keys: Any) -> tuple[Path, list[str]]:
    """The folder of a run that was finished with two rounds and then got a third, and what the runner said of it."""
    names = []
    for rounds in (2, 3):
        study = make({**keys, "rounds": rounds})
        said = io.StringIO()
        assert not run_study(study, Console(file=said, width=200)).failures
        names = list(study.runs)
    return study.folder / names[0], said.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"fraction-train": 0.4, "predict-with": "prequential"},
        {"batchnorm-statistics": "local", "method": "fedavg"},
        {"method": "centralized"},
    ],
    ids=["plain", "judged-by-chunks", "own-statistics", "no-models"],
)
def test_a_finished_run_goes_on_if_only_its_rounds_grow(make: Make, keys: dict[str, Any], tmp_path: Path) -> None:
    folder, said = extended(make, **keys)
    assert any(line.endswith(": continuing after round 2 of 3") for line in said)
    records = rounds_of(folder)
    shutil.rmtree(folder)
    run_study(make(keys), Console(quiet=True))
    assert rounds_of(folder) == records


def test_runners_that_begin_together_all_describe_their_runs(tmp_path: Path) -> None:
    path = tmp_path / "trial.yaml"
    path.write_text("config: {dataset: digits}\n")
    studies = [load_study(path, {}, tmp_path, seeds=[seed]) for seed in range(24)]
    studies[0].folder.mkdir()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(describe, studies))
    assert len(json.loads((studies[0].folder / "study.json").read_text())["runs"]) == 24


@pytest.mark.slow
def test_a_stopped_run_is_finished_until_that_is_taken_back(make: Make) -> None:
    study = make({"rounds": 2})
    run_study(study, Console(quiet=True))
    cell, orders = Cell(NAME, study.runs[NAME], study.data.get(NAME, "")), Orders(study.folder / NAME)
    summary = study.folder / NAME / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"stopped": True}))
    orders.stop()
    assert cell.finished
    orders.go_on()
    assert not cell.finished


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ({"rounds": 2}, {"rounds": 3, "epochs": 2}, "rounds 2, now 3; epochs 1, now 2"),
        ({"rounds": 3}, {"rounds": 2}, "rounds 3, now 2"),
        ({"rounds": 2, "stream": "blurred"}, {"rounds": 3, "stream": "blurred"}, "rounds 2, now 3"),
    ],
    ids=["another-key", "fewer", "blurred"],
)
def test_another_experiment_begins_anew(
    make: Make, first: dict[str, Any], then: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for keys in (first, then):
        assert list(run_study(make(keys), Console(width=200)).summaries) == [NAME]
    said = lines_of(capsys)
    assert any(f"earlier run ({words}) kept as" in line for line in said)
    assert f"{NAME}: starting, {then['rounds']} rounds" in said


@pytest.mark.slow
def test_what_is_lost_cannot_go_on(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    study = make({"rounds": 2})
    run_study(study, Console(quiet=True))
    shutil.rmtree(study.folder / NAME / "clients")
    with pytest.raises(RunError, match="no longer has what its clients need for further rounds"):
        run_study(make({"rounds": 3, "resume": True}), Console(quiet=True))
    assert list(run_study(make({"rounds": 3}), Console(width=200)).summaries) == [NAME]
    assert f"{NAME}: starting, 3 rounds" in lines_of(capsys)


@pytest.mark.slow
def test_a_run_whose_keys_changed_on_the_way_is_no_run_of_a_study(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither with the keys that it began with nor with those that it ended with."""
    study = make({"rounds": 2})
    run_study(study, Console(quiet=True))
    config = study.runs[NAME].replaced({"rounds": 3, "epochs": 2, "resume": True})
    run_inline(config)
    for epochs in (2, 1):
        cell = Cell(NAME, study.runs[NAME].replaced({"rounds": 3, "epochs": epochs}))
        assert not cell.finished
    cell.prepare()
    assert "epochs 2, now 1" in cell.set_aside


@pytest.mark.slow
def test_a_runner_that_waits_for_another_s_run_says_so_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study, pauses = make(seed=[7, 8]), 0
    other = Cell(NAME, study.runs[NAME])
    assert other.claim()

    def pause(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 3:  # the other runner ends
            other.release()

    monkeypatch.setattr(runner, "time", SimpleNamespace(sleep=pause))
    assert list(run_study(study, Console(width=200)).summaries) == [NAME, "fedkace_seed-8"]
    said = [line for line in lines_of(capsys) if ": round " not in line]
    assert said == [
        "fedkace_seed-8: starting, 3 rounds",
        "fedkace_seed-8: done (1 of 2)",
        f"{NAME}: another process is working on it; waiting",
        f"{NAME}: starting, 3 rounds",
        f"{NAME}: done (2 of 2)",
    ]


def test_a_run_that_another_process_replaces_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    study, work = make({"rounds": 1}), runner._Shift.work

    def replaced(shift: runner._Shift) -> dict[str, str]:
        failures, path = work(shift), study.folder / NAME / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"epochs": 5}))
        return failures

    monkeypatch.setattr(runner._Shift, "work", replaced)
    outcome = run_study(study, Console(quiet=True))
    assert not outcome.summaries
    assert outcome.failures == {NAME: f"{NAME}: another process has replaced it by a run with other settings or data"}


def test_a_folder_in_which_no_run_has_begun_is_used_again(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C before the first round leaves a log and a lock."""
    study = make()
    folder = study.folder / NAME
    claim(study.folder, "a study")
    folder.mkdir()
    (folder / "app.log").write_text("stopped")
    (folder / ".lock").touch()
    assert list(run_study(study, Console(width=200)).summaries) == [NAME]
    assert lines_of(capsys)[0] == f"{NAME}: starting, 3 rounds"
    assert (folder / "app.1.log").read_text() == "stopped"
    assert [path for path in study.folder.iterdir() if path.name.startswith(NAME)] == [folder]


@pytest.mark.slow
@pytest.mark.parametrize("left", ["rounds.jsonl", "server/checkpoint-1.npz", "config.json"])
def test_what_an_earlier_run_has_recorded_is_kept(make: Make, left: str, capsys: pytest.CaptureFixture[str]) -> None:
    study = make()
    path = study.folder / NAME / left
    claim(study.folder, "a study")
    path.parent.mkdir(parents=True)
    path.write_text("damaged")
    assert list(run_study(study, Console(width=200)).summaries) == [NAME]
    said = lines_of(capsys)[0]
    assert said.startswith(f"{NAME}: earlier run kept as {NAME}.")
    assert (study.folder / said.split()[-1] / left).read_text() == "damaged"


@pytest.mark.parametrize("line", ['{"round": 1, "acc', "[1]"])
def test_a_damaged_record_is_named_with_its_line(
    make: Make, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make()
    record = cut_after_round(study.runs[NAME], 2, monkeypatch) / "rounds.jsonl"
    record.write_text("\n".join([line, *record.read_text().splitlines()[1:], ""]))
    failures = run_study(study, Console(width=200)).failures
    assert f"{record}, line 1: is not the record of round 1" in failures[NAME]
    assert draw_comparisons(study) == []  # what the command does next
    assert lines_of(capsys)[0] == f"{NAME}: continuing after round 2 of 3"
