"""The documents tell the truth: the tests type what the documents say to type."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.tools import need_modules

from fedkace_flwr.configured import configured
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.bench.measure import kept
from fedkace_flwr.experiments.report.quoted import with_tables
from fedkace_flwr.experiments.results.recorded import Recorded, Run
from fedkace_flwr.experiments.studies.study import load_study
from fedkace_flwr.results.record import defended
from fedkace_flwr.results.run_folder import differences

ROOT = Path(__file__).resolve().parents[1]


def kept_runs(study: str) -> dict[str, Run]:
    """The kept runs of a study by name."""
    return {run.name: run for run in Recorded(ROOT / "docs" / "results" / study).runs}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_method_can_be_added_as_the_page_says(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("fedkace_flwr", "strategies", "clients", "experiments", "tests", "docs"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    page = (ROOT / "docs" / "add-a-method.md").read_text()
    files = re.findall(r"^(?:.* )?`([\w/]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    assert [Path(name).parent.as_posix() for name, _ in files] == [*("clients", "strategies", "experiments/studies")]
    for name, body in files:
        (copy / name).write_text(body)
    (line,) = re.findall(r"```python\n(.*?)```", page.split("## 3 The line")[1], re.DOTALL)
    registry = copy / "fedkace_flwr" / "registry.py"
    head = "METHODS = _Methods(\n    {\n"
    assert head in registry.read_text()
    registry.write_text(registry.read_text().replace(head, head + line))

    def run(*command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        done = subprocess.run(
            [sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "fedkace_flwr.config_docs")
    assert "| `recent-span` | `2` | >= 1 rounds |" in (copy / "docs" / "configuration.md").read_text()
    assert "| `turnover` | training | 0 to 1 |" in (copy / "docs" / "metrics.md").read_text()
    assert "`recent`" in (copy / "docs" / "methods.md").read_text()
    command = re.search(r"^python (-m pytest .*)$", page, re.MULTILINE)
    assert command and "passed" in run(*command[1].split(), "-q", "-p", "no:cacheprovider")
    small = ["rounds=2", "clients=2", "epochs=1", "width=4", "recent-span=1", "tracker=tensorboard"]
    options = ["--engine=inline", *(f"--set={setting}" for setting in small)]
    table = run("-m", "experiments", "run", "recent", *options)
    assert re.search(r"^recent_seed-0 .*\d", table, re.MULTILINE) and "accuracy_seed-0.png" in table

    results = copy / "results" / "recent"
    record = json.loads((results / "recent_seed-0" / "rounds.jsonl").read_text().splitlines()[-1])
    assert record["turnover"] == [1.0, 1.0]  # with a span of one round, the buffer is the chunk
    other = json.loads((results / "er_seed-0" / "rounds.jsonl").read_text().splitlines()[-1])
    assert "turnover" not in other and set(other) < set(record)
    show = (
        "from pathlib import Path; from fedkace_flwr.experiments.results.loading import load_results; "
        "print(load_results(Path('results/recent')).rounds.groupby('method')['turnover'].mean().to_dict())"
    )
    assert "'recent': 1.0" in run("-c", show)
    (events,) = (results / "recent_seed-0").glob("*tfevents*")
    assert b"turnover/1" in events.read_bytes()


@pytest.mark.slow
def test_a_sensors_series_are_learned_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_modules("seglearn")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "data.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    with np.load("watch.npz") as arrays:
        assert f"{len(arrays['y_train']) + len(arrays['y_test'])} windows" in page
    commands = re.findall(r"^fedkace (\w+ .*?) *(?:#.*)?$", page, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["run", "run", "feed", "run", "run"]
    short = "--engine inline --seeds 0 --only fedkace* --set rounds=2 epochs=1 clients=2"
    for command in sorted(set(commands)):
        assert main(f"{command} {short if command.startswith('run') else ''}".split()) == 0, command


@pytest.mark.parametrize(("page", "run"), [("README.md", "quickstart"), ("docs/running.md", "cifar100_small")])
def test_quoted_summary_tables_are_those_of_the_kept_runs(
    page: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ROOT / "docs" / "results" / run
    runs = json.loads((folder / "study.json").read_text())["runs"]
    assert main(["table", *(str(folder / each) for each in runs)]) == 0
    assert capsys.readouterr().out.rstrip() in (ROOT / page).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tables"),
    [("REPRODUCIBILITY.md", 8), ("docs/fedframe.md", 6), ("docs/data.md", 2), ("docs/methods.md", 1)],
)
def test_the_tables_of_the_studies_are_those_of_their_kept_runs(name: str, tables: int) -> None:
    page = (ROOT / name).read_text()
    assert page.count("<!-- table ") == tables
    assert with_tables(page, (ROOT / name).parent) == page


@pytest.mark.parametrize(("name", "method"), [("FedKACE", "fedkace"), ("AS8", "as8")])
def test_the_runs_in_both_precisions_are_the_kept_ones(name: str, method: str) -> None:
    runs = [kept_runs(study)[f"{method}_overlap-4_seed-0"] for study in ("reduced", "reduced_repeated")]
    shares = [f"{100 * run.summary()['average_accuracy']:.2f}" for run in runs]
    assert f"| {name} | {' | '.join(shares)} |" in (ROOT / "REPRODUCIBILITY.md").read_text()


@pytest.mark.parametrize(
    ("row", "study", "method"),
    [
        ("OFCL, 6 epochs", "reduced", "ofcl"),
        ("OFCL, 15 epochs", "reduced_repeated", "ofcl"),
        ("Re-Fed, 6 epochs", "reduced", "refed"),
    ],
)
def test_the_runs_of_equal_steps_are_the_kept_ones(row: str, study: str, method: str) -> None:
    runs = [kept_runs(study)[f"{method}_overlap-4_seed-{seed}"] for seed in (0, 1)]
    assert {run.config().training.epochs for run in runs} == {int(row.split()[-2])}
    shares = [f"{100 * run.summary()['average_accuracy']:.2f}" for run in runs]
    assert f"| {row} | {' | '.join(shares)} |" in (ROOT / "REPRODUCIBILITY.md").read_text()


@pytest.mark.parametrize("name", ["quickstart", "cifar100_small", "reduced", "wine", "watch"])
def test_kept_runs_are_those_of_todays_studies(name: str) -> None:
    study = load_study(ROOT / "experiments" / "studies" / f"{name}.yaml", {}, ROOT)
    for run, record in kept_runs(name).items():
        config = study.runs[run] if len(study.runs) > 1 else next(iter(study.runs.values()))
        assert not differences(record.config().flat(), configured(config)[1])


@pytest.mark.slow
def test_without_attacks_the_defence_touched_only_the_runs_that_fedframe_md_names() -> None:
    touched = Counter(
        study.parent.name
        for study in (ROOT / "docs" / "results").glob("*/study.json")
        for run in Recorded(study.parent).runs
        if run.config().attack.attack == "none" and defended(run.rounds()) != (0, 0)
    )
    assert touched == {"fedframe-faithful": 13}


def test_each_rival_is_tested_with_the_parts_that_suited_it_best() -> None:
    kept = {**kept_runs("fedframe-reduced"), **kept_runs("untouched-choice")}
    tested = load_study(ROOT / "experiments" / "studies" / "untouched.yaml", {}, ROOT, scale="test").runs
    for name, method in {"FedKACE": "fedkace", "FedCBDR": "fedcbdr", "ER": "er", "DER++": "derpp"}.items():
        means = {}
        for variant in (method, f"{method}-parts", f"{method}-unadjusted", f"{method}-answers"):
            runs = [kept[f"{method}_cifar100_overlap-{overlap}_{variant}_seed-3"] for overlap in (4, 0)]
            means[variant] = sum(run.summary()["average_accuracy"] for run in runs) / 2
        best = max(means, key=lambda variant: means[variant])
        shown = [f"**{100 * mean:.2f}**" if variant == best else f"{100 * mean:.2f}" for variant, mean in means.items()]
        assert f"| {name} | {' | '.join(shown)} |" in (ROOT / "docs" / "fedframe.md").read_text()
        assert f"{method}_cifar100_overlap-4_{best}_seed-6" in tested


def test_the_table_of_what_privacy_costs_is_that_of_its_kept_runs() -> None:
    page = (ROOT / "docs" / "privacy.md").read_text()
    runs = kept_runs("privacy")
    assert len(runs) >= 9
    for name, run in runs.items():
        last = run.rounds()[-1]
        models = [accuracy for accuracy in last["global_accuracy"] if accuracy is not None]
        shown = (run.summary()["average_accuracy"], last["accuracy"], sum(models) / len(models))
        method, protection, _ = name.split("_")
        row = " | ".join([f"| `{method}`", protection, *(f"{100 * value:.1f}" for value in shown)])
        assert row in page, row


def test_the_figures_of_the_benchmark_are_the_kept_ones() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    records = sorted(set(re.findall(r"results/bench/(\w+\.json)", page)))
    assert records
    for record in records:
        assert kept(ROOT / "docs" / "results" / "bench" / record) in page, record
