"""The command `table`: which folders it takes, what it calls the runs, and how it fits into a terminal."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.made.results import write_run

from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.results.loading import load_results
from fedkace_flwr.experiments.results.recorded import Run
from fedkace_flwr.experiments.results.summary_table import (
    COLUMNS,
    find_runs,
    hidden_columns,
    shown_columns,
    summary_table,
)
from fedkace_flwr.results.record import totals


def finish(folder: Path, **changes: Any) -> Path:
    """Write a run's summary from its record, as the program does."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    config = json.loads((folder / "config.json").read_text())
    facts = {key: config[key] for key in ("method", "dataset", "clients", "seed")}
    summary = {**facts, "rounds": len(lines), **totals(lines), **changes}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """FedKACE, FedAVG and Centralized, an unfinished run, one set aside, and a report without runs."""
    folder = tmp_path / "study"
    finish(write_run(folder, "fedkace_seed-0", [0.5, 0.6]))
    finish(write_run(folder, "fedavg_seed-0", [0.3, 0.4], method="fedavg"))
    finish(write_run(folder, "centralized_seed-0", [0.9, 0.8], method="centralized"))
    write_run(folder, "er_seed-0", [0.3], method="er", finished=False)
    finish(write_run(folder, "fedkace_seed-0.20260101-000000", [0.1, 0.1]))
    (folder / "report").mkdir()
    return folder


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The printed rows by the run's name."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {words[0]: words[1:] for words in lines if words}


def test_a_study_folder_and_folders_without_runs_may_be_named(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(study)]) == 0
    assert {"fedkace_seed-0", "fedavg_seed-0", "centralized_seed-0"} <= set(rows(capsys))
    every = [str(path) for path in sorted(study.iterdir()) if path.is_dir()]  # as the shell expands results/*/*/
    assert main(["table", *every]) == 0
    told = capsys.readouterr()
    assert "fedkace_seed-0 " in told.out and "er_seed-0" not in told.out
    assert f"{study / 'er_seed-0'} is left out: the run is not finished" in told.err
    assert f"{study / 'report'} is left out: it holds no run" in told.err


def test_without_any_finished_run_it_says_what_to_name(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(study / "report"), str(study / "er_seed-0")]) == 2
    assert "no finished run; name folders of studies or of runs" in capsys.readouterr().err


def test_regret_is_the_one_that_run_prints(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Centralized of the same study counts, whether it is named or not."""
    for folders in ([study], [study / "fedkace_seed-0"]):
        assert main(["table", *map(str, folders)]) == 0
        assert rows(capsys)["fedkace_seed-0"][:2] == ["55.00", "30.00"]


def test_regret_is_measured_from_the_reference_of_the_same_precision(tmp_path: Path) -> None:
    for precision, upper, own in (("bf16", 0.9, 0.5), ("fp32", 0.8, 0.6)):
        finish(
            write_run(
                tmp_path / "s", f"centralized_{precision}", [upper] * 2, method="centralized", precision=precision
            )
        )
        finish(write_run(tmp_path / "s", f"er_{precision}", [own] * 2, method="er", precision=precision))
    table = {run.name: run.regret for run in find_runs([tmp_path / "s"])[0]}
    report = load_results(tmp_path / "s").runs.set_index("run")["ar"].to_dict()
    assert (
        table == pytest.approx(report)
        and table["er_fp32"] == pytest.approx(0.2)
        and table["er_bf16"] == pytest.approx(0.4)
    )


def test_runs_keep_the_names_of_their_folders(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study / "fedkace_seed-0").rename(study / "fedkace_epochs-5")
    (study / "fedkace_seed-0.20260101-000000").rename(study / "fedkace_epochs-9")
    assert main(["table", str(study)]) == 0
    assert {"fedkace_epochs-5", "fedkace_epochs-9"} <= set(rows(capsys))
    twin = finish(write_run(tmp_path / "other", "fedkace_epochs-5", [0.2, 0.2]))
    assert main(["table", str(study / "fedkace_epochs-5"), str(twin)]) == 0
    assert {"study/fedkace_epochs-5", "other/fedkace_epochs-5"} <= set(rows(capsys))


def test_only_methods_that_switch_say_how_many_have(study: Path) -> None:
    runs, _ = find_runs([study])
    told = {run.name: run.switched for run in runs}
    assert told == {"fedkace_seed-0": "0 of 2", "fedavg_seed-0": "-", "centralized_seed-0": "-"}


def test_a_narrow_terminal_loses_columns_of_bytes_and_no_letter_of_a_name(tmp_path: Path) -> None:
    from rich.console import Console

    name = "fedkace_imagenet100_overlap-4_seed-0"
    folder = finish(write_run(tmp_path, name, [0.5, 0.6]))
    runs, _ = find_runs([folder])
    for width in (80, 60, 46):
        shown = shown_columns(runs, width)
        console = Console(width=width)
        with console.capture() as capture:
            console.print(summary_table(runs, width))
        lines = capture.get().splitlines()
        assert len(lines) == 2 and name in lines[1] and "…" not in capture.get(), width
        assert "aa" in shown and "down" not in shown
        assert set(hidden_columns(runs, width)) == set(COLUMNS) - {"ar", "fwt", "alarms"} - set(shown)
    assert set(shown_columns(runs, 200)) == set(COLUMNS) - {"ar", "fwt", "alarms"}  # without a value


def test_columns_of_bytes_are_dropped_first_and_those_that_are_missing_are_named(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, _ = find_runs([study])
    whole = shown_columns(runs, 200)
    sizes = [len(hidden_columns(runs, width)) for width in range(200, 20, -1)]
    assert sizes == sorted(sizes) and "bwt" in whole
    width = next(width for width in range(200, 20, -1) if len(hidden_columns(runs, width)) == 2)
    assert hidden_columns(runs, width) == ["down", "up"]
    monkeypatch.setattr("fedkace_flwr.experiments.__main__._PLAIN_WIDTH", width)
    assert main(["table", str(study)]) == 0
    head, _, command = capsys.readouterr().out.splitlines()[-1].partition(": python -m experiments ")
    assert head == "not shown: down, up; to print them"
    assert shlex.split(command) == ["table", str(study), "--columns", "down", "up"]
    assert main(shlex.split(command)) == 0
    out = capsys.readouterr().out
    assert "MB down" in out and "MB up" in out and "not shown" not in out
    several = ["table", *map(str, sorted(study.glob("*_seed-0")))]
    assert main(several) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "not shown: down, up; to print them, add --columns down up"
    assert main([*several, "--columns", "down", "up"]) == 0


def test_failures_are_shown_in_any_terminal_if_there_are_some(study: Path) -> None:
    for width in (20, 60):
        assert "failures" not in shown_columns(find_runs([study])[0], width)
    finish(study / "fedavg_seed-0", failures=3)
    for width in (20, 60, 200):
        assert "failures" in shown_columns(find_runs([study])[0], width)


def test_a_folder_of_studies_may_be_named(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(write_run(study.parent / "other", "fedkace_seed-0", [0.2, 0.2]))
    finish(write_run(study.parent, "alone", [0.2, 0.2]))
    for run in ("study/fedkace_seed-0", "alone"):
        (study.parent / run / "model").mkdir()
        (study.parent / run / "model" / "config.json").write_text("{}")
    assert main(["table", str(study.parent)]) == 0
    told = capsys.readouterr()
    names = {line.split()[0] for line in told.out.splitlines() if "." in line}
    assert names == {"alone", "study/fedkace_seed-0", "other/fedkace_seed-0", "fedavg_seed-0", "centralized_seed-0"}
    assert told.err.count("left out") == 1  # the unfinished run
    assert main(["report", str(study.parent / "other" / "..")]) == 0  # whose only run lies in it
    assert main(["report", str(study), str(study.parent / "stdy")]) == 2
    assert "stdy: is not a folder; must be a results folder" in capsys.readouterr().err


def test_columns_may_be_chosen_and_a_misspelt_one_is_answered_with_the_nearest(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(study), "--columns", "final", "aa"]) == 0
    assert rows(capsys)["fedkace_seed-0"] == ["55.00", "60.00"]
    assert main(["table", str(study), "--columns", "finl"]) == 2
    assert "--columns finl: must be one of aa, ar, " in (told := capsys.readouterr().err)
    assert told.rstrip().endswith("did you mean final?")


def test_abbreviations_are_explained_below_the_table(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(study)]) == 0
    out = capsys.readouterr().out
    for heading in ("AA", "AR", "final", "chance", "switched"):
        assert any(line.startswith(f"{heading}: ") for line in out.splitlines()), heading


def test_a_damaged_summary_is_named(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study / "fedavg_seed-0" / "summary.json").write_text("{")
    assert main(["table", str(study)]) == 2
    assert str(study / "fedavg_seed-0" / "summary.json") in capsys.readouterr().err.replace("\n", "")


def test_a_run_with_a_record_of_an_earlier_version_is_listed(tmp_path: Path) -> None:
    folder = finish(write_run(tmp_path, "fedkace_seed-0", [0.5]))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in ("method", "clients", "seed")}))
    (run,), notes = find_runs([folder])
    assert (run.name, run.regret, notes) == ("fedkace_seed-0", None, [])


@pytest.mark.parametrize(
    ("clipped", "attack", "defence"), [(None, "none", "off"), (1, "none", "on"), (None, "sign-flip", "on")]
)
def test_bounds_of_earlier_versions_count_where_they_changed_an_update_or_met_an_attack(
    tmp_path: Path, clipped: int | None, attack: str, defence: str
) -> None:
    folder = write_run(tmp_path, "fedkace_seed-0", [0.5])
    config = {key: value for key, value in json.loads((folder / "config.json").read_text()).items() if key != "defence"}
    (folder / "config.json").write_text(json.dumps({**config, "clip-bound": 3.0, "norm-bound": 0, "attack": attack}))
    (line,) = (folder / "rounds.jsonl").read_text().splitlines()
    (folder / "rounds.jsonl").write_text(json.dumps(json.loads(line) | {"clipped_layers": [None, clipped]}) + "\n")
    assert Run(folder).config().aggregation.defence == defence


def test_table_and_report_say_what_the_defence_did(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study / "fedavg_seed-0" / "rounds.jsonl"
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    rejected = {"client": 1, "phase": "training", "reason": "too far", "kind": "norm"}
    first |= {"failures": [rejected, {**rejected, "kind": "silent"}], "clipped_layers": [2, None, 1]}
    path.write_text("".join(f"{json.dumps(record)}\n" for record in (first, second)))
    assert main(["table", str(study)]) == 0
    assert "fedavg_seed-0: 1 update rejected, 2 clipped by the defence" in capsys.readouterr().out
    (loaded,) = load_results(study).studies
    assert "1 update rejected, 2 clipped by the defence, in 1 of 4 runs." in loaded.remarks


def test_table_and_report_name_a_run_that_was_stopped_early(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((study / "fedavg_seed-0" / "config.json").read_text())
    (study / "fedavg_seed-0" / "config.json").write_text(json.dumps(config | {"rounds": 9}))
    assert main(["table", str(study)]) == 0
    assert "fedavg_seed-0: stopped after 2 of 9 rounds" in capsys.readouterr().out
    (loaded,) = load_results(study).studies
    assert "Stopped early, and counted as unfinished: fedavg_seed-0 (2 of 9 rounds)." in loaded.remarks
