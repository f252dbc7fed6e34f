"""Differences between methods over the same seeds, worked by hand and read from a report."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest
from support.made.results import add_to_environment, write_run, write_study

from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.report.paired import compare, difference_table, paired_differences
from fedkace_flwr.experiments.results.loading import load_results
from fedkace_flwr.seeding import seed_for


def study(folder: Path, **levels: list[float]) -> Path:
    """Runs of methods whose average accuracies by seed these are."""
    runs = {}
    for method, accuracies in levels.items():
        for seed, accuracy in enumerate(accuracies):
            name = f"{method}_seed-{seed}"
            write_run(folder, name, [accuracy], method=method, seed=seed)
            runs[name] = {"data": "digits", "overlap": 1, "method": method, "seed": seed}
    write_study(folder, runs, paper=None)
    return folder


def found(folder: Path) -> pd.DataFrame:
    results = load_results(folder)
    return paired_differences(results, results.studies[0])


def test_runs_are_paired_by_seed_and_compared_with_fedkace(tmp_path: Path) -> None:
    differences = found(
        study(tmp_path / "s", er=[0.5, 0.7, 0.6], fedkace=[0.6, 0.75], centralized=[0.9, 0.9], as4=[0.6])
    )
    assert len(differences) == 1  # AS4 has one seed, and Centralized is what regret compares with
    only = differences.iloc[0]
    assert (only["line"], only["baseline"], only["column"]) == ("ER", "FedKACE", "digits, O=1")
    assert (only["mean"], only["n"], only["p"]) == (pytest.approx(-7.5), 2, 0.5)


def test_settings_are_compared_with_the_first_row_of_the_tables(tmp_path: Path) -> None:
    """And not with the first name by letters, which is capacity=100."""
    for capacity in (20, 60, 100):
        for seed in (0, 1):
            write_run(tmp_path, f"{capacity}_{seed}", [capacity / 200], seed=seed, capacity=capacity)
    differences = found(tmp_path)
    assert differences[["line", "baseline"]].to_numpy().tolist() == [["M=60", "M=20"], ["M=100", "M=20"]]
    assert differences["same_stream"].all()
    assert "runs with the same seed have the same stream" in difference_table(differences).notes[0]


@pytest.mark.parametrize("differing", ["window", "digest"])
def test_streams_that_differ_are_not_said_to_be_the_same(tmp_path: Path, differing: str) -> None:
    for value in (2, 3):
        for seed in (0, 1):
            window: dict[str, Any] = {"window": value} if differing == "window" else {}
            folder = write_run(tmp_path, f"{value}_{seed}", [value / 10], seed=seed, method=f"as{value}", **window)
            add_to_environment(folder, files={"dataset": f"{value}" if differing == "digest" else "same"})
    runs = {
        f"{value}_{seed}": {"size": value, "method": "fedkace", "seed": seed} for value in (2, 3) for seed in (0, 1)
    }
    write_study(tmp_path, runs, paper=None, axes=["size", "method", "seed"])
    differences = found(tmp_path)
    assert not differences["same_stream"].any()
    assert "runs with the same seed do not all have the same stream" in difference_table(differences).notes[0]


def test_p_is_that_of_signs_where_all_have_the_same_sign() -> None:
    for count in (2, 3, 6):
        _, _, p = compare([float(number) for number in range(1, count + 1)])
        assert p == pytest.approx(binomtest(count, count).pvalue)


def test_the_interval_of_two_and_of_three_differences_by_hand() -> None:
    """Tables of Student's t have 12.706 for one degree of freedom and 4.303 for two; the standard errors are 2.5 and 1."""
    assert compare([-10.0, -5.0])[:2] == pytest.approx((-7.5 - 31.766, -7.5 + 31.766), abs=0.001)
    assert compare([5.0, 5.0 + 3**0.5, 5.0 - 3**0.5])[:2] == pytest.approx((5 - 4.303, 5 + 4.303), abs=0.001)


@pytest.mark.slow
def test_of_many_samples_about_95_in_100_have_the_true_mean_in_their_interval() -> None:
    draws = np.random.default_rng(seed_for(0, "coverage")).normal(3.0, 2.0, size=(2000, 3))
    held = sum(low <= 3.0 <= high for low, high, _ in map(compare, draws))
    assert 0.93 < held / len(draws) < 0.97


def test_equal_runs_differ_by_nothing_and_have_no_p() -> None:
    low, high, p = compare([0.0, 0.0, 0.0])
    assert (low, high) == (0.0, 0.0) and np.isnan(p)
    assert compare([2.0, 2.0])[:2] == (2.0, 2.0)


def test_too_few_seeds_are_said_to_be_too_few(tmp_path: Path) -> None:
    few = found(study(tmp_path / "few", er=[0.5, 0.6, 0.7], fedkace=[0.6, 0.7, 0.9]))
    assert "With 3 seeds, p is at least 0.25" in difference_table(few).notes[1]
    many = found(study(tmp_path / "many", er=[0.5] * 6, fedkace=[0.6, 0.7, 0.9, 0.8, 0.7, 0.6]))
    assert len(difference_table(many).notes) == 1


def test_every_part_of_the_report_has_them(tmp_path: Path) -> None:
    folder = study(tmp_path / "s", er=[0.5, 0.7], fedkace=[0.6, 0.75])
    assert main(["report", str(folder)]) == 0
    report = folder / "report"
    assert "| --- | --- | ---: | ---: | ---: | ---: |" in (report / "tables.md").read_text()  # words on the left
    assert "| ER | FedKACE | -7.50 | -39.27 to +24.27 | 0.500 | 2 |" in (report / "tables.md").read_text()
    assert "ER & FedKACE & -7.50" in (report / "tables.tex").read_text()
    line = pd.read_csv(report / "paired.csv").iloc[0]
    assert (line["line"], line["baseline"], line["mean"], line["n"]) == ("ER", "FedKACE", pytest.approx(-7.5), 2)
    page = (report / "index.html").read_text()
    assert "Differences in AA over the same seeds" in page and ">-39.27 to +24.27" in page


def test_one_seed_has_no_differences(tmp_path: Path) -> None:
    folder = study(tmp_path / "s", er=[0.5], fedkace=[0.6])
    assert found(folder).empty
    assert main(["report", str(folder)]) == 0
    assert "Differences in AA" not in (folder / "report" / "tables.md").read_text()
    assert (
        folder / "report" / "paired.csv"
    ).read_text() == "study,column,line,baseline,mean,low,high,p,n,same_stream\n"
