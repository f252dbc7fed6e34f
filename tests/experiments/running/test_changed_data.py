"""A run is known by the content of its data, not by their place."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.common import SMALL, rounds_of
from support.made.datasets import write_picture, write_tree
from support.systems.cut_off import cut_after_round
from support.systems.engines import InProcessEngine

from fedkace_flwr.config import Config
from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.errors import ConfigError, DataError
from fedkace_flwr.experiment import Experiment, shared_experiment
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.cells import Cell
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.runner import run_study
from fedkace_flwr.experiments.studies.study import Study, load_study
from fedkace_flwr.results.run_folder import RunFolder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split, count, seed in (("train", 16, 0), ("test", 2, 5000)):
        write_tree(tmp_path / "photos" / split, ("ant", "bee", "cat", "dog"), count, seed=seed)
    return tmp_path / "photos"


@pytest.fixture
def study(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    own = {"dataset": "folder", "data-dir": str(photos), "image-size": 8, "window": 2, "overlap": 0, "rounds": 2}
    path = tmp_path / "trial.yaml"
    path.write_text(json.dumps({"config": {**SMALL, **own, "clients": 2, "method": "er"}}))
    return load_study(path, {}, tmp_path / "results", engine="inline", workers=1)


def add_a_class(photos: Path) -> None:
    for split, count in (("train", 16), ("test", 2)):
        write_tree(photos / split, ("eel",), count, seed=9000 + count)
    shared_experiment.cache_clear()  # another process would have nothing to forget


def run(study: Study, capsys: pytest.CaptureFixture[str]) -> str:
    assert list(run_study(study, Console(width=200)).summaries) == list(study.runs)
    return capsys.readouterr().out


def test_a_finished_run_on_other_data_is_kept_aside_and_run_anew(
    study: Study, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (name,) = study.runs
    run(study, capsys)
    for path in photos.rglob("*.JPEG"):
        os.utime(path)  # prepared anew, and still the same
    assert "already finished" in run(study, capsys)
    before = rounds_of(study.folder / name)
    add_a_class(photos)
    told = run(study, capsys)
    assert f"{name}: earlier run (dataset folder, now with another content) kept as {name}." in told
    (aside,) = study.folder.glob(f"{name}.*")
    assert rounds_of(aside) == before and rounds_of(study.folder / name) != before
    assert "already finished" in run(study, capsys)


def test_a_run_of_an_earlier_version_which_stored_no_digest_is_finished(
    study: Study, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (name,) = study.runs
    run(study, capsys)
    path = study.folder / name / "environment.json"
    stored = json.loads(path.read_text())
    del stored["files"]["dataset"]
    path.write_text(json.dumps(stored))
    add_a_class(photos)
    assert "already finished" in run(study, capsys)


def test_data_that_change_while_a_study_runs_are_not_mixed(study: Study, photos: Path) -> None:
    (name,) = study.runs
    cell = Cell(name, study.runs[name], load_dataset(study.runs[name].data).digest)
    cell.prepare()
    add_a_class(photos)
    with pytest.raises(DataError, match="dataset = 'folder': has changed since the study began"):
        cell.prepare()


def test_an_unfinished_run_on_other_data_is_not_resumed(
    small: Callable[..., Config], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"dataset": "folder", "data_dir": str(photos), "image_size": 8, "window": 2, "overlap": 0, "method": "er"}
    folder = cut_after_round(small(**own), 1, monkeypatch)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    write_picture(photos / "train" / "ant" / "ant_00.JPEG", seed=77)
    shared_experiment.cache_clear()
    with pytest.raises(
        ConfigError, match=r"dataset = 'folder': the run in .* was begun with another content of that data set"
    ):
        run_inline(small(**own, resume=True))
    assert {path: path.read_bytes() for path in before} == before


def test_a_finished_run_is_compared_with_the_data_that_are_there_now(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    """By whoever opens its folder, whatever it then does."""
    config = small(rounds=1)
    run_inline(config)
    stored = json.loads((tmp_path / "run" / "environment.json").read_text())["files"]
    assert len(stored["dataset"]) == 64
    for data, fits in ((stored["dataset"], True), ("", True), ("0" * 64, False)):
        folder = RunFolder(tmp_path / "run", resume=True, data=data)
        try:
            if fits:
                folder.changed(config)
            else:
                with pytest.raises(ConfigError, match="dataset = 'digits'"):
                    folder.changed(config)
        finally:
            folder.close()


# Weights to start from


def weights(config: Config, path: Path) -> str:
    """A file with the initial weights of a configuration."""
    path.parent.mkdir(exist_ok=True)
    torch.save(Experiment(config).initial_weights(), path)
    return str(path)


@pytest.mark.parametrize("finished", [True, False])
def test_a_copied_run_is_recognised_by_the_content_of_its_weights_file(
    finished: bool, small: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine the file lies at another path, under another name."""
    one = small(rounds=2, weights_file=weights(small(), tmp_path / "here" / "one.pth"))
    if finished:
        run_inline(one)
    else:
        cut_after_round(one, 1, monkeypatch)
    shutil.copytree(tmp_path / "run", tmp_path / "moved" / "run")
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
    with pytest.raises(ConfigError, match=r"weights-file = .*other.pth': the run in .* was begun with '.*one.pth'"):
        RunFolder(tmp_path / "moved" / "run", resume=True).changed(other.config)


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
        folder.changed(config)
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
