"""Before a study starts: the plan with its estimates, runs without data, and runs that take an earlier one's name."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.common import SMALL
from support.systems.engines import InProcessEngine

from fedkace_flwr.config import Config
from fedkace_flwr.errors import MissingDataError
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.plan import at_once, show_plan
from fedkace_flwr.experiments.running.runner import run_study
from fedkace_flwr.experiments.running.workers import Gpu, Machine, plan_workers
from fedkace_flwr.experiments.studies.study import Study, load_study

TINY = {**{key: value for key, value in SMALL.items() if key != "seed"}, "rounds": 1, "clients": 2}


def study(folder: Path, grid: dict[str, Any], **config: Any) -> Study:
    path = folder / "trial.yaml"
    path.write_text(json.dumps({"config": {**TINY, **config}, "grid": grid}), encoding="utf-8")
    return load_study(path, {}, folder / "results", engine="inline", workers=1)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send downloads to a port at which nobody listens."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def data_of(place: Path) -> dict[str, Any]:
    return {"digits": {"dataset": "digits"}, "pictures": {"dataset": "folder", "data-dir": str(place)}}


def test_a_dry_run_downloads_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], offline: None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "cifar100_small", "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path / 'data' / 'cifar-100-python'}: is missing; a run would download cifar100 there" in told
    assert main(["run", "quickstart", "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_fails_leaves_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], offline: None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "cifar100_small", "--engine", "inline"]) == 2
    assert "could not be downloaded" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_runs_without_data_are_named_and_left_out(
    tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = study(tmp_path, {"data": data_of(tmp_path / "nowhere"), "method": ["fedkace", "er"]})
    outcome = run_study(asked, Console(width=200))
    assert list(outcome.summaries) == ["fedkace_digits_seed-0", "er_digits_seed-0"] and outcome.failures == {}
    out = capsys.readouterr().out
    assert "left out, without data: fedkace_pictures_seed-0, er_pictures_seed-0 (" in out
    assert str(tmp_path / "nowhere" / "train") in out
    listed = json.loads((asked.folder / "study.json").read_text())["runs"]
    assert set(listed) == set(asked.runs) and set(outcome.missing) == set(asked.runs) - set(outcome.summaries)


def test_a_command_that_leaves_out_runs_without_data_does_not_succeed(
    tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = study(tmp_path, {"data": data_of(tmp_path / "nowhere")})
    command = ["run", str(tmp_path / f"{asked.name}.yaml"), "--results", str(tmp_path), "--engine", "inline"]
    assert main(command) == 2
    told = capsys.readouterr()
    assert "fedkace_digits_seed-0" in told.out and "left out, without data: fedkace_pictures_seed-0" in told.err


def test_a_study_without_any_data_is_refused(tmp_path: Path, in_process: None) -> None:
    with pytest.raises(MissingDataError, match="data-dir should hold"):
        run_study(study(tmp_path, {}, dataset="folder", **{"data-dir": str(tmp_path)}), Console())


def test_more_workers_than_cores_do_not_shorten_the_estimate(tmp_path: Path) -> None:
    asked = study(tmp_path, {})
    for cores, count, expected in ((2, 100, 2), (16, 4, 4)):
        planned = plan_workers(replace(asked, workers=count), Machine(cores, 2**40))
        assert planned.count == count and at_once(planned) == expected
    with_gpu = Machine(2, 2**40, (Gpu("0", 80 * 2**30, 80 * 2**30),))
    assert at_once(plan_workers(replace(asked, workers=8), with_gpu)) == 8


def test_a_plan_never_says_zero_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workers", "100", "--results", str(tmp_path), "--set", "rounds=1", "epochs=1", "width=2"]
    assert main(["run", "quickstart", "--dry-run", *options]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"\b0 seconds", out) and "about" in out


def test_clients_that_have_not_trained_yet_are_planned_without_test_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a fraction of the clients in each round, some have met no class in the first rounds."""
    options = ["--results", str(tmp_path), "--only", "fedkace", "--set", "rounds=2", "epochs=1", "width=2"]
    tested = []
    for fraction in (1.0, 0.1):
        assert main(["run", "quickstart", "--dry-run", *options, f"fraction-train={fraction}"]) == 0
        (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("fedkace_")]
        tested.append(int(row[6].replace(",", "")))
    assert 0 < tested[1] < tested[0] / 3  # one client of ten in the first round, at most two in the second


def test_a_plan_counts_every_model_and_view_that_a_client_tests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--results", str(tmp_path), "--only", "er", "--set", "method=er", "rounds=1", "epochs=1", "width=2"]
    tested = []
    for keys in (
        [],
        ["evaluate=both"],
        ["predict-with=mean"],
        ["predict-with=mean", "test-time-augmentation=mirrored"],
    ):
        assert main(["run", "quickstart", "--dry-run", *options, *keys]) == 0
        (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("er_")]
        tested.append(int(row[6].replace(",", "")))
    assert [each / tested[0] for each in tested] == [1, 2, 2, 3]


def test_a_plan_counts_what_is_left_of_a_run_that_has_begun(
    tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(rounds: int, **keys: Any) -> list[str]:
        show_plan(study(tmp_path, {}, rounds=rounds, **keys), Console(width=200))
        (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("fedkace_")]
        return row

    whole = planned(3)
    run_study(study(tmp_path, {}, rounds=2), Console(width=200))
    capsys.readouterr()
    rest = planned(3)
    assert (rest[1], rest[2]) == ("begun", "1")
    assert int(rest[3]) < int(whole[4]) / 2, "one round of training in place of three"
    assert planned(2)[1] == "finished"
    assert planned(3, epochs=3)[1:4] == ["to", "do", "3"], "a run with other values starts anew"


def test_an_earlier_run_of_the_same_name_is_kept_and_it_says_where(
    tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run_study(study(tmp_path, {}), Console(width=200))
    capsys.readouterr()
    asked = study(tmp_path, {}, epochs=3)
    run_study(asked, Console(width=200))
    found = re.search(r"fedkace_seed-0: earlier run \(epochs (\d), now 3\) kept as (\S+)", capsys.readouterr().out)
    assert found and int(found[1]) == TINY["epochs"]
    assert (asked.folder / found[2] / "summary.json").exists()
    run_study(asked, Console(width=200))
    assert "earlier run" not in capsys.readouterr().out  # nothing was displaced


class _Interrupted(InProcessEngine):
    """Runs to the end although the user has pressed Ctrl-C meanwhile."""

    def start(self, config: Config, log: Path) -> Any:
        job = super().start(config, log)
        job.running = self._interrupt  # type: ignore[method-assign]
        return job

    def _interrupt(self) -> bool:
        raise KeyboardInterrupt


def test_ctrl_c_is_answered_at_once_and_a_run_that_ended_meanwhile_is_not_called_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "InlineEngine", _Interrupted)
    outcome = run_study(study(tmp_path, {}), Console(width=200))
    assert list(outcome.summaries) == ["fedkace_seed-0"]
    assert "stopping; finished rounds are kept" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        run_study(study(tmp_path, {"seed": [1, 2]}, epochs=3), Console(width=200))
