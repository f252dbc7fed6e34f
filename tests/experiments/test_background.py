"""Studies in the background: started, continued, paused and reported on, as real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import psutil
import pytest
from support.common import SMALL, rounds_of
from support.made.results import write_run
from support.systems.federation import until
from support.tools import need_tools

from experiments.__main__ import main
from experiments.background.control import pause
from experiments.background.folder import Command, Folder
from experiments.background.status import Progress, seconds_left
from experiments.background.supervisor import lower_own_priority
from experiments.durations import span
from experiments.running.guard import end_all_of
from experiments.running.inline import run_inline
from experiments.studies.study import load_study
from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError

ROOT = Path(__file__).parents[2]
ROUNDS = 24  # enough that a pause comes before the end on a fast machine
SETTINGS = {key: value for key, value in {**SMALL, "rounds": ROUNDS}.items() if key != "seed"}
RUN = f"fedkace_seed-{SMALL['seed']}"


def background(*arguments: object) -> tuple[int, str, str]:
    """Run the command in this process, where it starts at once: its status, output and error output."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(["background", *map(str, arguments)])
    return status, out.getvalue(), err.getvalue()


def good(*arguments: object) -> str:
    status, out, err = background(*arguments)
    assert status == 0, out + err
    return out


def refused(*arguments: object) -> str:
    status, out, err = background(*arguments)
    assert status == 2 and len(err.splitlines()) == 1, out + err
    return err


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    need_tools("git")
    made = Folder(tmp_path / "long")
    yield made
    end_all_of("FEDKACE_BACKGROUND", str(made.path))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_study_is_started_killed_paused_and_continued_to_the_same_numbers(folder: Folder, tmp_path: Path) -> None:
    study = tmp_path / "tiny.yaml"
    study.write_text("".join(["config:\n", *(f"  {key}: {value}\n" for key, value in SETTINGS.items())]))
    path = folder.results / "tiny" / RUN / "rounds.jsonl"

    def rounds_done() -> int:
        return path.read_text().count("\n") if path.exists() else 0

    # Normal priority: at the lowest one, the test would wait for the rest of the machine.
    options = ["--python", sys.executable, "--priority", "normal", "--"]
    command = [sys.executable, "-m", "experiments", "background", "start", str(folder.path), *options]
    subprocess.run([*command, str(study), "--engine", "inline", "--seeds", str(SMALL["seed"])], cwd=ROOT, check=True)
    until(lambda: rounds_done() >= 1, "a round is done")
    assert "running already since" in refused("start", folder.path)

    for process in folder.processes():
        process.kill()
    # A process that is being killed loses its environment, by which it is found, before it lets go of the lock.
    until(lambda: not folder.processes() and not folder.locked, "all processes are gone")
    assert "then killed, or the machine was restarted" in good("status", folder.path)
    killed_after = rounds_done()
    assert 1 <= killed_after < ROUNDS

    good("start", folder.path)
    until(lambda: rounds_done() > killed_after, "the study goes on")
    assert pause(folder)
    assert not folder.processes() and not folder.locked
    told, done = good("status", folder.path), rounds_done()
    assert f"0 of 1 runs and {done} of {ROUNDS} rounds are done" in told and "paused since" in told
    assert "about" in told and killed_after < done < ROUNDS
    assert "nothing is running" in good("pause", folder.path)

    assert "is the folder of" in refused("start", folder.path, "--", "quickstart")
    good("start", folder.path)
    until(lambda: not folder.locked, "the study ends")
    told = good("status", folder.path)
    assert f"1 of 1 runs and {ROUNDS} of {ROUNDS} rounds are done" in told and "finished since" in told
    whole = {**SETTINGS, "seed": SMALL["seed"], "results-dir": str(tmp_path), "run-name": "whole"}
    run_inline(Config.parse(whole))
    assert rounds_of(path.parent) == rounds_of(tmp_path / "whole")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder.source, capture_output=True, text=True, check=True)
    assert (folder.command() or Command("", "", [], "")).commit == head.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_processes_have_the_lowest_priority_unless_told_otherwise(folder: Folder) -> None:
    good("start", folder.path, "--python", sys.executable, "--", "quickstart", "--engine", "inline")

    def lowest(process: psutil.Process) -> bool:
        return os.sched_getscheduler(process.pid) == os.SCHED_IDLE and process.nice() == 19

    until(lambda: [process for process in folder.processes() if lowest(process)], "priority is lowered")
    good("pause", folder.path)
    assert not folder.processes()


def test_what_cannot_be_started_is_refused_in_one_line(tmp_path: Path) -> None:
    need_tools("git")
    assert "lies in the checkout" in refused("start", ROOT / "results" / "long", "--", "quickstart")
    assert "has no command yet" in refused("start", tmp_path / "a")
    assert "did you mean table1?" in refused("start", tmp_path / "b", "--", "tabel1")
    assert "--results and --dry-run" in refused("start", tmp_path / "c", "--", "table1", "--dry-run")
    for action in ("status", "pause"):
        line = refused(action, tmp_path / "d")
        assert line == f"error: {tmp_path}/d: holds no study; start one with: start {tmp_path}/d -- STUDY\n"
    assert "commit no-such" in refused("start", tmp_path / "e", "--commit", "no-such", "--", "quickstart")
    assert "unexpected argument quickstart" in refused("start", tmp_path / "f", "quickstart")
    assert not list(tmp_path.iterdir())  # nothing is left that looks like a study's folder


def test_a_study_in_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused("start", tmp_path / "file" / "long", "--", "quickstart")
    assert line == f"error: {tmp_path}/file/long: cannot be written (Not a directory); choose a writable folder\n"
    for action in ("status", "pause"):
        assert "holds no study" in refused(action, tmp_path / "file" / "long")


def test_the_installation_is_announced_since_it_takes_a_minute(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")  # it fails at once: installing would need a network
    status, out, err = background("start", folder.path, "--", "quickstart")
    assert status == 2 and "a virtual environment in" in err
    assert out == f"installing into {folder.environment}; this takes a minute or two\n"


def test_a_folder_with_other_files_holds_no_study(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for action in ("status", "pause"):
        assert "holds no study" in refused(action, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_study_that_does_not_run_may_be_paused(tmp_path: Path) -> None:
    Folder(tmp_path).keep(Command("0" * 40, sys.executable, ["quickstart"], str(tmp_path)))
    assert good("pause", tmp_path) == "nothing is running\n"


def test_a_start_that_is_still_preparing_is_not_taken_for_an_empty_folder(tmp_path: Path) -> None:
    held = Folder(tmp_path).lock()
    assert held is not None
    assert "is still being prepared" in refused("pause", tmp_path)
    assert "is running already" in refused("start", tmp_path)
    os.close(held)


def test_of_many_runs_only_those_in_progress_are_listed(tmp_path: Path) -> None:
    study = tmp_path / "many.yaml"
    study.write_text("config: {dataset: digits, rounds: 4}\ngrid: {seed: [" + ", ".join(map(str, range(30))) + "]}\n")
    folder = Folder(tmp_path / "many")
    folder.path.mkdir()
    folder.keep(Command("0" * 40, sys.executable, [str(study)], str(tmp_path)))
    begun = next(iter(load_study(study, {}, tmp_path).runs))
    write_run(folder.results / "many", begun, [0.5, 0.6], finished=False)
    told = good("status", folder.path)
    assert [line.split() for line in told.splitlines() if "seed-" in line] == [[begun, "started", "2", "of", "4"]]
    assert "0 of 30 runs and 2 of 120 rounds are done" in told


def test_one_process_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert not folder.locked
    held = folder.lock()
    assert held is not None and folder.lock() is None and folder.locked
    os.close(held)
    assert not folder.locked


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "command.json").write_text('{"commit": 1}')
    with pytest.raises(RunError, match=r"command\.json: is damaged"):
        Folder(tmp_path).command()


def test_the_estimate_takes_a_runs_own_rounds_then_its_methods_then_all() -> None:
    runs = [
        Progress("a", "fedkace", [2.0, 4.0], 4, False),  # two rounds of 3 s
        Progress("b", "fedkace", [], 2, False),  # two rounds of 3 s
        Progress("c", "er", [], 1, False),  # one round of 5 s, the mean of all
        Progress("d", "fedavg", [9.0], 9, True),
    ]
    assert seconds_left(runs, 1) == pytest.approx(6 + 6 + 5)
    assert seconds_left(runs, 2) == pytest.approx(17 / 2)
    assert seconds_left(runs, 9) == pytest.approx(17 / 3)  # no more at once than there are
    assert seconds_left(runs[1:2], 1) is None
    assert seconds_left(runs[3:], 1) == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(59, "59 seconds"), (150, "2.5 minutes"), (9000, "2.5 hours"), (2e6, "23.1 days")]
)
def test_durations_are_in_the_unit_that_suits(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_a_process_can_lower_its_own_priority() -> None:
    code = f"import os; from {lower_own_priority.__module__} import *; lower_own_priority(); print(os.nice(0))"
    # A session of its own, or that of the tests would stay lowered, with the terminal that they were started from.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, start_new_session=True
    )
    assert done.stdout.strip() == "19"
