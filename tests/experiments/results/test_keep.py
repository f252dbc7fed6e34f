"""Archiving the records of runs and studies."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.common import rounds_of
from support.systems.cut_off import cut_after_round

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.results.keep import keep
from fedkace_flwr.experiments.running.cells import Cell
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.results.run_folder import RunFolder
from fedkace_flwr.storage.targets import MARK


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
    """The files in a folder, but for its mark."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != MARK}


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
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {MARK, "done", "going", "study.json"}
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


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedkace", "refed", "dcfcl"])
def test_a_resumable_copy_goes_on_elsewhere_as_the_run_would_have(
    small: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Each round is done by another machine: the copy of a copy is resumed, the third round follows from it."""
    run_inline(small(method=method, run_name="whole"))
    run = cut_after_round(small(method=method), 1, monkeypatch)
    for number in (2, 3):
        moved = tmp_path / f"machine-{number}" / "run"
        keep(run, tmp_path / "kept", resumable=True)
        assert {path.name for path in (tmp_path / "kept" / "server").iterdir()} == {f"checkpoint-{number - 1:06d}.npz"}
        assert not list((tmp_path / "kept").rglob("answer-*"))
        shutil.copytree(tmp_path / "kept", moved)
        shutil.rmtree(run)
        again = small(method=method, results_dir=str(moved.parent), resume=True)
        if number == 2:
            cut_after_round(again, number, monkeypatch)
        else:
            run_inline(again)
        run = moved
    assert rounds_of(run) == rounds_of(tmp_path / "whole")
    keep(run, tmp_path / "kept", resumable=True)  # finished by now: nothing is left to resume
    assert contents(tmp_path / "kept") == {
        *("config.json", "environment.json", "rounds.jsonl", "summary.json", "accuracy.png")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "fedkace", "batchnorm-statistics": "local"},
        {"method": "fedframe", "fraction_train": 0.34},
        {"method": "fedkace", "fraction_train": 0.34, "predict-with": "local"},
    ],
)
def test_a_resumable_copy_holds_local_models_where_the_next_round_needs_them(
    small: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    run_inline(small(run_name="whole", **changes))
    run = cut_after_round(small(**changes), 2, monkeypatch)
    keep(run, tmp_path / "kept", resumable=True)
    shutil.copytree(tmp_path / "kept", tmp_path / "machine" / "run")
    run_inline(small(results_dir=str(tmp_path / "machine"), resume=True, **changes))
    assert rounds_of(tmp_path / "machine" / "run") == rounds_of(tmp_path / "whole")


def test_a_run_in_progress_is_not_kept_for_resuming(
    small: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_after_round(small(), 1, monkeypatch)
    keep(folder, tmp_path / "kept", resumable=True)
    before = {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    with (folder / "rounds.jsonl").open("a") as rounds:
        rounds.write('{"round": 2}\n')
    running = RunFolder(folder, resume=True)
    with pytest.raises(RunError, match="is running; interrupt it first"):
        keep(folder, tmp_path / "kept", resumable=True)
    running.close()
    shutil.rmtree(folder / "server")
    with pytest.raises(RunError, match="has no checkpoint"):
        keep(folder, tmp_path / "kept", resumable=True)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("resumable", [False, True])
def test_a_run_is_never_kept_in_place_of_one(
    small: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumable: bool
) -> None:
    """Neither of itself nor of another; nothing of it is touched."""
    run, other = (cut_after_round(small(run_name=name), 1, monkeypatch) for name in ("one", "two"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "study.json").write_text("{}")
    for source, target in ((run, run), (run, other), (tmp_path, tmp_path)):
        with pytest.raises(ConfigError, match=r"run, not a kept run;|holds files, and no \.fedkace of a kept study;"):
            keep(source, target, resumable=resumable)
    assert {path: path.read_bytes() for path in before} == before


def weights(config: Config, path: Path) -> str:
    """A file with the initial weights of a configuration."""
    path.parent.mkdir(exist_ok=True)
    torch.save(Experiment(config).initial_weights(), path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("finished", [True, False])
def test_a_kept_run_is_recognised_by_the_content_of_its_weights_file(
    finished: bool, small: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy names neither folder nor machine; elsewhere the file lies at another path, under another name."""
    one = small(rounds=2, weights_file=weights(small(), tmp_path / "here" / "one.pth"))
    if finished:
        run_inline(one)
    else:
        cut_after_round(one, 1, monkeypatch)
    keep(tmp_path / "run", tmp_path / "moved" / "run", resumable=True)
    assert str(tmp_path) not in (tmp_path / "moved" / "run" / "config.json").read_text()
    (tmp_path / "there").mkdir()
    shutil.move(tmp_path / "here" / "one.pth", tmp_path / "there" / "same.pth")
    there = {"rounds": 2, "results_dir": str(tmp_path / "moved")}
    other = Cell("run", small(**there, weights_file=weights(small(seed=1), tmp_path / "there" / "other.pth")))
    assert not other.finished and not Cell("run", small(**there)).finished
    cell = Cell("run", small(**there, weights_file=str(tmp_path / "there" / "same.pth")))
    assert cell.finished == finished
    config = cell.prepare()
    assert config.run.resume and cell.set_aside == ""
    run_inline(config)
    assert len(rounds_of(tmp_path / "moved" / "run")) == 2
    with pytest.raises(ConfigError, match=r"weights-file = .*other.pth': the run in .* was begun with 'one.pth'"):
        RunFolder(tmp_path / "moved" / "run", resume=True).go_on(other.config)


def test_a_run_whose_weights_file_has_another_content_now_is_another_run(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    config = small(rounds=1, weights_file=weights(small(), tmp_path / "one.pth"))
    run_inline(config)
    assert Cell("run", config).finished
    weights(small(seed=1), tmp_path / "one.pth")
    folder = RunFolder(tmp_path / "run", resume=True)
    with pytest.raises(
        ConfigError, match=r"one.pth': the run in .* was begun with another content of that file; resume"
    ):
        folder.go_on(config)
    folder.close()
    cell = Cell("run", config)
    assert not cell.finished
    cell.prepare()
    assert f"weights-file {tmp_path / 'one.pth'}, now with another content" in cell.set_aside


def test_a_run_is_recognised_by_the_path_where_the_content_is_not_known(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    """Earlier versions stored no digest; and a file may be gone once its run is finished."""
    config = small(rounds=1, weights_file=weights(small(), tmp_path / "one.pth"))
    moved = small(rounds=1, weights_file=str(shutil.copy(tmp_path / "one.pth", tmp_path / "two.pth")))
    run_inline(config)
    assert Cell("run", moved).finished
    (tmp_path / "one.pth").unlink()
    assert Cell("run", config).finished
    path = tmp_path / "run" / "environment.json"
    stored = json.loads(path.read_text())
    del stored["files"]
    path.write_text(json.dumps(stored))
    assert Cell("run", config).finished and not Cell("run", moved).finished
