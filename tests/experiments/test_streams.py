"""Streams other than the paper's, from the plan of a study to its report."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from support.common import SMALL, rounds_of
from support.made.datasets import ROOT, write_tree
from support.systems.engines import InProcessEngine

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.data.datasets import CACHE
from fedkace_flwr.data.schedules import class_order
from fedkace_flwr.errors import ConfigError, MissingDataError, StreamError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.arguments import make_parser, study_first
from fedkace_flwr.experiments.report.streams import DrawnStream
from fedkace_flwr.experiments.report.tables import study_tables
from fedkace_flwr.experiments.results.loading import load_results
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.plan import show_plan, training_samples
from fedkace_flwr.experiments.running.runner import run_study
from fedkace_flwr.experiments.studies.names import find_study
from fedkace_flwr.experiments.studies.study import Study, load_study
from fedkace_flwr.results.record import title

STREAMS = ["windows", "blurred", "dirichlet", "quantity-skew"]


def study(folder: Path, methods: list[str], **config: Any) -> Study:
    path = folder / "streams.yaml"
    settings = {**SMALL, "rounds": 2, "clients": 2, **config}
    del settings["seed"]
    path.write_text(json.dumps({"config": settings, "grid": {"stream": STREAMS, "method": methods}}), encoding="utf-8")
    return load_study(path, {}, folder / "results", engine="inline", workers=1)


@pytest.mark.slow
def test_a_study_over_streams_is_run_and_reported_with_regrets_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    cache = tmp_path / "cache"
    monkeypatch.setenv(CACHE, str(cache))
    asked = study(tmp_path, ["fedkace", "centralized"])
    outcome = run_study(asked, Console(width=200))
    assert len(outcome.summaries) == 8 and outcome.failures == {}
    assert len(list((cache / "centralized").iterdir())) == 4  # no reference is taken for another stream's
    results = load_results(asked.folder)
    aa, ar, *_ = study_tables(results, results.studies[0])
    assert aa.columns == ar.columns
    assert sorted(aa.columns) == [
        *("digits, O=1, stream=blurred", "digits, O=1, stream=quantity-skew", "digits, O=1, stream=windows"),
        "digits, stream=dirichlet",
    ]
    for run, column in (
        ("fedkace_stream-windows_seed-0", "digits, O=1"),
        ("fedkace_stream-blurred_seed-0", "digits, O=1, stream=blurred"),
        ("fedkace_stream-dirichlet_seed-0", "digits, stream=dirichlet"),
    ):
        alone = load_results(asked.folder / run)
        assert study_tables(alone, alone.studies[0])[0].columns == [column]
    for column in aa.columns:
        regret = ar.cells["FedKACE", column].mean
        assert regret == pytest.approx(aa.cells["Centralized", column].mean - aa.cells["FedKACE", column].mean)


@pytest.mark.slow
def test_the_plan_counts_the_samples_of_each_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = study(tmp_path, ["fedavg"], epochs=2)
    for run in asked.runs.values():
        config = configured(run)[1]
        experiment = Experiment(config)
        received = sum(len(experiment.chunk(client, number)) for client in range(2) for number in (1, 2))
        rounding = 0.5 * 2 * 2  # of the clients' mean
        assert training_samples(config) == pytest.approx(2 * received, abs=2 * rounding)
    show_plan(asked, Console(width=200))
    out = capsys.readouterr().out
    assert all(f"fedavg_stream-{stream}_seed-0" in out for stream in STREAMS)


def test_a_plan_refuses_a_stream_that_would_run_dry(tmp_path: Path) -> None:
    asked = study(tmp_path, ["fedavg"], rounds=40, **{"samples-per-class": 25})
    alone = replace(asked, runs={name: run for name, run in asked.runs.items() if "dirichlet" in name})
    with pytest.raises(StreamError, match=r"stream = 'dirichlet', .* at most \d+ rounds or \d+ samples per class"):
        show_plan(alone, Console())


@pytest.mark.slow
def test_the_command_draws_each_different_stream_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = study(tmp_path, ["fedkace", "er"]).name
    sizes = []
    for options in ([], ["--only", "*dirichlet*"]):
        assert main(["stream", f"{asked}.yaml", *options, "--output", "drawn.png"]) == 0
        assert capsys.readouterr().out == "written: drawn.png\n"
        with Image.open("drawn.png") as picture:
            sizes.append(picture.size)
    (width, height), (one_width, one_height) = sizes
    assert width == one_width
    assert height - 22 == pytest.approx(4 * (one_height - 22), abs=4)  # four rows and a margin of 0.2 inches


def test_the_picture_holds_the_samples_of_the_run() -> None:
    config = Config.parse({"stream": "blurred", "rounds": 4, "clients": 2})
    drawn, experiment = DrawnStream.of(config).tables(), Experiment(config)
    order = list(class_order(0, 0, 10))
    assert len(drawn) == 2
    for client, counts in enumerate(drawn):
        for number in range(1, 5):
            expected = experiment.chunk(client, number).class_counts(10)[order]
            assert counts[:, number - 1].tolist() == expected.tolist()


def test_only_the_files_of_a_folder_say_how_many_classes_to_draw(tmp_path: Path) -> None:
    config = Config.parse({"dataset": "folder", "data-dir": str(tmp_path)})
    with pytest.raises(MissingDataError, match=f"^{tmp_path}/train: "):
        DrawnStream.of(config)
    for split in ("train", "val"):
        write_tree(tmp_path / split, ("cat", "dog", "eel"), 1)
    assert DrawnStream.of(config).classes == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["table1"], r"table1: its runs have \d+ streams, at most 8 are drawn; choose runs with --only, or set seed"),
        (["--set", "window=11"], "window = 11: must be between 1 and the number of classes, 10"),
        (["--output", "nowhere/a.png"], "--output nowhere/a.png: cannot be written"),
        (["no_such_study"], "no_such_study"),
    ],
)
def test_what_cannot_be_drawn_is_answered_in_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["stream", *options]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and len(error.splitlines()) == 1


def test_the_page_names_commands_that_are_understood(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "streams.md").read_text(encoding="utf-8")
    commands = re.findall(r"^fedkace (stream .*?)(?:  +#.*)?$", page, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        options = make_parser("fedkace").parse_args(study_first(shlex.split(command)))
        assert options.command == "stream" and find_study(options.study).is_file()


def test_a_run_is_not_resumed_with_another_stream(tmp_path: Path) -> None:
    small = {**SMALL, "results-dir": str(tmp_path), "run-name": "run", "rounds": 1, "stream": "blurred"}
    run_inline(Config.parse(small))
    (tmp_path / "run" / "summary.json").unlink()  # as if the run had been interrupted
    before = rounds_of(tmp_path / "run")
    for change in ({"stream": "windows"}, {"stream": "blurred:0.3"}, {"shared-samples": False}):
        (name,) = change
        with pytest.raises(ConfigError, match=rf"^{name} = .* was begun with .*; resume it with that"):
            run_inline(Config.parse({**small, **change, "resume": True}))
    assert rounds_of(tmp_path / "run") == before


def test_a_runs_title_names_its_stream() -> None:
    titles = [title(Config.parse({"stream": stream})) for stream in STREAMS]
    assert titles == [
        "fedkace on digits: 10 clients, window 2, overlap 1, M = 60",
        "fedkace on digits: 10 clients, blurred stream, window 2, overlap 1, M = 60",
        "fedkace on digits: 10 clients, dirichlet stream, chunks of 50, M = 60",
        "fedkace on digits: 10 clients, quantity-skew stream, window 2, overlap 1, M = 60",
    ]
