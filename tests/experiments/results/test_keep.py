"""Archiving the records of runs and studies."""

import json
from pathlib import Path

import pytest

from experiments.results.keep import keep
from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError


def made_run(folder: Path, *, finished: bool, rounds: int = 2, half: str = "") -> Path:
    """A run's folder with some rounds, and perhaps the beginning of a further line."""
    folder.mkdir(parents=True)
    config = {**Config().flat(), "data-dir": "/home/someone/data", "results-dir": "/home/someone/results"}
    config["weights-file"] = "/home/someone/resnet18.pth"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text('{"schema": 1}')
    lines = "".join(json.dumps({"round": number}) + "\n" for number in range(1, rounds + 1))
    (folder / "rounds.jsonl").write_text(lines + half)
    if finished:
        (folder / "summary.json").write_text('{"rounds": 2}')
        (folder / "accuracy.png").write_bytes(b"picture")
    (folder / "clients").mkdir()
    (folder / "clients" / "state.npz").write_bytes(b"images")
    return folder


def contents(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_kept_with_its_plot_and_without_folders_or_states(tmp_path: Path) -> None:
    keep(made_run(tmp_path / "run", finished=True), tmp_path / "kept")
    assert contents(tmp_path / "kept") == {
        *("config.json", "environment.json", "rounds.jsonl", "summary.json", "accuracy.png")
    }
    kept = (tmp_path / "kept" / "config.json").read_text()
    assert "someone" not in kept and json.loads(kept)["weights-file"] == "resnet18.pth"


def test_an_unfinished_run_is_kept_up_to_its_last_whole_round(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", finished=False, half='{"round": 3, "accu')
    keep(run, tmp_path / "kept")
    assert contents(tmp_path / "kept") == {"config.json", "environment.json", "rounds.jsonl"}
    assert (tmp_path / "kept" / "rounds.jsonl").read_text() == '{"round": 1}\n{"round": 2}\n'


def test_a_study_is_kept_with_every_run_that_has_a_round(tmp_path: Path) -> None:
    study = tmp_path / "study"
    made_run(study / "done", finished=True)
    made_run(study / "going", finished=False)
    made_run(study / "begun", finished=False, rounds=0)
    (study / "study.json").write_text("{}")
    keep(study, tmp_path / "kept")
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"done", "going", "study.json"}
    assert (tmp_path / "kept" / "done" / "summary.json").exists()
    assert not (tmp_path / "kept" / "going" / "summary.json").exists()


def test_where_no_round_is_done_there_is_nothing_to_keep(tmp_path: Path) -> None:
    study = tmp_path / "study"
    made_run(study / "begun", finished=False, rounds=0)
    (study / "study.json").write_text("{}")
    with pytest.raises(RunError, match="no run has completed a round"):
        keep(study, tmp_path / "kept")
    (study / "study.json").unlink()
    with pytest.raises(RunError, match=r"has no config.json; must be the folder of a run"):
        keep(study, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
