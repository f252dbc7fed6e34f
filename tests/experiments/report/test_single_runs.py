"""Unfinished runs, a study's only run, and runs that tested both the local models and the global one."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from support.figures import drawn_in_panels
from support.made.results import write_run, write_study

from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.report.single_runs import only_run_table, unfinished_table
from fedkace_flwr.experiments.report.tables import ResultTable, study_tables
from fedkace_flwr.experiments.results.loading import load_results


def tables_of(folder: Path) -> dict[str, ResultTable]:
    results = load_results(folder)
    return {table.key: table for table in study_tables(results, results.studies[0])}


def with_both_models(folder: Path, local: list[float], together: list[float]) -> None:
    """Let a run of two clients have tested its local models and its global model, in each round."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line, one, other in zip(lines, local, together, strict=True):
        line |= {"local_accuracy": [one - 0.1, one + 0.1], "global_accuracy": [other] * 2}
    (folder / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_run_over_inboxes_is_named_by_them(tmp_path: Path) -> None:
    """And not by a data set and an overlap that have no effect there."""
    arriving: dict[str, Any] = {"dataset": "inbox", "class_names": "a,b", "image_size": 8}
    write_run(tmp_path, "er_0", [0.4, 0.3], method="er", **arriving)
    assert list(load_results(tmp_path / "er_0").runs["dataset"]) == ["inbox"]
    assert tables_of(tmp_path / "er_0")["aa"].columns == ["inbox"]


def test_a_run_that_tested_both_models_has_the_averages_of_each(tmp_path: Path) -> None:
    runs = {}
    for overlap in (5, 4):
        name = f"fedkace_{overlap}"
        folder = write_run(
            tmp_path, name, [0.4, 0.3], evaluate="both", dataset="cifar100", overlap=overlap, window=5, clients=2
        )
        with_both_models(folder, [0.4, 0.2], [0.1, 0.3])
        runs[name] = {"data": "cifar100", "overlap": overlap, "method": "fedkace", "seed": 0}
    write_run(tmp_path, "er_5", [0.4, 0.3], method="er", dataset="cifar100", overlap=5, window=5)
    runs["er_5"] = {"data": "cifar100", "overlap": 5, "method": "er", "seed": 0}
    write_study(tmp_path, runs)
    tables = tables_of(tmp_path)
    for key, average, papers in (("aa_local", 30.0, 24.23), ("aa_global", 20.0, 23.20)):
        assert tables[key].rows == ["FedKACE"], "ER did not test both"
        cells = [tables[key].cells["FedKACE", f"CIFAR-100, O={overlap}"] for overlap in (5, 4)]
        assert [cell.mean for cell in cells] == [pytest.approx(average)] * 2
        assert [cell.paper for cell in cells] == [papers, None], "Table 2 has O=5 and O=0 alone"


def test_averages_with_every_class_as_an_answer_follow_each_clients_switch(tmp_path: Path) -> None:
    """Of two clients the first one switches in round 3 of 4."""
    folders = [
        write_run(tmp_path, name, [0.9] * 4, method=name, evaluate="both", predict_with=inference)
        for name, inference in (("fedkace", "auto"), ("er", "mean"))
    ]
    for folder in folders:
        with_both_models(folder, [0.9] * 4, [0.9] * 4)
        lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        for line in lines:
            line |= {"local_accuracy_unmasked": [0.5, 0.3], "global_accuracy_unmasked": [0.1, 0.2]}
        (folder / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = {
        key: {row: cell.mean for (row, _), cell in table.cells.items()} for key, table in tables_of(tmp_path).items()
    }
    assert found["aa_local_unmasked"] == pytest.approx({"FedKACE": 40.0, "ER": 40.0})
    assert found["aa_global_unmasked"] == pytest.approx({"FedKACE": 15.0, "ER": 15.0})
    assert found["aa_unmasked"] == pytest.approx({"FedKACE": (40.0 + 40.0 + 20.0 + 20.0) / 4}), "ER averages its models"


def test_without_a_run_that_tested_both_models_there_are_no_tables_of_them(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [0.5, 0.5])
    assert not [key for key in tables_of(tmp_path) if key.startswith("aa_")]


def test_a_studys_only_run_has_one_table_of_its_measures(tmp_path: Path) -> None:
    """Of two clients the first one switches in round 3 of 4; training took half an hour in each round."""
    folder = write_run(
        tmp_path, "one", [0.5, 0.4, 0.3, 0.2], evaluate="both", dataset="cifar100", window=5, overlap=4, clients=2
    )
    with_both_models(folder, [0.5, 0.4, 0.2, 0.1], [0.1, 0.2, 0.3, 0.2])
    lines = (folder / "rounds.jsonl").read_text()
    (folder / "rounds.jsonl").write_text(lines.replace('"training": 1.0', '"training": 1800.0'))
    write_study(tmp_path, {"one": {"data": "cifar100", "overlap": 4, "method": "fedkace", "seed": 0}})
    results = load_results(tmp_path)
    found = only_run_table(results, results.studies[0], study_tables(results, results.studies[0]))
    assert found is not None
    title, head, rows, notes, _ = found
    assert title == "FedKACE, CIFAR-100, O=4, seed 0" and head == ["measure", "here", "paper", "difference"]
    measures = {name: values for name, *values in rows}
    assert measures["Average accuracy (AA), %"] == ["35.00", "26.74", "+8.26"]
    assert measures["Average accuracy of the global model, whichever a client predicts with, %"] == ["20.00", "-", "-"]
    assert measures["Accuracy of guessing among the classes met, %"][0] == "32.08"
    assert measures["Rounds in which clients switched to the global model"][0] == "3 (1 of 2 clients)"
    assert measures["Time of training, selection and tests, summed over clients, hours"] == ["2.0", "-", "-"]
    assert any("differ from the paper's" in note for note in notes)
    assert main(["report", str(tmp_path)]) == 0
    for name in ("tables.md", "tables.tex"):
        text = (tmp_path / "report" / name).read_text()
        assert "O=4, seed 0" in text and "(n=1)" not in text
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("<td class=word>Average accuracy (AA), %</td>") == 1 and "FedKACE, CIFAR-100, O=4, seed 0" in page


def test_the_only_run_has_no_columns_of_the_paper_and_no_switches_where_there_are_none(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [0.5, 0.4], method="er", seed=7)
    results = load_results(tmp_path)
    found = only_run_table(results, results.studies[0], study_tables(results, results.studies[0]))
    assert found is not None
    title, head, rows, _, _ = found
    assert title == "ER, digits, O=1, seed 7" and head == ["measure", "here"]
    assert not [row for row in rows if "switched" in row[0]]


@pytest.mark.parametrize("finished", [False, True])
def test_several_runs_and_an_unfinished_one_have_tables_with_a_line_each(tmp_path: Path, finished: bool) -> None:
    write_run(tmp_path, "one", [0.5, 0.4], rounds=4 - 2 * finished, finished=finished)
    if finished:
        write_run(tmp_path, "two", [0.5, 0.4], seed=1)
    results = load_results(tmp_path)
    assert only_run_table(results, results.studies[0], study_tables(results, results.studies[0])) is None


def test_an_unfinished_run_stands_beside_the_others_up_to_its_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    begun = write_run(tmp_path, "fedkace_0", [0.5, 0.3], rounds=4, finished=False, evaluate="both")
    with_both_models(begun, [0.5, 0.4], [0.1, 0.3])
    write_run(tmp_path, "er_0", [0.2, 0.4, 0.9, 0.9], method="er")
    write_run(tmp_path, "er_1", [0.9, 0.9, 0.9, 0.9], method="er", seed=1)
    write_run(tmp_path, "fedavg_0", [0.9], method="fedavg", rounds=4, finished=False)
    write_run(tmp_path, "as8_0", [], method="as8", rounds=4, finished=False)
    write_run(tmp_path, "er_0_wide", [0.9] * 4, method="er", overlap=0)
    results = load_results(tmp_path)
    found = unfinished_table(results, results.studies[0])
    assert found is not None
    _, head, rows, notes, _ = found
    assert head[3:] == ["rounds", "AA %", "local models %", "global model %", "chance %", "latest round %"]
    chance = f"{100 * (1 / 2 + 1 / 3) / 2:.2f}"
    assert rows == [
        ["FedKACE", "digits, O=1", "0", "2 of 4", "40.00", "45.00", "20.00", chance, "30.00"],
        ["ER", "digits, O=1", "0", "first 2", "30.00", "-", "-", chance, "40.00"],
        ["FedAVG", "digits, O=1", "0", "1 of 4", "90.00", "-", "-", "50.00", "90.00"],
        ["ER", "digits, O=1", "0", "first 1", "20.00", "-", "-", "50.00", "20.00"],
        ["FedKACE", "digits, O=1", "0", "first 1", "50.00", "50.00", "10.00", "50.00", "50.00"],
    ]
    assert "not finished" in notes[0]
    assert main(["report", str(tmp_path)]) == 0
    assert "Unfinished runs" in (tmp_path / "report" / "tables.md").read_text()
    assert "Unfinished runs" in (tmp_path / "report" / "index.html").read_text()
    panel = {"digits, O=1": ["ER", "FedAVG (unfinished)", "FedKACE (unfinished)", "chance"]}
    assert drawn_in_panels(saved[-1]) == panel
    assert saved[-1].axes[0].get_xlim()[1] < 3, "all lines end with the unfinished ones"


def test_a_single_line_is_drawn_beside_the_models_that_it_chooses_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    with_both_models(write_run(tmp_path, "one", [0.5, 0.3], evaluate="both"), [0.5, 0.4], [0.1, 0.3])
    write_run(tmp_path, "two", [0.5, 0.3], overlap=0)
    assert main(["report", str(tmp_path)]) == 0
    assert drawn_in_panels(saved[0]) == {
        "digits, O=1": ["FedKACE", "chance", "global model", "local models"],
        "digits, O=0": ["FedKACE", "chance"],
    }
