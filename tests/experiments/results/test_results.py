"""Results folders as tables, on folders small enough to work out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.made.results import add_to_environment, made_round, write_run, write_study

from fedkace_flwr.errors import ResultsError
from fedkace_flwr.experiments.report.figures import curves_of
from fedkace_flwr.experiments.report.paired import paired_differences
from fedkace_flwr.experiments.report.tables import place, study_tables
from fedkace_flwr.experiments.results.loading import Results, load_results, rows_of
from fedkace_flwr.experiments.results.reading import SCHEMA
from fedkace_flwr.experiments.results.summary_table import find_runs

KEPT = Path(__file__).resolve().parents[3] / "docs" / "results"


def row(results: Results, run: str) -> dict[str, Any]:
    return dict(results.runs.set_index("run").loc[run])


def refusal(folder: Path) -> str:
    """The one line with which a folder is refused."""
    with pytest.raises(ResultsError) as caught:
        load_results(folder)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


# Runs and rounds


def test_a_run_is_summed_up_as_worked_by_hand(tmp_path: Path) -> None:
    write_run(tmp_path, "fedkace_seed-3", [0.2, 0.4, 0.6, 0.8], seed=3)
    results = load_results(tmp_path)
    run = row(results, "fedkace_seed-3")
    assert run["finished"] and run["rounds_done"] == 4
    assert run["aa"] == pytest.approx(0.5)
    assert (run["early"], run["late"], run["final"]) == (0.2, pytest.approx(0.7), 0.8)
    assert run["chance"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4)
    assert (run["condition"], run["condition_singular"]) == (300, 0)  # rounds 2 to 4 of 4: 200, 300, 400
    # One client's are 20, 30 and 40, the other's infinite.
    assert (run["class_condition"], run["class_condition_singular"]) == (math.inf, 0.5)
    assert set(results.rounds["switched"]) == {0, 1}
    assert (run["switched"], run["failures"], run["bytes_down"], run["bytes_up"]) == (1, 0, 4000, 2000)
    assert (run["seconds_round"], run["seed"], run["window"], run["method"]) == (8.0, 3, 2, "fedkace")
    assert run["env.python"] == "3.11.7"
    assert math.isnan(run["ar"])  # nothing to compare with
    assert set(results.runs["schema"]) == set(results.rounds["schema"]) == {SCHEMA}
    third = results.rounds.set_index("round").loc[3]
    assert third["local_accuracy"] == third["global_accuracy"] == 0.6  # of one client each
    assert third["gap"] == pytest.approx(0.3)
    assert third["replay_weight"] == pytest.approx(5.0)  # of 2 and 8; the first epoch's 1 is none
    assert third["condition_number"] == 300.0


def test_a_method_without_a_switch_has_no_number_of_switched_clients(tmp_path: Path) -> None:
    write_run(tmp_path, "er", [0.2] * 4, method="er")
    write_run(tmp_path, "centralized", [0.2] * 4, method="centralized")
    write_run(tmp_path, "fedkace", [0.2] * 4)
    write_run(tmp_path, "as3", [0.2] * 4, method="as3", predict_with="local")
    results = load_results(tmp_path)
    told = results.runs.set_index("run")["switched"]
    assert told["fedkace"] == 1 and told.drop("fedkace").isna().all()
    assert results.rounds.loc[results.rounds["run"] == "er", "switched"].isna().all()


def test_regret_is_against_centralized_of_the_same_stream_and_seed(tmp_path: Path) -> None:
    write_run(tmp_path, "centralized_o-1_seed-0", [0.9, 0.8], method="centralized")
    write_run(tmp_path, "centralized_o-1_seed-1", [1.0, 1.0], method="centralized", seed=1)
    write_run(tmp_path, "fedkace_o-1_seed-0", [0.5, 0.6])
    write_run(tmp_path, "fedkace_o-1_seed-1", [0.5, 0.6], seed=1)
    write_run(tmp_path, "fedkace_o-0_seed-0", [0.5, 0.6], overlap=0)
    write_run(tmp_path, "fedkace_epochs", [0.5, 0.6], epochs=5)  # Centralized was trained with 3
    write_run(tmp_path, "fedkace_capacity", [0.7, 0.7], capacity=15)  # of which Centralized knows nothing
    results = load_results(tmp_path)
    assert row(results, "fedkace_o-1_seed-0")["ar"] == pytest.approx(0.3)  # (0.4 + 0.2) / 2
    assert row(results, "fedkace_o-1_seed-1")["ar"] == pytest.approx(0.45)
    assert row(results, "fedkace_capacity")["ar"] == pytest.approx(0.15)
    assert row(results, "centralized_o-1_seed-0")["ar"] == 0.0
    for name in ("fedkace_o-0_seed-0", "fedkace_epochs"):
        assert math.isnan(row(results, name)["ar"])
    rounds = results.rounds[results.rounds["run"] == "fedkace_o-1_seed-0"]
    assert rounds["regret"].tolist() == pytest.approx([0.4, 0.2])


def test_regret_is_against_centralized_on_the_same_data_where_both_have_their_digest(tmp_path: Path) -> None:
    """Folders of data are not in a record, and of a weights file only the name is."""
    for name, accuracy in (("easy", 0.9), ("hard", 0.7)):
        for method, own in (("centralized", accuracy), ("er", 0.5)):
            folder = write_run(tmp_path, f"{method}_{name}", [own], method=method, dataset="arrays")
            add_to_environment(folder, files={"dataset": name, "weights-file": "alike"})
    write_run(tmp_path, "fedavg_earlier", [0.5], method="fedavg", dataset="arrays")
    add_to_environment(
        write_run(tmp_path, "fedavg_other", [0.5], method="fedavg", dataset="arrays"), files={"weights-file": "other"}
    )
    results = load_results(tmp_path)
    found = {"er_easy": 0.4, "er_hard": 0.2, "fedavg_earlier": 0.4}
    for name, expected in found.items():
        assert row(results, name)["ar"] == pytest.approx(expected)
    assert math.isnan(row(results, "fedavg_other")["ar"])
    table = {run.name: run.regret for run in find_runs([tmp_path / "er_hard", tmp_path / "fedavg_other"])[0]}
    assert table == {"er_hard": pytest.approx(0.2), "fedavg_other": None}


def test_the_reference_may_lie_in_another_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "reference", "centralized", [0.9, 0.9], method="centralized")
    write_run(tmp_path / "own", "fedkace", [0.5, 0.7])
    results = load_results(tmp_path / "own", tmp_path / "reference")
    assert row(results, "fedkace")["ar"] == pytest.approx(0.3)
    assert [study.name for study in results.studies] == ["own", "reference"]


def test_a_round_without_an_answer_leaves_no_made_up_regret(tmp_path: Path) -> None:
    write_run(tmp_path, "centralized", [0.9, 0.9], method="centralized")
    write_run(tmp_path, "fedkace", [0.5, None])
    run = row(load_results(tmp_path), "fedkace")
    assert run["aa"] == 0.5
    assert math.isnan(run["ar"])


def test_an_unfinished_run_is_there_and_flagged(tmp_path: Path) -> None:
    write_run(tmp_path, "centralized", [0.9, 0.9], method="centralized")
    folder = write_run(tmp_path, "fedkace", [0.5, 0.7], finished=False)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(made_round(3, 0.9))[:100])  # it is writing its third
    write_run(tmp_path, "er", [], finished=False, method="er", rounds=2)
    results = load_results(tmp_path)
    run = row(results, "fedkace")
    assert not run["finished"] and run["rounds_done"] == 2
    assert math.isnan(run["ar"])
    empty = row(results, "er")
    assert not empty["finished"] and empty["rounds_done"] == 0 and math.isnan(empty["aa"])


def test_a_run_that_was_stopped_early_counts_as_unfinished(tmp_path: Path) -> None:
    write_run(tmp_path, "centralized_seed-0", [0.9], method="centralized", rounds=2)
    write_run(tmp_path, "fedkace_seed-0", [0.5], rounds=2)
    write_run(tmp_path, "fedkace_seed-1", [0.6, 0.8], rounds=2, seed=1)
    write_run(tmp_path, "er_seed-0", [0.5], method="er", rounds=2)
    write_run(tmp_path, "er_seed-1", [0.6, 0.8], method="er", rounds=2, seed=1)
    results = load_results(tmp_path)
    (study,) = results.studies
    assert study.remarks == (
        "Stopped early, and counted as unfinished: centralized_seed-0 (1 of 2 rounds), er_seed-0 (1 of 2 rounds), "
        "fedkace_seed-0 (1 of 2 rounds).",
    )
    assert math.isnan(row(results, "fedkace_seed-0")["ar"])
    table = study_tables(results, study)[0]
    assert {cell.n for cell in table.cells.values()} == {1}
    assert "2 of 5 runs are finished; means leave out the others." in table.notes
    assert paired_differences(results, study).empty
    curves, _ = curves_of(results, study)
    assert {len(rounds) for rounds in curves["digits, O=1"].values()} == {2}
    assert "FedKACE (unfinished)" in curves_of(results, study, unfinished=True)[1]
    assert {run.regret for run in find_runs([tmp_path])[0]} == {None}


def test_a_run_without_an_end_is_not_stopped_early(tmp_path: Path) -> None:
    write_run(tmp_path, "fedkace", [0.5], rounds=0, dataset="inbox", class_names="a,b", image_size=8)
    results = load_results(tmp_path)
    assert row(results, "fedkace")["finished"] and not results.studies[0].remarks


def test_a_run_that_was_resumed_with_other_values_is_named(tmp_path: Path) -> None:
    changed = {"learning-rate": [0.1, 0.001], "rounds": [2, 3], "deadline": [1.0, 2.0]}
    folder = write_run(tmp_path, "fedkace_seed-0", [0.5] * 3, learning_rate=0.001)
    add_to_environment(folder, resumptions=[{"round": 2, "changed": {}}, {"round": 3, "changed": changed}])
    add_to_environment(write_run(tmp_path, "fedkace_seed-1", [0.5] * 3, seed=1), resumptions=[])
    (study,) = load_results(tmp_path).studies
    assert study.remarks[-1] == "Resumed with other values: fedkace_seed-0 (learning-rate 0.1 before round 3)."
    add_to_environment(folder, resumptions=[{"round": 2, "changed": {"learning-rate": 3}}])
    assert "changed = {'learning-rate': 3}; must be an object with values of: two values" in refusal(tmp_path)
    add_to_environment(folder, resumptions=[], files=["digest"])
    assert "files = ['digest']; must be" in refusal(tmp_path)


def test_a_run_set_aside_by_a_later_one_does_not_count(tmp_path: Path) -> None:
    write_run(tmp_path, "fedkace_seed-0", [0.5])
    write_run(tmp_path, "fedkace_seed-0.20260101-101500", [0.1])
    write_run(tmp_path, "fedkace_seed-0.20260101-101500-2", [0.1])
    assert load_results(tmp_path).runs["run"].tolist() == ["fedkace_seed-0"]


# Studies


def test_axes_come_from_the_study_and_the_seed_goes_last(tmp_path: Path) -> None:
    write_run(tmp_path, "a", [0.5])
    write_run(tmp_path, "stray", [0.5], seed=9)
    labels = {"data": "cifar100", "overlap": 4, "method": "fedkace", "seed": 0}
    write_study(tmp_path, {"a": labels, "b": {**labels, "seed": 1}})
    results = load_results(tmp_path)
    (study,) = results.studies
    assert (study.name, study.title, study.paper, study.scale) == ("table1", "Baselines", "table1", "reduced")
    assert study.axes == ("data", "overlap", "method", "seed")
    assert results.runs["run"].tolist() == ["a"]  # b has not begun, and the study does not list the stray
    assert row(results, "a")["axis.data"] == "cifar100"


def test_without_a_study_the_axes_are_what_differs(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [0.5], overlap=1)
    write_run(tmp_path, "two", [0.5], overlap=0, results_dir="elsewhere")
    write_run(tmp_path, "three", [0.5], method="as4", replay_weight="one", seed=1)
    (study,) = load_results(tmp_path).studies
    assert study.axes == ("overlap", "method", "seed")  # the weight follows from the method


def test_a_single_runs_folder_will_do_and_two_of_a_name_are_told_apart(tmp_path: Path) -> None:
    first = write_run(tmp_path / "x", "fedkace", [0.5])
    second = write_run(tmp_path / "y", "fedkace", [0.7])
    results = load_results(first, second, first)
    assert [study.name for study in results.studies] == ["fedkace", "fedkace (2)"]
    assert results.runs["aa"].tolist() == [0.5, 0.7]


def test_studies_of_one_name_are_called_by_their_folders(tmp_path: Path) -> None:
    labels = {"data": "cifar100", "overlap": 4, "method": "fedkace", "seed": 0}
    for folder, aa in (("small", 0.5), ("large", 0.7), ("other/large", 0.9)):
        write_run(tmp_path / folder, "a", [aa])
        write_study(tmp_path / folder, {"a": labels})
    results = load_results(tmp_path / "small", tmp_path / "large", tmp_path / "other" / "large")
    names = ["small", "large", "large (2)"]
    assert [study.name for study in results.studies] == names
    assert [study.title for study in results.studies] == [f"Baselines ({name})" for name in names]
    assert dict(zip(results.runs["study"], results.runs["aa"], strict=True)) == {
        "small": 0.5,
        "large": 0.7,
        "large (2)": 0.9,
    }


def test_an_axis_of_one_study_keeps_its_whole_numbers_beside_a_study_without_it(tmp_path: Path) -> None:
    for name, axes in (("with", {"overlap": 1, "seed": 0}), ("without", {"seed": 0})):
        write_run(tmp_path / name, "a", [0.5], dataset="cifar100", overlap=1)
        write_study(tmp_path / name, {"a": axes}, axes=list(axes))
    results = load_results(tmp_path / "with", tmp_path / "without")
    for study in results.studies:
        (run,) = rows_of(results.counted(study))
        assert place(study, run)[1] == "CIFAR-100, O=1"
    results.write(tmp_path)
    assert pd.read_csv(tmp_path / "runs.csv", dtype=str)["axis.overlap"][0] == "1"
    assert pd.read_parquet(tmp_path / "runs.parquet")["axis.overlap"][0] == 1


# Written


def test_what_is_written_can_be_read_as_csv_and_as_parquet(tmp_path: Path) -> None:
    write_run(tmp_path / "in", "a", [0.5, 0.7])
    write_run(tmp_path / "in", "b", [0.5], finished=False, method="er", rounds=2)
    write_study(
        tmp_path / "in",
        {"a": {"size": 5, "seed": 0}, "b": {"size": "whole", "seed": 0}},  # numbers and words on one axis
        axes=["size", "seed"],
    )
    results = load_results(tmp_path / "in")
    paths = results.write(tmp_path / "out")
    assert [path.name for path in paths] == ["runs.csv", "runs.parquet", "rounds.csv", "rounds.parquet"]
    for read, suffix in ((pd.read_csv, "csv"), (pd.read_parquet, "parquet")):
        runs, rounds = (read(tmp_path / "out" / f"{name}.{suffix}") for name in ("runs", "rounds"))
        assert runs["run"].tolist() == ["a", "b"] and runs["axis.size"].astype(str).tolist() == ["5", "whole"]
        assert runs["finished"].tolist() == [True, False] and runs["folder"].tolist() == ["../in/a", "../in/b"]
        assert rounds["accuracy"].tolist() == [0.5, 0.7, 0.5]
        assert set(runs["schema"]) == {1}


# What is refused


def test_a_folder_without_a_run_is_refused_by_name(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert refusal(folder).startswith(f"{folder}: ")
    write_run(tmp_path / "results" / "mine", "fedkace", [0.5])
    assert refusal(tmp_path / "results").endswith(f"name the studies in it, such as {tmp_path / 'results' / 'mine'}")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[]", "must be a JSON object"),
        ("config.json", '{"window": 0}', "window = 0"),
        ("config.json", '{"newkey": 0}', "unknown key newkey"),
        ("config.json", '{"clients-together": 2}', "clients-together = 2"),
        ("config.json", '{"schema": 2}', "schema = 2: this program reads up to 1"),
        ("environment.json", "", "not valid JSON"),
        ("summary.json", '{"rounds": ', "not valid JSON"),
        ("rounds.jsonl", '{"round": 1\n{"round": 2}\n', "line 1: is damaged"),
        (
            "rounds.jsonl",
            '{"round": 1}\n{"round": 2}\n',
            "accuracy is missing; must be a number",
        ),
        ("rounds.jsonl", '{"schema": 7}\n', "schema = 7"),
        ("rounds.jsonl", "\xff", "cannot be read"),
        ("../study.json", "{}", "study is missing; must be a string"),
        ("../study.json", '{"schema": 2}', "schema = 2"),
        ("../study.json", '{"study": "x", "axes": ["seed"], "runs": {"a": []}}', "runs = {'a': []}; must be"),
        ("../study.json", '{"study": "x", "axes": [], "runs": {"a": {}}, "keys": {"seed": "seed"}}', "keys = "),
        ("../study.json", '{"study": "x", "note": 3, "axes": [], "runs": {"a": {}}}', "note = 3; must be a string"),
    ],
)
def test_a_damaged_or_newer_file_is_refused_in_one_line_that_names_it(
    tmp_path: Path, file: str, text: str, words: str
) -> None:
    folder = write_run(tmp_path, "a", [0.5, 0.7])
    path = (folder / file).resolve()
    path.write_bytes(text.encode("latin-1"))
    message = refusal(tmp_path)
    assert message.startswith(str(path)) and words in message


def test_a_record_of_fewer_rounds_than_its_summary_tells_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", [0.5, 0.7])
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text(lines[0])
    assert refusal(tmp_path) == f"{folder}: is damaged; it has 1 rounds, its summary says 2"


@pytest.mark.parametrize(("kept", "runs"), [("privacy", 14), ("reduced", 48)])
def test_records_of_earlier_versions_are_read(kept: str, runs: int) -> None:
    """Since then one of their keys was removed, and another has a narrower range."""
    results = load_results(KEPT / kept)
    assert len(results.runs) == runs and (results.rounds["accuracy"] > 0).all()
