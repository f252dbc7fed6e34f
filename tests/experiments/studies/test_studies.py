"""Every study of the repository runs at its smallest scale, to its table or figure."""

from pathlib import Path
from typing import Any

import pandas
import pytest
from rich.console import Console
from support.systems.engines import InProcessEngine

from fedkace_flwr.experiments.report.write import write_report
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.runner import run_study
from fedkace_flwr.experiments.studies.study import load_study

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("study", "figure"),
    [
        ("table1", "figure2.png"),
        ("table2", "figure3.png"),
        ("table4", ""),
        ("gradient_cost", ""),
        ("readings", ""),
        ("landmarks", ""),
        ("reduced", ""),
        ("privacy", ""),
        ("fedframe", ""),
        ("poisoning", ""),
        ("labels", ""),
    ],
)
def test_a_study_runs_at_its_smallest_scale_to_its_table(
    study: str,
    figure: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    # One seed, but for one study whose tables average over seeds.
    options: dict[str, Any] = {"scale": "smoke", "engine": "inline", "workers": 2}
    options["seeds"] = () if study == "table1" else [0]
    loaded = load_study(ROOT / "experiments" / "studies" / f"{study}.yaml", {}, tmp_path, **options)
    outcome = run_study(loaded, Console(width=200))
    assert outcome.failures == {}
    assert list(outcome.summaries) == list(loaded.runs)
    begun = capsys.readouterr().out.count("starting")
    assert begun == len(loaded.runs)

    written = write_report([loaded.folder], tmp_path / "report")
    assert (tmp_path / "report" / "index.html") in written
    table = (tmp_path / "report" / "tables.md").read_text()
    runs = pandas.read_csv(tmp_path / "report" / "runs.csv")
    assert len(runs) == len(loaded.runs) and runs["finished"].all()
    assert "FedKACE" in table and "chance" in table
    if study == "table2":
        assert "Condition number" in table
    assert not figure or figure in {path.name for path in written}


def test_the_backbone_of_one_study_is_where_the_next_one_expects_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    monkeypatch.chdir(tmp_path)
    for name, only in (("backbone", ()), ("backbones", ("afl-output", "fedframe-lora"))):
        path = ROOT / "experiments" / "studies" / f"{name}.yaml"
        loaded = load_study(path, {}, Path("results"), scale="smoke", engine="inline", only=only)
        assert run_study(loaded, Console(width=200)).failures == {}
