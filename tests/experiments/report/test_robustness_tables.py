"""The tables of hostile clients, worked by hand, and those of the documents."""

import json
from pathlib import Path

import pytest
from support.made.results import write_run, write_study

from fedkace_flwr.errors import ResultsError
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.report.robustness import honest_accuracies, robustness_tables

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two rules, two seeds, with and without an attack; the last client of two is hostile, and always wrong."""
    folder, runs = tmp_path / "poisoning", {}
    honest = {
        ("default", "none", 0): 0.80,
        ("default", "none", 1): 0.90,
        ("default", "noise", 0): 0.79,
        ("default", "noise", 1): 0.86,
        ("median", "none", 0): 0.70,
        ("median", "noise", 0): 0.75,
    }
    for (rule, attack, seed), value in honest.items():
        name = f"{rule}_{attack}_{seed}"
        runs[name] = {"federation": "1-of-2", "aggregation": rule, "attack": attack, "seed": seed}
        path = write_run(folder, name, [value - 0.1, value + 0.1], seed=seed, clients=2)
        records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
        for record in records:
            record["client_accuracy"] = [record["accuracy"], 0.0]
        (path / "rounds.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    write_study(folder, runs, study="poisoning", axes=["federation", "aggregation", "attack", "seed"], paper=None)
    return folder


def test_a_table_worked_by_hand(study: Path) -> None:
    assert robustness_tables(honest_accuracies(study)).splitlines() == [
        "| 1-of-2 | default | median |",
        "|---|---:|---:|",
        "| none | 85.0 | 70.0 |",
        "| noise | 82.5 (-2.5 ± 2.1) | 75.0 (+5.0) |",  # differences of 1 and 4 points with the same seed
        "| largest loss | -2.5 | +5.0 |",
    ]


def test_the_file_gives_the_same_table_as_the_runs(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["robustness", str(study), "--output", str(tmp_path / "runs.csv")]) == 0
    first = capsys.readouterr().out
    assert main(["robustness", str(tmp_path / "runs.csv")]) == 0
    assert capsys.readouterr().out == first
    assert honest_accuracies(tmp_path / "runs.csv")["final"].tolist() == pytest.approx([89, 96, 90, 100, 85, 80])


def test_several_sources_are_joined(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = honest_accuracies(study)
    for name, part in (("one.csv", whole[:4]), ("two.csv", whole[2:])):
        part.to_csv(tmp_path / name, index=False)
    assert honest_accuracies(tmp_path / "two.csv", tmp_path / "one.csv").equals(whole)
    assert main(["robustness", str(tmp_path / "one.csv"), str(study)]) == 0
    assert capsys.readouterr().out.strip() == robustness_tables(whole)


def test_sources_that_disagree_are_refused_in_one_line(study: Path, tmp_path: Path) -> None:
    other = honest_accuracies(study)
    other.loc[other["attack"] == "noise", "final"] += 1
    other.to_csv(tmp_path / "other.csv", index=False)
    message = r"other\.csv: 1-of-2 default noise 0: final = 90 and 89 in this and an earlier source"
    with pytest.raises(ResultsError, match=message):
        honest_accuracies(study, tmp_path / "other.csv")


@pytest.mark.parametrize("seed", [0, 1])
def test_runs_that_a_sweep_has_added_are_refused_in_one_line(seed: int, study: Path) -> None:
    """Also those of another seed, over which a mean would be taken."""
    write_run(study, "default_none_epochs-9_0", [0.5, 0.5], epochs=9, seed=seed)
    told = json.loads((study / "study.json").read_text())
    label = {"federation": "1-of-2", "aggregation": "default", "attack": "none", "epochs": 9, "seed": seed}
    told["runs"]["default_none_epochs-9_0"] = label
    (study / "study.json").write_text(json.dumps(told))
    with pytest.raises(ResultsError, match="poisoning: its runs also differ in epochs; move those with other values"):
        honest_accuracies(study)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "federation,aggregation,attack,seed,aa,final\na,b,c,x,1,2\n"])
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(ResultsError, match=r"runs\.csv: is not a table of the study poisoning"):
        honest_accuracies(tmp_path / "runs.csv")


def test_the_document_shows_the_kept_runs() -> None:
    kept = honest_accuracies(ROOT / "docs" / "results" / "poisoning" / "digits.csv")
    assert robustness_tables(kept) in (ROOT / "docs" / "robustness.md").read_text()
