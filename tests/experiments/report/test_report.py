"""The report: tables worked out by hand, the paper's numbers, the command."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.made.results import write_run, write_study

from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.report.paper import paper, paper_row, printed
from fedkace_flwr.experiments.report.tables import Cell, ResultTable, long_frame, study_notes, study_tables
from fedkace_flwr.experiments.results.loading import load_results
from fedkace_flwr.storage.targets import MARK


def tables_of(folder: Path) -> dict[str, ResultTable]:
    results = load_results(folder)
    return {table.key: table for table in study_tables(results, results.studies[0])}


# The paper


def test_the_papers_regrets_follow_from_its_accuracies_but_for_the_slips() -> None:
    slips = {(slip["table"], slip["row"], slip["column"]): slip for slip in paper()["slips"]}
    for table in ("table1", "table2", "table4"):
        for row, columns in paper()[table].items():
            for column, cell in columns.items():
                derived = round(paper()[table]["Centralized"][column]["AA"] - cell["AA"], 2)
                slip = slips.get((table, row, column))
                if slip is None:
                    assert cell["AR"] == pytest.approx(derived, abs=0.0101), (table, row, column)
                else:
                    assert (cell["AR"], derived) == (slip["printed"], slip["derived"])
    assert len(slips) == 2


def test_a_run_finds_its_row_in_each_of_the_papers_tables() -> None:
    cells = {
        ("table1", "refed", 10, "cifar100_O4", "AA"): 7.29,
        ("table2", "fedkace", 10, "cifar100_O0", "AR"): 14.23,
        ("table3", "as5", 10, "imagenet100_O0", "condition"): 396.8,
        ("table4", "fedkace", 20, "cifar100_O5", "AA"): 27.07,
        ("table1", "er", 10, "cifar100_O4", "AA"): None,
        ("table1", "fedkace", 10, "digits_O4", "AA"): None,
    }
    for (table, method, clients, column, metric), number in cells.items():
        row = paper_row(table, {"method": method, "clients": clients, "capacity": 1000})
        assert printed(table, row, column, metric) == number


# Tables


def test_mean_deviation_and_the_papers_difference_worked_by_hand(tmp_path: Path) -> None:
    runs = {}
    for seed, level in ((0, 0.25), (1, 0.27), (2, 0.29)):
        write_run(tmp_path, f"fedkace_{seed}", [level] * 2, dataset="cifar100", overlap=4, window=5, seed=seed)
        runs[f"fedkace_{seed}"] = {"data": "cifar100", "overlap": 4, "method": "fedkace", "seed": seed}
    write_run(tmp_path, "centralized_0", [0.5] * 2, method="centralized", dataset="cifar100", overlap=4, window=5)
    runs["centralized_0"] = {"data": "cifar100", "overlap": 4, "method": "centralized", "seed": 0}
    write_run(tmp_path, "er_0", [0.2] * 2, method="er", dataset="cifar100", overlap=0, window=5)
    runs["er_0"] = {"data": "cifar100", "overlap": 0, "method": "er", "seed": 0}
    runs["ofcl_0"] = {"data": "cifar100", "overlap": 4, "method": "ofcl", "seed": 0}
    write_run(
        tmp_path, "ofcl_0", [0.9], method="ofcl", rounds=2, dataset="cifar100", overlap=4, window=5, finished=False
    )
    write_study(tmp_path, runs)
    tables = tables_of(tmp_path)
    accuracy = tables["aa"]
    assert accuracy.rows == ["FedKACE", "OFCL", "ER", "Centralized", "chance"]
    assert accuracy.columns == ["CIFAR-100, O=4", "CIFAR-100, O=0"]
    cell = accuracy.cells[("FedKACE", "CIFAR-100, O=4")]
    assert (cell.n, cell.paper) == (3, 26.74)
    assert cell.mean == pytest.approx(27.0) and cell.sd == pytest.approx(2.0) and cell.difference == pytest.approx(0.26)
    regret = tables["ar"].cells[("FedKACE", "CIFAR-100, O=4")]
    assert (regret.n, regret.sd, regret.paper) == (1, None, 21.73)  # only seed 0 has its Centralized
    assert regret.mean == pytest.approx(25.0)
    assert ("OFCL", "CIFAR-100, O=4") not in accuracy.cells  # means leave out unfinished runs
    chance = accuracy.cells[("chance", "CIFAR-100, O=4")]
    assert chance.mean == pytest.approx(100 * (1 / 2 + 1 / 3) / 2) and chance.n == 3
    text = accuracy.text().markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == "| method | CIFAR-100, O=4 | paper | difference | CIFAR-100, O=0 | paper | difference |"
    assert lines[2] == "| FedKACE | 27.00 ± 2.00 (n=3) | 26.74 | +0.26 | - | - | - |"
    assert lines[3] == "| OFCL | - | - | - | - | - | - |"  # the paper's number stands beside ours or not at all
    assert lines[4] == "| ER | - | - | - | 20.00 (n=1) | - | - |"
    assert "5 of 6 runs are finished" in text
    assert "clients 2 (paper 10)" in text and "capacity 20 (paper 1000)" in text and "batch-size" not in text
    assert r"FedKACE & 27.00 $\pm$ 2.00 (n=3) & 26.74 & +0.26 & - & - & - \\" in accuracy.text().latex()
    frame: Any = long_frame([accuracy]).set_index(["row", "column"])
    assert frame.loc[("FedKACE", "CIFAR-100, O=4"), "difference"] == pytest.approx(0.26)
    assert frame.loc[("FedKACE", "CIFAR-100, O=0"), "n"] == 0 and math.isnan(
        frame.loc[("FedKACE", "CIFAR-100, O=0"), "mean"]
    )


def test_a_network_and_an_optimiser_other_than_the_papers_are_named(tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "network": "cnn1d",
        "learning_rate": 0.1,
        "batch_size": 8,
        "optimiser": "sgd",
        "weight_decay": 0.0,
    }
    write_run(tmp_path, "a", [0.2], dataset="cifar100", overlap=4, window=5, width=8, **own)
    write_study(tmp_path, {"a": {"data": "cifar100", "overlap": 4, "method": "fedkace", "seed": 0}})
    note = tables_of(tmp_path)["aa"].notes[-1]
    for words in (
        *("network cnn1d (paper resnet18)", "width 8 (paper 16)", "optimiser sgd (paper adamw)"),
        *("batch-size 8 (paper 32)", "learning-rate 0.1 (paper 0.01)", "weight-decay 0.0 (paper 0.001)"),
    ):
        assert words in note


def test_chance_is_left_out_where_runs_of_a_column_and_seed_disagree(tmp_path: Path) -> None:
    for window, share in ((2, 0.5), (3, 0.25)):
        folder = write_run(tmp_path, f"fedkace_{window}", [0.6], window=window)
        lines = (folder / "rounds.jsonl").read_text()
        (folder / "rounds.jsonl").write_text(lines.replace('"chance": 0.5', f'"chance": {share}'))
        write_run(tmp_path, f"fedkace_{window}_apart", [0.6], window=window, overlap=0)
    table = tables_of(tmp_path)["aa"]
    assert table.rows == ["W=2", "W=3", "chance"]
    assert ("chance", "digits, O=1") not in table.cells and table.cells["chance", "digits, O=0"].mean == 50
    assert table.notes == ("Chance is left out where it differs between runs with the same seed.",)


def test_a_row_without_regret_says_why(tmp_path: Path) -> None:
    write_run(tmp_path, "fedkace", [0.2])
    write_run(tmp_path, "er", [0.2], method="er", epochs=1)
    write_run(tmp_path, "centralized", [0.4], method="centralized")
    write_study(
        tmp_path, {name: {"method": name, "seed": 0} for name in ("fedkace", "er", "centralized")}, paper=None, keys={}
    )
    tables = tables_of(tmp_path)
    assert any(note.startswith("Without AR: ER. It needs") for note in tables["ar"].notes)
    assert not any("AR" in note for note in tables["aa"].notes)


def test_table_4_has_clients_and_capacity_as_rows_and_its_slip_is_named(tmp_path: Path) -> None:
    runs = {}
    for name, clients, capacity in (("a", 10, 500), ("b", 10, 2000), ("c", 20, 1000)):
        write_run(tmp_path, name, [0.2], clients=clients, capacity=capacity, dataset="imagenet100", overlap=0)
        runs[name] = {"data": "imagenet100", "overlap": 0, "clients": clients, "capacity": capacity, "seed": 0}
        write_run(
            tmp_path, f"{name}-top", [0.3], method="centralized", clients=clients, dataset="imagenet100", overlap=0
        )
    write_study(tmp_path, runs, paper="table4", axes=["data", "overlap", "clients", "capacity", "seed"])
    tables = tables_of(tmp_path)
    assert tables["aa"].rows == ["K=10, M=500", "K=10, M=2000", "K=20, M=1000", "chance"]
    papers = {row: cell.paper for (row, _), cell in tables["aa"].cells.items()}
    assert papers == {"K=10, M=500": 20.11, "K=10, M=2000": 24.19, "K=20, M=1000": 22.69, "chance": None}
    assert "ar" not in tables  # the study does not list the Centralized runs


def test_variants_of_methods_are_rows(tmp_path: Path) -> None:
    runs = {}
    for variant, method, level in (
        ("fedkace", "fedkace", 0.3),
        ("fedkace-parts", "fedkace", 0.4),
        ("wide", "er", 0.2),
        ("fedavg", "fedavg", 0.1),
    ):
        for overlap in (1, 0):
            name = f"{variant}_{overlap}"
            write_run(tmp_path, name, [level] * 2, method=method, overlap=overlap, window=5)
            runs[name] = {"overlap": overlap, "variant": variant, "method": method, "seed": 0}
    write_study(tmp_path, runs, paper=None, axes=["overlap", "variant", "method", "seed"])
    table = tables_of(tmp_path)["aa"]
    assert table.rows == ["FedKACE", "FedKACE-parts", "FedAVG", "ER (wide)", "chance"]
    assert table.columns == ["digits, O=1", "digits, O=0"]
    assert table.cells[("FedKACE-parts", "digits, O=0")].mean == pytest.approx(40)
    assert len(table.cells) == 10


def test_an_axis_that_all_methods_share_makes_columns(tmp_path: Path) -> None:
    runs = {}
    for method, size in (("fedkace", "small"), ("er", "small"), ("fedkace", "large")):
        name = f"{method}_{size}"
        write_run(tmp_path, name, [0.3] * 2, method=method, overlap=1)
        runs[name] = {"size": size, "method": method, "seed": 0}
    write_study(tmp_path, runs, paper=None, axes=["size", "method", "seed"])
    table = tables_of(tmp_path)["aa"]
    assert (table.rows, table.columns) == (
        ["FedKACE", "ER", "chance"],
        ["digits, O=1, size=large", "digits, O=1, size=small"],
    )


def test_an_interpolated_reference_is_said_to_be_one(tmp_path: Path) -> None:
    write_run(tmp_path, "fedkace", [0.2, 0.3])
    assert not tables_of(tmp_path)["aa"].notes
    folder = write_run(tmp_path, "centralized", [0.4, 0.5], method="centralized")
    lines = (folder / "rounds.jsonl").read_text()
    (folder / "rounds.jsonl").write_text(lines.replace('"interpolated": false', '"interpolated": true', 1))
    tables = tables_of(tmp_path)
    assert any("interpolated" in note for note in tables["ar"].notes)
    assert not any("interpolated" in note for note in tables["final"].notes)


def test_the_slip_is_named_where_its_cell_is_shown(tmp_path: Path) -> None:
    runs = {}
    for method in ("refed", "centralized"):
        write_run(tmp_path, method, [0.2], method=method, dataset="cifar100", overlap=4, window=5)
        runs[method] = {"data": "cifar100", "overlap": 4, "method": method, "seed": 0}
    write_study(tmp_path, runs)
    tables = tables_of(tmp_path)
    assert any("prints 41.08 for Re-Fed" in note and "41.18" in note for note in tables["ar"].notes)
    assert not any("41.08" in note for note in tables["aa"].notes)


def test_condition_numbers_stand_beside_table_3_in_the_ablation_study(tmp_path: Path) -> None:
    write_run(tmp_path, "fedkace", [0.2] * 4, dataset="cifar100", overlap=5, window=5)
    labels = {"data": "cifar100", "overlap": 5, "method": "fedkace", "seed": 0}
    write_study(tmp_path, {"fedkace": labels}, study="table2", paper="table2")
    tables = tables_of(tmp_path)
    cell = tables["condition"].cells[("FedKACE", "CIFAR-100, O=5")]
    assert cell.mean == pytest.approx(300.0) and cell.paper == 1593.4
    assert any("AS6, AS7 and FedKACE" in note for note in tables["condition"].notes)
    assert tables["class_condition"].cells[("FedKACE", "CIFAR-100, O=5")].paper == 1593.4
    assert "Singular matrices, which count as infinite: FedKACE, CIFAR-100, O=5: 50.0 %." in (
        tables["class_condition"].notes
    )
    assert tables["aa"].cells[("FedKACE", "CIFAR-100, O=5")].paper == 26.59


def test_a_study_of_no_table_of_the_paper_has_no_papers_column(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [0.5])
    write_run(tmp_path, "two", [0.7], overlap=0)
    table = tables_of(tmp_path)["aa"]
    assert not table.with_paper
    assert table.rows == ["FedKACE", "chance"] and table.columns == ["digits, O=1", "digits, O=0"]
    assert "paper" not in table.text().markdown()


def test_a_readings_study_has_its_readings_as_rows(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [0.5])
    write_run(tmp_path, "two", [0.7], batching="paired")
    table = tables_of(tmp_path)["aa"]
    assert (table.head, table.rows) == ("setting", ["batching=paired", "batching=union", "chance"])


def test_a_study_of_one_method_has_its_settings_as_rows(tmp_path: Path) -> None:
    runs = {}
    for reading in ("plain", "paired"):
        name = f"fedkace_{reading}"
        write_run(tmp_path, name, [0.5], batching="paired" if reading == "paired" else "union")
        runs[name] = {"reading": reading, "method": "fedkace", "overlap": 1, "seed": 0}
    axes = ["reading", "overlap", "method", "seed"]
    write_study(tmp_path, runs, paper=None, axes=axes)
    results = load_results(tmp_path)
    tables = study_tables(results, results.studies[0])
    assert tables[0].head == "setting" and tables[0].columns == ["digits, O=1"]
    assert tables[0].rows == ["reading=paired", "reading=plain", "chance"]
    assert "All runs are of FedKACE." in study_notes(results.studies[0], tables)
    write_run(tmp_path, "top", [0.9], method="centralized")  # a reference is one for each setting
    runs["top"] = {"reading": "plain", "method": "centralized", "overlap": 1, "seed": 0}
    write_study(tmp_path, runs, paper=None, axes=axes)
    table = tables_of(tmp_path)["aa"]
    assert table.columns == ["digits, O=1, reading=paired", "digits, O=1, reading=plain"]
    assert table.rows == ["FedKACE", "Centralized", "chance"]


def test_a_cell_of_one_seed_has_no_deviation() -> None:
    table = ResultTable("s", "aa", "AA", "method", ["m"], ["c"], {("m", "c"): Cell(12.0, None, 1)})
    assert "| m | 12.00 (n=1) |" in table.text().markdown()


# The command


@pytest.mark.slow
def test_the_command_writes_everything_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "compare"
    for method, accuracy in (("fedkace", 0.6), ("er", 0.5), ("as4", 0.55), ("centralized", 0.8)):
        write_run(study, method, [accuracy, accuracy], method=method)
    assert main(["report", str(study)]) == 0
    printed = capsys.readouterr().out
    names = {path.name for path in (study / "report").iterdir()} - {MARK}
    assert names == {
        *("index.html", "runs.csv", "runs.parquet", "rounds.csv", "rounds.parquet", "classes.csv", "classes.parquet"),
        *(
            "tables.md",
            "tables.tex",
            "tables.csv",
            "paired.csv",
            "figure2.png",
            "figure2.svg",
            "figure3.png",
            "figure3.svg",
        ),
    }
    assert all(f"report/{name}" in printed for name in names)
    assert "| FedKACE | 20.00 (n=1) |" in (study / "report" / "tables.md").read_text()
    assert pd.read_csv(study / "report" / "tables.csv")["n"].max() == 1
    text = (study / "report" / "index.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert main(["report", str(study), "--output", str(tmp_path / "again")]) == 0  # its own output is no run
    for name in ("figure2.svg", "figure3.png", "tables.md"):
        assert (tmp_path / "again" / name).read_bytes() == (study / "report" / name).read_bytes()


@pytest.mark.slow
def test_without_its_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['plotly'] = None; from fedkace_flwr.experiments.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "report needs plotly: pip install 'fedkace-flwr[report]'" in done.stderr


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "s", "a", [0.5])
    (tmp_path / "s" / "a" / "config.json").write_text("{")
    assert main(["report", str(tmp_path / "s")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 's' / 'a' / 'config.json'}: is damaged") and error.count("\n") == 1
