"""Keeping the records of runs and studies: what is written can be read as what had been recorded."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.made.results import made_round, write_run, write_study

from fedkace_flwr.errors import ConfigError, FedkaceError, ResultsError, RunError
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.results.keep import keep
from fedkace_flwr.experiments.results.recorded import Recorded
from fedkace_flwr.storage.targets import MARK

LABELS = {"data": "digits", "overlap": 1, "method": "fedkace"}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A finished run, one that is writing its third round, and one that has only begun."""
    folder = tmp_path / "study"
    write_run(folder, "done", [0.5, None, 1 / 3])
    going = write_run(folder, "going", [0.1, 0.7], finished=False, seed=1, rounds=3)
    with (going / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(made_round(3, 0.9))[:100])
    write_run(folder, "begun", [], finished=False, seed=2, rounds=3)
    write_study(folder, {name: {**LABELS, "seed": seed} for seed, name in enumerate(("done", "going", "begun"))})
    return folder


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines() if line.endswith("}")]


def write_lines(run: Path, records: list[dict[str, Any]]) -> None:
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def exactly(value: Any) -> Any:
    """A value in which 1 and 1.0, and floats that differ in the last digit, differ."""
    if isinstance(value, dict):
        return {name: exactly(each) for name, each in value.items()}
    return [exactly(each) for each in value] if isinstance(value, list) else repr(value)


def test_a_kept_study_has_the_recorded_values_to_the_last_digit(study: Path, tmp_path: Path) -> None:
    """Null, and what a run or a round lacks, included; of an unfinished run, the complete rounds."""
    records = lines(study / "done")
    records[0]["failures"] = [{"client": 1, "phase": "training", "reason": "none", "kind": "error"}]
    records[1]["failures"] = [{"client": 0, "phase": "evaluation", "reason": "of version 1.0"}]
    records[0]["seconds"] = {"round": 0.1 + 0.2, "training": 1e-17, "selection": 2.0**53, "transport": 5e-324}
    records[1]["class_accuracy"] = [None, [0.1, *[None] * 8, 1.0]]
    records[0] |= {"class_accuracy": [[0.1] * 10, [None] * 9 + [1 / 7]], "epsilon": 0.1}
    records[2] |= {"client_drift": None, "coalitions": [[0], [1]]}
    for name in ("class_accuracy", "new_class_accuracy", "gap"):
        del records[2][name]
    write_lines(study / "done", records)
    keep(study, tmp_path / "kept")
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        *(MARK, "study.json", "rounds.parquet", "classes.parquet")
    }
    before, after = Recorded(study), Recorded(tmp_path / "kept")
    assert after.told == before.told
    assert [run.name for run in after.runs] == ["done", "going"]
    for run in before.runs[1:]:
        kept = next(each for each in after.runs if each.name == run.name)
        assert kept.finished == run.finished and kept.config() == run.config()
        assert exactly(kept.rounds(2)) == exactly(run.rounds(2)) and len(kept.rounds()) == len(run.rounds())
        assert kept.environment() == run.environment()
    assert after.runs[0].summary() == before.runs[1].summary()
    assert exactly(after.runs[0].lines()[2]["coalitions"]) == exactly([[0], [1]])
    keep(tmp_path / "kept", tmp_path / "again")  # a kept study is a source as well
    again = Recorded(tmp_path / "again")
    assert again.told == after.told
    assert [exactly(run.lines()) for run in again.runs] == [exactly(run.lines()) for run in after.runs]


def test_other_programs_read_the_tables(study: Path, tmp_path: Path) -> None:
    keep(study, tmp_path / "kept")
    rounds, classes = (pd.read_parquet(tmp_path / "kept" / f"{name}.parquet") for name in ("rounds", "classes"))
    assert rounds[rounds["run"] == "going"]["accuracy"].tolist() == [0.1, 0.7]
    first = classes[(classes["run"] == "done") & (classes["round"] == 1)]
    assert first["client"].tolist() == [0, 1]
    assert np.array_equal(first["class_accuracy"].iloc[0][:3], [0.5, 0.5, np.nan], equal_nan=True)


def test_no_folder_of_the_machine_is_kept(study: Path, tmp_path: Path) -> None:
    path = study / "done" / "config.json"
    named = {"data-dir": "/home/someone/data", "weights-file": "/home/someone/resnet18.pth"}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    keep(study, tmp_path / "kept")
    text = (tmp_path / "kept" / "study.json").read_text()
    assert "someone" not in text and json.loads(text)["runs"]["done"]["config"]["weights-file"] == "resnet18.pth"


def test_runs_kept_earlier_stay_and_those_of_one_name_are_replaced(study: Path, tmp_path: Path) -> None:
    keep(study, tmp_path / "kept")
    (tmp_path / "kept" / MARK).unlink()  # as in a checkout
    more = tmp_path / "more"
    write_run(more, "going", [0.1, 0.7, 0.8], seed=1)
    write_run(more, "new", [0.2], seed=3)
    write_study(more, {"going": {**LABELS, "seed": 1}, "new": {**LABELS, "seed": 3}}, note="longer")
    keep(more, tmp_path / "kept")
    found = Recorded(tmp_path / "kept")
    assert [(run.name, run.finished, len(run.rounds())) for run in found.runs] == [
        *(("done", True, 3), ("going", True, 3), ("new", True, 1))
    ]
    assert found.told and list(found.told["runs"]) == ["done", "going", "begun", "new"]
    assert found.told["note"] == "longer"


def test_another_study_is_not_added_to_a_kept_one(study: Path, tmp_path: Path) -> None:
    keep(study, tmp_path / "kept")
    before = {path: path.read_bytes() for path in (tmp_path / "kept").iterdir()}
    write_run(tmp_path / "other", "a", [0.5])
    write_study(tmp_path / "other", {"a": {**LABELS, "seed": 0}}, study="table2")
    for source in (tmp_path / "other", study / "done"):
        with pytest.raises(ResultsError, match=r"kept: keeps the study 'table1', not (None|'table2'); choose"):
            keep(source, tmp_path / "kept")
    assert {path: path.read_bytes() for path in before} == before


def test_a_single_run_is_kept_as_a_study_without_a_description(study: Path, tmp_path: Path) -> None:
    keep(study / "going", tmp_path / "kept")
    found = Recorded(tmp_path / "kept")
    assert [(run.name, run.finished, len(run.rounds())) for run in found.runs] == [("going", False, 2)]
    assert found.told is None


def test_where_no_round_is_done_there_is_nothing_to_keep(study: Path, tmp_path: Path) -> None:
    shutil.rmtree(study / "done")
    shutil.rmtree(study / "going")
    for source in (study, study / "begun"):
        with pytest.raises(RunError, match="no run has completed a round"):
            keep(source, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_runs_are_never_kept_in_place_of_others(study: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    for source, target in ((study / "done", study / "done"), (study / "done", study / "going"), (study, study)):
        with pytest.raises(ConfigError, match=r"holds files, and no \.fedkace of a kept study;"):
            keep(source, target)
    assert {path: path.read_bytes() for path in study.rglob("*") if path.is_file()} == before


def test_a_study_does_not_run_in_the_folder_of_a_kept_one(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "results" / "quickstart"
    keep(study, kept)
    for path in (kept / "nothing", kept / MARK):  # the latter as in a checkout
        path.unlink(missing_ok=True)
        before = {path: path.read_bytes() for path in kept.iterdir()}
        assert main(["run", "quickstart", "--engine", "inline", "--results", str(kept.parent)]) == 2
        assert "results/quickstart: holds" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in kept.iterdir()} == before


def test_without_its_extra_keep_says_so_before_any_work(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (study / "done" / "rounds.jsonl").write_text("damaged\n")
    assert main(["keep", str(study), str(tmp_path / "kept")]) == 2
    assert "kept records need pyarrow: pip install 'fedkace-flwr[report]'" in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()


def test_a_field_with_values_of_different_kinds_is_refused(study: Path, tmp_path: Path) -> None:
    records = lines(study / "done")
    records[0]["mine"], records[1]["mine"] = "a", 1.5
    write_lines(study / "done", records)
    with pytest.raises(ResultsError, match=r"rounds\.parquet: .*kinds"):
        keep(study, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


# Tables that come from somebody else


def changed(column: str, values: list[Any] | pa.Array) -> Any:
    """A change of a table's column."""

    def change(table: Any) -> Any:
        at = table.column_names.index(column)
        return table.set_column(at, column, values if isinstance(values, pa.Array) else pa.array(values))

    return change


DAMAGE: dict[str, tuple[str, Any]] = {
    "rounds.parquet or ": ("rounds", b"PAR1 and no more"),
    "classes.parquet: cannot be read": ("classes", b""),
    "Out of range float values": ("rounds", changed("accuracy", [float("nan"), 0.5, 0.5])),
    "datetime is not JSON": ("rounds", changed("accuracy", pa.array([1, 2, 3], pa.timestamp("s")))),
    "KeyError: 'run'": ("rounds", lambda table: table.drop_columns("run")),
    "done, round 1: is damaged; accuracy = 7.0": ("rounds", changed("accuracy", [7.0, 0.5, 0.5])),
    "done, round 1: is damaged; client_drift is missing": ("rounds", lambda table: table.drop_columns("client_drift")),
    "the clients of 'done', round 1, are not 0": ("classes", changed("client", [1, 1, 0, 1, 0, 1])),
    "the classes of ('done', 7) belong to no round": ("classes", changed("round", [7] * 6)),
    "done, round 1: is damaged; class_accuracy = ": ("classes", changed("class_accuracy", [[0.5], *[[0.5, 0.5]] * 5])),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_damaged_table_is_refused_in_one_line_that_names_it(
    words: str, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, change = DAMAGE[words]
    keep(study / "done", tmp_path / "kept")
    path = tmp_path / "kept" / f"{name}.parquet"
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        pq.write_table(change(pq.read_table(path)), path)
    assert main(["report", str(tmp_path / "kept"), "--output", str(tmp_path / "report")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and str(tmp_path / "kept") in line


@pytest.mark.slow
def test_a_small_file_that_holds_very_much_is_not_unpacked(study: Path, tmp_path: Path) -> None:
    keep(study / "done", tmp_path / "kept")
    path = tmp_path / "kept" / "rounds.parquet"
    many = pa.DictionaryArray.from_arrays([0] * 64, ["x" * 2**26])
    columns = {"run": ["done"] * 64, "round": list(range(64)), "text": many}
    pq.write_table(pa.table(columns), path, compression="zstd", dictionary_pagesize_limit=2**28)
    assert path.stat().st_size < 2**16
    with pytest.raises(ResultsError, match=r"rounds\.parquet.*: cannot be read \("):
        Recorded(tmp_path / "kept").runs[0].rounds()


@pytest.mark.parametrize("name", ["..", "../other", "/etc", "a/b", "", ".", "a\n"])
def test_the_name_of_a_kept_run_leads_nowhere(name: str, study: Path, tmp_path: Path) -> None:
    keep(study / "done", tmp_path / "kept")
    path = tmp_path / "kept" / "study.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "runs": {name: told["runs"]["done"]}}))
    with pytest.raises(ResultsError, match=r"study\.json: has a run named"):
        Recorded(tmp_path / "kept")


@pytest.mark.parametrize("name", ["study.json", "rounds.parquet", "classes.parquet", "done"])
def test_links_in_a_kept_study_are_not_followed(name: str, study: Path, tmp_path: Path) -> None:
    keep(study / "done", tmp_path / "kept")
    path = tmp_path / "kept" / name
    elsewhere = shutil.move(path, tmp_path / name) if path.exists() else study / "done"
    path.symlink_to(elsewhere)
    with pytest.raises(ResultsError, match=f"{name}: is a link out of"):
        Recorded(tmp_path / "kept").runs[0].rounds()


def test_a_text_of_a_kept_study_names_no_path_of_a_machine(study: Path, tmp_path: Path) -> None:
    keep(study / "done", tmp_path / "kept")
    path = tmp_path / "kept" / "rounds.parquet"
    failure = {"client": 1, "phase": "training", "reason": "'/home/someone/a b.png' cannot be read", "kind": "error"}
    pq.write_table(changed("failures", [[failure], [], []])(pq.read_table(path)), path)
    (told,) = Recorded(tmp_path / "kept").runs[0].rounds()[0]["failures"]
    assert told["reason"] == "'a b.png' cannot be read"


@pytest.mark.slow
def test_whatever_bytes_a_table_has_it_is_read_or_refused(study: Path, tmp_path: Path) -> None:
    """Some make the library abort."""
    keep(study / "done", tmp_path / "kept")
    path = tmp_path / "kept" / "rounds.parquet"
    content, draw = path.read_bytes(), np.random.default_rng(0)
    for _ in range(20):
        spoilt = bytearray(content)
        for at in draw.integers(len(spoilt), size=3):
            spoilt[at] = draw.integers(256)
        path.write_bytes(spoilt)
        try:
            Recorded(tmp_path / "kept").runs[0].rounds()
        except FedkaceError as error:
            assert "\n" not in str(error) and "rounds.parquet" in str(error)
