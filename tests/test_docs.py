"""The documents tell the truth: the tests type what the documents say to type."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.bench.measure import kept
from experiments.report.tables import markdown, study_tables
from experiments.results.loading import load_results
from experiments.running.cells import Cell
from experiments.running.study import load_study

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_method_can_be_added_as_the_page_says(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("fedkace_flwr", "strategies", "clients", "experiments", "tests", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    page_text = (ROOT / "docs" / "add-a-method.md").read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", page_text, re.DOTALL)
    (client, line), (row,), (study,) = (
        [body for kind, body in blocks if kind == wanted] for wanted in ("python", "markdown", "yaml")
    )
    (copy / "clients" / "recent.py").write_text(client)
    (copy / "experiments" / "studies" / "recent.yaml").write_text(study)
    registry = copy / "fedkace_flwr" / "registry.py"
    text = registry.read_text().replace("METHODS: dict[str, Method] = {\n", "METHODS: dict[str, Method] = {\n" + line)
    registry.write_text(text.replace("from clients.er", "from clients.recent import RecentClient\nfrom clients.er"))

    page = copy / "docs" / "methods.md"
    head = "| method | to a client | from a client |\n|---|---|---|\n"
    assert head in page.read_text()
    page.write_text(page.read_text().replace(head, head + row))

    def run(*command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        done = subprocess.run(
            [sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    command = re.search(r"^python (-m pytest .*)$", page_text, re.MULTILINE)
    assert command and "passed" in run(*command[1].split(), "-q", "-p", "no:cacheprovider")
    small = ["--set=rounds=2", "--set=clients=2", "--set=epochs=1", "--set=width=4", "--engine=inline"]
    table = run("-m", "experiments", "run", "experiments/studies/recent.yaml", *small)
    assert re.search(r"^recent_seed-0 .*\d", table, re.MULTILINE) and "accuracy_seed-0.png" in table


def test_every_file_that_a_page_links_to_exists() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_study_and_module_that_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "method.md").read_text()
    for name in set(re.findall(r"\b(?:experiments|fedkace_flwr|clients|strategies)/[\w/]+\.\w+", text)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("run", ["quickstart", "cifar100_small"])
def test_the_tables_of_the_readme_are_those_of_the_kept_runs(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(ROOT / "docs" / "results" / run)]) == 0
    assert capsys.readouterr().out.rstrip() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("reduced", ("aa", "ar", "early", "late", "condition")),
        ("table2-reduced", ("aa", "condition")),
        ("table4-reduced", ("aa",)),
        ("readings-reduced", ("aa",)),
    ],
)
def test_the_tables_of_the_reduced_studies_are_those_of_their_kept_runs(name: str, keys: tuple[str, ...]) -> None:
    results = load_results(ROOT / "docs" / "results" / name)
    (study,) = results.studies
    page = (ROOT / "REPRODUCIBILITY.md").read_text()
    for table in study_tables(results, study):
        if table.key in keys:
            assert markdown(table).strip() in page, table.title


@pytest.mark.parametrize(("name", "method"), [("FedKACE", "fedkace"), ("AS8", "as8")])
def test_the_runs_in_both_precisions_are_the_kept_ones(name: str, method: str) -> None:
    run = f"{method}_overlap-4_seed-0"
    paths = [ROOT / "docs" / "results" / study / run / "summary.json" for study in ("reduced", "reduced_fp32")]
    shares = [f"{100 * json.loads(path.read_text())['average_accuracy']:.2f}" for path in paths]
    assert f"| {name} | {' | '.join(shares)} |" in (ROOT / "REPRODUCIBILITY.md").read_text()


@pytest.mark.parametrize(
    ("row", "study", "method"),
    [
        ("OFCL, 6 epochs", "reduced", "ofcl"),
        ("OFCL, 15 epochs", "reduced_ofcl15", "ofcl"),
        ("Re-Fed, 6 epochs", "reduced", "refed"),
    ],
)
def test_the_runs_of_equal_steps_are_the_kept_ones(row: str, study: str, method: str) -> None:
    shares = []
    for seed in (0, 1):
        path = ROOT / "docs" / "results" / study / f"{method}_overlap-4_seed-{seed}"
        assert json.loads((path / "config.json").read_text())["epochs"] == int(row.split()[-2])
        shares.append(f"{100 * json.loads((path / 'summary.json').read_text())['average_accuracy']:.2f}")
    assert f"| {row} | {' | '.join(shares)} |" in (ROOT / "REPRODUCIBILITY.md").read_text()


def test_the_kept_comparison_is_that_of_todays_study() -> None:
    """A runner would skip the kept runs, so the next start runs only what is missing."""
    study = load_study(ROOT / "experiments" / "studies" / "reduced.yaml", {}, ROOT / "docs" / "results")
    kept = {path.parent.name for path in study.folder.glob("*/summary.json")}
    assert kept and kept <= set(study.runs)
    assert all(Cell(name, study.runs[name]).finished for name in kept)


@pytest.mark.parametrize("run", ["quickstart", "cifar100_small"])
def test_kept_runs_are_those_of_todays_studies(run: str) -> None:
    kept = json.loads((ROOT / "docs" / "results" / run / "config.json").read_text())
    (config,) = load_study(ROOT / "experiments" / "studies" / f"{run}.yaml", {}, ROOT).runs.values()
    assert kept.items() <= config.flat().items()


def test_the_table_of_what_privacy_costs_is_that_of_its_kept_runs() -> None:
    page = (ROOT / "docs" / "privacy.md").read_text()
    runs = sorted((ROOT / "docs" / "results" / "privacy").glob("*/summary.json"))
    assert len(runs) >= 9
    for path in runs:
        last = json.loads((path.parent / "rounds.jsonl").read_text().splitlines()[-1])
        models = [accuracy for accuracy in last["global_accuracy"] if accuracy is not None]
        shown = (json.loads(path.read_text())["average_accuracy"], last["accuracy"], sum(models) / len(models))
        method, protection, _ = path.parent.name.split("_")
        row = " | ".join([f"| `{method}`", protection, *(f"{100 * value:.1f}" for value in shown)])
        assert row in page, row


def test_the_figures_of_the_page_on_speed_are_the_kept_ones() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    records = sorted((ROOT / "docs" / "results" / "bench").glob("*.json"))
    assert records
    for record in records:
        assert f"results/bench/{record.name}" in page and kept(record) in page, record.name
