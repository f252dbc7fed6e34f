"""Results folders into which several commands have put runs: which means are taken, and what the report says."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.made.results import SMALL_RUN, add_to_environment, write_run

from fedkace_flwr.experiments.report.tables import CHANCE, ResultTable, study_notes, study_tables
from fedkace_flwr.experiments.results.keep import keep
from fedkace_flwr.experiments.results.loading import StudyInfo, load_results
from fedkace_flwr.experiments.running.runner import describe
from fedkace_flwr.experiments.studies.study import load_study
from fedkace_flwr.keys import Scalar

STUDY = """
title: Trial
note: One seed is little.
config: {dataset: digits, clients: 2, rounds: 2, window: 2, overlap: 1, epochs: 3, capacity: 20}
grid: {method: [fedkace, er]}
"""
GROUPS = """
config: {dataset: digits, clients: 2, rounds: 2, window: 2, overlap: 1, epochs: 3}
grid:
  size:
    small: {capacity: 10, epochs: 1}
    large: {capacity: 20}
"""


def made(
    folder: Path, accuracy: float = 0.5, *, text: str = STUDY, only: str = "fedkace", finished: bool = True, **keys: Any
) -> Path:
    """What ``run --only fedkace --set ...`` leaves, in place of earlier runs; a list is a sweep."""
    path = folder / "trial.yaml"
    path.write_text(text)
    given = {key: value for key, value in keys.items() if isinstance(value, Scalar)}
    sweeps = {key: value for key, value in keys.items() if not isinstance(value, Scalar)}
    study = load_study(path, given, folder / "results", sweeps=sweeps, only=only.split(","))
    study.folder.mkdir(parents=True, exist_ok=True)
    describe(study)
    for number, (name, config) in enumerate(study.runs.items()):
        flat = {key.replace("-", "_"): value for key, value in config.flat().items() if key in {*SMALL_RUN, "method"}}
        flat |= {"seed": config.run.seed, "rounds": config.stream.rounds}
        place = study.folder / name
        if place.exists():
            aside = len(list(study.folder.glob("*.20260101-*")))
            place.rename(place.with_name(f"{name}.20260101-{aside:06}"))
        write_run(study.folder, name, [accuracy + number / 10] * config.stream.rounds, finished=finished, **flat)
    return study.folder


def read(folder: Path) -> tuple[StudyInfo, ResultTable, list[str]]:
    """The study, the table of AA, and the notes of the study."""
    results = load_results(folder)
    (study,) = results.studies
    tables = study_tables(results, study)
    return study, tables[0], study_notes(study, tables)


def means(table: ResultTable, row: str) -> dict[str, float]:
    return {column: round(cell.mean, 6) for (own, column), cell in table.cells.items() if own == row}


def by_setting(table: ResultTable) -> dict[str, float]:
    """The means of a study of one method and one column: a row for each setting, and chance."""
    assert len(table.columns) == 1
    return {row: round(cell.mean, 6) for (row, _), cell in table.cells.items() if row != CHANCE}


@pytest.mark.parametrize("sweep_first", [False, True])
def test_a_sweep_and_a_plain_run_are_shown_side_by_side(tmp_path: Path, sweep_first: bool) -> None:
    calls: list[tuple[float, dict[str, Any]]] = [(0.7, {}), (0.3, {"epochs": [1, 2]})]
    for accuracy, keys in reversed(calls) if sweep_first else calls:
        folder = made(tmp_path, accuracy, **keys)
    study, table, notes = read(folder)
    assert set(study.axes) == {"epochs", "method", "seed"} and study.axes[-1] == "seed"
    assert by_setting(table) == {"J=3": 70, "J=1": 30, "J=2": 40}
    assert {cell.n for cell in table.cells.values()} == {1}
    assert notes == ["One seed is little.", "All runs are of FedKACE.", "O: overlap, J: epochs."]


def test_a_study_json_that_lost_its_axes_is_read_with_them(tmp_path: Path) -> None:
    """Earlier versions kept the runs of a sweep and the axes of the plain run after it."""
    made(tmp_path, 0.3, epochs=[1, 2])
    folder = made(tmp_path, 0.7)
    told = json.loads((folder / "study.json").read_text())
    del told["keys"], told["note"]
    (folder / "study.json").write_text(json.dumps(told | {"axes": ["method", "seed"]}))
    _, table, _ = read(folder)
    assert by_setting(table) == {"J=3": 70, "J=1": 30, "J=2": 40}


def test_runs_redone_with_other_keys_do_not_stand_beside_the_others_without_a_word(tmp_path: Path) -> None:
    made(tmp_path, 0.5, only="*")
    folder = made(tmp_path, 0.9, rounds=3, epochs=2)
    study, table, notes = read(folder)
    assert means(table, "FedKACE") == {"digits, O=1, T=3, J=2": 90}
    assert means(table, "ER") == {"digits, O=1, T=2, J=3": 60}
    assert study.remarks == (
        "The runs were made with different values of rounds, epochs, which the study does not vary; they are shown "
        "apart.",
    )
    assert study.remarks[0] in notes


def test_seeds_run_with_other_keys_are_not_averaged_together(tmp_path: Path) -> None:
    made(tmp_path, 0.5, seed=[0, 1])
    folder = made(tmp_path, 0.9, seed=[2], epochs=1)
    _, table, _ = read(folder)
    assert {row: cell.n for (row, _), cell in table.cells.items() if row != CHANCE} == {"J=3": 2, "J=1": 1}


def test_seeds_from_a_gpu_and_from_a_cpu_are_averaged_together(tmp_path: Path) -> None:
    """On a GPU ``deterministic`` chooses algorithms that round otherwise, and a CPU rounds otherwise, too."""
    folder = made(tmp_path, 0.5, seed=[0, 1])
    config = json.loads((folder / "fedkace_seed-1" / "config.json").read_text())
    (folder / "fedkace_seed-1" / "config.json").write_text(
        json.dumps(config | {"device": "cuda", "deterministic": True})
    )
    study, table, _ = read(folder)
    assert not study.remarks and {cell.n for (row, _), cell in table.cells.items() if row != CHANCE} == {2}


def test_a_configuration_that_was_run_twice_counts_once(tmp_path: Path) -> None:
    made(tmp_path, 0.5, capacity=40)
    folder = made(tmp_path, 0.5, capacity=[20, 40])
    study, table, _ = read(folder)
    assert study.repeats == {"fedkace_capacity-40_seed-0"}
    assert study.remarks == (
        "Runs with the same configuration count once: fedkace_capacity-40_seed-0 repeats fedkace_seed-0.",
    )
    assert {cell.n for cell in table.cells.values()} == {1} and not table.notes
    assert len(load_results(folder).runs) == 3


def test_folders_of_data_with_one_last_name_are_told_apart(tmp_path: Path) -> None:
    """No path of the machine is read from study.json, but enough of it to keep the runs of a grid apart."""
    text = STUDY.replace("digits", "arrays")
    folders: dict[str, Any] = {"data-dir": [f"/somewhere/{name}/frames" for name in ("clean", "noisy")]}
    folder = made(tmp_path, text=text, only="*", **folders)
    for kept in (folder, tmp_path / "kept"):
        study, table, _ = read(kept)
        assert (study.axes, study.repeats, study.remarks) == (("method", "data-dir", "seed"), frozenset(), ())
        assert means(table, "ER") == {
            "arrays, O=1, data-dir=clean/frames": 70,
            "arrays, O=1, data-dir=noisy/frames": 80,
        }
        if kept == folder:
            keep(folder, tmp_path / "kept")


def test_runs_on_other_data_do_not_stand_beside_the_others_without_a_word(tmp_path: Path) -> None:
    """As in a study that was kept by a version which cut their folders to one name."""
    folder = made(tmp_path, only="*", seed=[0, 1])
    told = json.loads((folder / "study.json").read_text())
    for run, digest in {"fedkace_seed-0": "a" * 64, "fedkace_seed-1": "b" * 64, "er_seed-0": "a" * 64}.items():
        add_to_environment(folder / run, files={"dataset": digest})
    for labels in told["runs"].values():
        labels["seed"] = 0
    (folder / "study.json").write_text(json.dumps(told))
    study, table, notes = read(folder)
    assert means(table, "FedKACE") == {
        "digits, O=1, dataset digest=aaaaaaaa": 50,
        "digits, O=1, dataset digest=bbbbbbbb": 60,
    }
    assert means(table, "ER") == {"digits, O=1, dataset digest=-": 80, "digits, O=1, dataset digest=aaaaaaaa": 70}
    assert "The runs were made with different contents of dataset; they are shown apart." in notes
    assert not study.repeats


def test_a_finished_run_counts_and_not_its_unfinished_repetition(tmp_path: Path) -> None:
    made(tmp_path, 0.5, capacity=40, finished=False)
    study, _, _ = read(made(tmp_path, 0.6, capacity=[20, 40]))
    assert study.repeats == {"fedkace_seed-0"}


def test_keys_that_an_axis_sets_are_no_reason_for_a_note(tmp_path: Path) -> None:
    study, table, _ = read(made(tmp_path, text=GROUPS))
    assert study.axes == ("size", "method", "seed") and not study.remarks
    assert by_setting(table) == {"size=small": 50, "size=large": 60}
    study, _, _ = read(made(tmp_path, text=GROUPS, only="large", rounds=3))
    assert len(study.remarks) == 1 and "different values of rounds, which" in study.remarks[0]


def test_keys_that_the_method_does_not_read_are_no_reason_for_a_note(tmp_path: Path) -> None:
    folder = made(tmp_path, only="*")
    config = json.loads((folder / "er_seed-0" / "config.json").read_text())
    (folder / "er_seed-0" / "config.json").write_text(json.dumps(config | {"lambda-max": 7.0}))
    study, _, _ = read(folder)
    assert not study.remarks


def test_keys_that_a_method_itself_sets_are_no_reason_for_a_note_but_other_values_of_them_are(tmp_path: Path) -> None:
    text = STUDY.replace("[fedkace, er]", "[fedkace, as1, as2]")
    folder = made(tmp_path, text=text, only="*")
    config = json.loads((folder / "as1_seed-0" / "config.json").read_text())
    assert config["patience"] == 2  # as it was asked for
    (folder / "as1_seed-0" / "config.json").write_text(json.dumps(config | {"patience": 1}))  # as the program sets it
    assert not read(folder)[0].remarks
    config = json.loads((folder / "fedkace_seed-0" / "config.json").read_text())
    (folder / "fedkace_seed-0" / "config.json").write_text(json.dumps(config | {"patience": 3}))
    assert "different values of patience, which" in read(folder)[0].remarks[0]


def test_a_run_that_was_copied_into_a_study_is_named_where_it_is_left_out(tmp_path: Path) -> None:
    folder = made(tmp_path, 0.5)
    write_run(folder, "er_seed-4", [0.9, 0.9], method="er")
    study, _, notes = read(folder)
    assert list(study.labels) == ["fedkace_seed-0"]
    assert "Left out, since study.json does not list them: er_seed-4." in notes


def test_runs_that_were_set_aside_are_not_listed(tmp_path: Path) -> None:
    made(tmp_path, 0.5)
    folder = made(tmp_path, 0.6, epochs=1)
    told = json.loads((folder / "study.json").read_text())
    (aside,) = (path.name for path in folder.glob("*.20260101-*"))
    (folder / "study.json").write_text(json.dumps(told | {"runs": {**told["runs"], aside: {}}}))
    made(tmp_path, 0.7, epochs=1)
    assert list(json.loads((folder / "study.json").read_text())["runs"]) == ["fedkace_seed-0"]


def test_an_axis_of_which_a_run_tells_nothing_is_a_dash(tmp_path: Path) -> None:
    made(tmp_path, 0.5, text=GROUPS)
    folder = made(tmp_path, 0.9)
    frame = load_results(folder).runs.set_index("run")
    assert frame.loc["fedkace_seed-0", "axis.size"] == "-" and not pd.isna(frame["aa"]).any()
