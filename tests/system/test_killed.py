"""Real processes are killed in the middle of real runs; what is resumed equals what was never interrupted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.common import SMALL, rounds_of

from experiments.running.inline import run_inline
from fedkace_flwr.config import Config
from fedkace_flwr.storage.checkpoint import Checkpoints

ROOT = Path(__file__).parents[2]
ROUNDS = 6
MARK = "FEDKACE_TEST_MARK"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to, on the inline engine: Flower's gives the same numbers."""
    folder = tmp_path_factory.mktemp("whole")
    run_inline(Config.parse({**SMALL, "rounds": ROUNDS, "results-dir": str(folder), "run-name": "whole"}))
    return folder / "whole"


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "killed.yaml"
    settings = "".join(f"  {key}: {value}\n" for key, value in {**SMALL, "rounds": ROUNDS}.items())
    path.write_text(f"config:\n{settings}workers: 2\n")
    yield path
    for process in marked(tmp_path):
        process.kill()


def start(study: Path, engine: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "experiments", "run", str(study), "--engine", engine]
    return subprocess.Popen(
        [*command, "--results", str(study.parent / "results")],
        cwd=ROOT,
        env={**os.environ, MARK: str(study.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(runner: "subprocess.Popen[str]", text: str) -> list[str]:
    """Read the runner's output up to a line that holds a text."""
    assert runner.stdout is not None
    lines = []
    for line in runner.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


def marked(folder: Path, name: str = "") -> list[psutil.Process]:
    """Processes that belong to a test's runner, by a part of their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and name in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_equal_to(whole: Path, folder: Path) -> None:
    assert rounds_of(folder) == rounds_of(whole)
    mine, theirs = Checkpoints(folder / "server").newest(), Checkpoints(whole / "server").newest()
    assert mine is not None and theirs is not None and mine.round == theirs.round == ROUNDS
    assert all(mine.weights[name].tobytes() == theirs.weights[name].tobytes() for name in theirs.weights)


def result_of(study: Path) -> Path:
    return study.parent / "results" / "killed" / f"fedkace_seed-{SMALL['seed']}"


def gone(folder: Path, seconds: float = 60) -> bool:
    """Whether all of a test's processes end within a time."""
    end = time.monotonic() + seconds
    while marked(folder) and time.monotonic() < end:
        psutil.wait_procs(marked(folder), timeout=1)
    return not marked(folder)


@pytest.mark.parametrize("engine", ["inline", "flower"])
def test_a_killed_runner_leaves_no_process_and_the_same_command_goes_on(engine: str, study: Path, whole: Path) -> None:
    for moment in ("starting", "round 2 of 6", "round 4 of 6"):
        runner = start(study, engine)
        wait_for(runner, moment)
        runner.kill()
        runner.wait()
        assert gone(study.parent), [process.cmdline() for process in marked(study.parent)]
    runner = start(study, engine)
    output, _ = runner.communicate()
    assert runner.returncode == 0, output
    assert "round 2 of 6" not in output or "round 3 of 6" in output
    assert_equal_to(whole, result_of(study))


@pytest.mark.parametrize("victim", ["flower-superlink", "flwr-simulation", "ray::ClientAppActor"])
@pytest.mark.parametrize("moment", ["starting", "round 2 of 6", "round 5 of 6"])
def test_a_part_of_flower_that_is_killed_costs_one_attempt(victim: str, moment: str, study: Path, whole: Path) -> None:
    runner = start(study, "flower")
    wait_for(runner, moment)
    end = time.monotonic() + 60
    while not (found := marked(study.parent, victim)) and time.monotonic() < end:
        time.sleep(0.02)
    for process in found:
        process.send_signal(signal.SIGKILL)
    output, _ = runner.communicate()
    assert found and runner.returncode == 0, output
    assert_equal_to(whole, result_of(study))
    assert gone(study.parent)


def test_a_terminated_runner_unwinds_as_an_interrupted_one(study: Path, whole: Path) -> None:
    runner = start(study, "flower")
    wait_for(runner, "round 2 of 6")
    runner.terminate()
    output, _ = runner.communicate()
    assert runner.returncode == 143 and "interrupted" in output
    assert gone(study.parent, seconds=5)
    runner = start(study, "flower")
    output, _ = runner.communicate()
    assert runner.returncode == 0, output
    assert_equal_to(whole, result_of(study))


def test_two_runners_share_a_study(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "shared.yaml"
    settings = "".join(f"  {key}: {value}\n" for key, value in {**SMALL, "rounds": ROUNDS}.items() if key != "seed")
    path.write_text(f"config:\n{settings}grid: {{seed: [7, 8, 9, 10]}}\nworkers: 1\n")
    runners = [start(path, "inline") for _ in range(2)]
    outputs = [runner.communicate()[0] for runner in runners]
    assert [runner.returncode for runner in runners] == [0, 0], outputs
    begun = [line for output in outputs for line in output.splitlines() if "starting" in line]
    assert sorted(begun) == [f"fedkace_seed-{seed}: starting, 6 rounds" for seed in (10, 7, 8, 9)]
    assert all(f"fedkace_seed-{seed}" in output.split("AA %")[1] for seed in (7, 8, 9, 10) for output in outputs)
    assert_equal_to(whole, tmp_path / "results" / "shared" / "fedkace_seed-7")
    assert not list((tmp_path / "results" / "shared").glob("*.2*"))
