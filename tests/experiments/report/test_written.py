"""What a report says about its runs beside their means: files and notes."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from support.made.results import write_run, write_study

from fedkace_flwr.errors import ResultsError
from fedkace_flwr.experiments.report.tables import study_tables
from fedkace_flwr.experiments.report.write import write_report
from fedkace_flwr.experiments.results.loading import load_results


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedKACE and ER, and FedKACE with another number of rounds."""
    folder = tmp_path_factory.mktemp("results") / "study"
    runs = {}
    for method, rounds, capacity in (("fedkace", 3, 20), ("er", 3, 20), ("fedkace", 4, 30)):
        name = f"{method}_capacity-{capacity}_seed-0"
        write_run(folder, name, [0.5, 0.6, 0.7, 0.8][:rounds], method=method, capacity=capacity)
        runs[name] = {"method": method, "capacity": capacity, "seed": 0}
    note = "One seed & *no* <ranking>."
    write_study(
        folder, runs, paper=None, axes=["method", "capacity", "seed"], keys={"capacity": ["capacity"]}, note=note
    )
    write_report([folder])
    return folder


# Notes

TOLD = ("different values of rounds, which", "O: overlap, M: capacity, T: rounds.")


def test_the_notes_of_a_study_stand_above_its_tables(study: Path) -> None:
    text = (study / "report" / "tables.md").read_text().partition("###")[0]
    assert text.splitlines()[2] == r"*One seed & \*no\* \<ranking\>.*".replace("&", r"\&")
    assert all(words in text for words in TOLD)
    assert (
        (study / "report" / "tables.tex").read_text().startswith("% One seed & *no* <ranking>.\n% The runs were made")
    )
    page = (study / "report" / "index.html").read_text().partition("<table>")[0]
    assert "One seed &amp; *no* &lt;ranking&gt;." in page and all(words in page for words in TOLD)


# Accuracy by class


def test_the_accuracy_of_each_class_is_a_table(study: Path) -> None:
    frame = pd.read_csv(study / "report" / "classes.csv")
    assert list(frame) == ["study", "run", "round", "client", "class", "accuracy"]
    own = frame[(frame["run"] == "er_capacity-20_seed-0") & (frame["client"] == 1)]
    # the made client knows class c from round c on
    assert own[["round", "class", "accuracy"]].to_numpy().tolist() == [
        [number, label, accuracy] for number, accuracy in ((1, 0.5), (2, 0.6), (3, 0.7)) for label in range(number + 1)
    ]
    again = pd.read_parquet(study / "report" / "classes.parquet")
    assert again.astype(str).equals(frame.astype(str))


def test_many_rows_are_written_as_parquet_alone_and_none_as_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, "fedkace", [0.5, 0.6])
    monkeypatch.setattr("fedkace_flwr.experiments.results.classes.MOST_ROWS", 3)
    target = tmp_path / "out"
    assert target / "classes.parquet" in write_report([tmp_path], target)
    assert not (target / "classes.csv").exists() and len(pd.read_parquet(target / "classes.parquet")) == 10
    lines = (folder / "rounds.jsonl").read_text()
    (folder / "rounds.jsonl").write_text(lines.replace("class_accuracy", "not_of_this_version"))
    write_report([tmp_path], target)
    assert not list(target.glob("classes.*"))


def test_a_damaged_record_of_classes_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedkace", [0.5])
    for damaged in ('[["much"]]', "[3]", "5"):
        lines = (folder / "rounds.jsonl").read_text()
        (folder / "rounds.jsonl").write_text(
            re.sub(r'"class_accuracy": .*?\]\],', f'"class_accuracy": {damaged},', lines)
        )
        with pytest.raises(ResultsError, match=r"rounds\.jsonl, line 1: is damaged; class_accuracy"):
            load_results(tmp_path)
        (folder / "rounds.jsonl").write_text(lines)


# Without the extra


@pytest.mark.slow
def test_a_misspelt_folder_is_named_before_what_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    program = (
        "import sys; sys.modules['pandas'] = None; from fedkace_flwr.experiments.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "report", str(tmp_path / "quikstart")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{tmp_path / 'quikstart'}: is not a folder" in done.stderr and "quickstart?" in done.stderr


# The order of rows and columns


@pytest.mark.parametrize("methods", [["fedkace"], ["fedkace", "er"]])
def test_the_values_of_an_axis_stand_in_the_order_of_their_sizes(tmp_path: Path, methods: list[str]) -> None:
    """As rows, where there is one method, and as columns beside several methods."""
    runs = {}
    for method in methods:
        for epochs in (2, 10, 5):
            runs[f"{method}_epochs-{epochs}_seed-0"] = {"method": method, "epochs": epochs, "seed": 0}
            write_run(tmp_path, f"{method}_epochs-{epochs}_seed-0", [0.5], method=method, epochs=epochs)
    write_study(tmp_path, runs, paper=None, axes=[*(["method"] if len(methods) > 1 else []), "epochs", "seed"])
    results = load_results(tmp_path)
    table = study_tables(results, results.studies[0])[0]
    shown = [name for name in (*table.rows, *table.columns) if "J=" in name]
    assert [re.sub(".*J=", "", name) for name in shown] == ["2", "5", "10"]
