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
    ("borrowers", "study"),
    [
        (["table3", "figure3"], "table2"),
        (["figure2"], "table1"),
        ([], "table4"),
        ([], "gradient_cost"),
        ([], "readings"),
        ([], "landmarks"),
        ([], "reduced"),
        ([], "privacy"),
        ([], "fedframe"),
        ([], "poisoning"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_study_runs_at_its_smallest_scale_to_its_table(
    borrowers: list[str],
    study: str,
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

    for name in borrowers:
        path = ROOT / "experiments" / "studies" / f"{name}.yaml"
        borrowed = load_study(path, {}, tmp_path, **options)
        assert set(run_study(borrowed, Console(width=200)).summaries) <= set(outcome.summaries)
        assert "starting" not in capsys.readouterr().out

    written = write_report([loaded.folder], tmp_path / "report")
    assert (tmp_path / "report" / "index.html") in written
    table = (tmp_path / "report" / "tables.md").read_text()
    runs = pandas.read_csv(tmp_path / "report" / "runs.csv")
    assert len(runs) == len(loaded.runs) and runs["finished"].all()
    assert "FedKACE" in table and "chance" in table
    if "table3" in borrowers:
        assert "Condition number" in table
    pictures = {path.name for path in written if path.suffix == ".png"}
    for name in borrowers:
        assert not name.startswith("figure") or f"{name}.png" in pictures
