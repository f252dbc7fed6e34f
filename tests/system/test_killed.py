"""Real processes are killed in the middle of real runs; a resumed run equals an undisturbed one."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.common import SMALL, rounds_of

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.processes import all_of, end_all_of
from fedkace_flwr.storage.checkpoint import Checkpoints

ROOT = Path(__file__).parents[2]
ROUNDS = 8
MORE_ROUNDS = 40  # several are completed before a signal takes effect
SIX_OR_MORE = rf"round ([6-9]|\d\d) of {MORE_ROUNDS}"  # a runner does not list the rounds of the one before it
MARK = "FEDKACE_TEST_MARK"

pytestmark = [pytest.mark.slow, pytest.mark.federation, pytest.mark.timeout(1200)]


def undisturbed(folder: Path, rounds: int) -> Path:
    """A run on the inline engine; every comparison with it also compares Flower's engine with this one."""
    run_inline(Config.parse({**SMALL, "rounds": rounds, "results-dir": str(folder), "run-name": "whole"}))
    return folder / "whole"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("whole"), ROUNDS)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("more"), MORE_ROUNDS)


def study_of(folder: Path, rounds: int) -> Path:
    path = folder / "killed.yaml"
    settings = "".join(f"  {key}: {value}\n" for key, value in {**SMALL, "rounds": rounds}.items())
    path.write_text(f"config:\n{settings}workers: 2\n")
    return path


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Path]:
    yield study_of(tmp_path, ROUNDS)
    end_all_of(MARK, str(tmp_path))


def start(study: Path, engine: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "experiments", "run", str(study), "--engine", engine]
    return subprocess.Popen(
        [*command, "--results", str(study.parent / "results")],
        cwd=ROOT,
        env={**os.environ, MARK: str(study.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )


def wait_for(runner: "subprocess.Popen[str]", pattern: str) -> list[str]:
    """Read the runner's output up to a line in which a pattern is found."""
    assert runner.stdout is not None
    lines = []
    for line in runner.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError("".join(lines))


def running(study: Path, name: str = "") -> list[psutil.Process]:
    """Processes of a test's runner whose command line contains a text."""
    found = []
    for process in all_of(MARK, str(study.parent)):
        with contextlib.suppress(psutil.Error):
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def assert_equal_to(whole: Path, folder: Path) -> None:
    assert rounds_of(folder) == rounds_of(whole)
    mine, theirs = Checkpoints(folder / "server").newest(), Checkpoints(whole / "server").newest()
    assert mine is not None and theirs is not None and mine.round == theirs.round
    assert all(mine.weights[name].tobytes() == theirs.weights[name].tobytes() for name in theirs.weights)


def result_of(study: Path) -> Path:
    return study.parent / "results" / "killed" / f"fedkace_seed-{SMALL['seed']}"


def wait_until_gone(study: Path) -> None:
    """Wait for the end of all processes of a test's runner; if they never end, the test runs into its timeout."""
    while left := running(study):
        psutil.wait_procs(left, timeout=1)


@pytest.mark.parametrize(
    ("engine", "ends"),
    [
        (
            "inline",
            {"starting": signal.SIGKILL, "round 1 of 40": signal.SIGINT, SIX_OR_MORE: signal.SIGKILL},
        ),
        ("flower", {"round 1 of 40": signal.SIGKILL, SIX_OR_MORE: signal.SIGTERM}),
    ],
    ids=["inline", "flower"],
)
def test_a_runner_that_is_killed_or_interrupted_leaves_no_process_and_can_be_restarted(
    engine: str, ends: dict[str, signal.Signals], study: Path, more: Path
) -> None:
    """One study is stopped again and again; SIGINT and SIGTERM unwind alike."""
    study_of(study.parent, MORE_ROUNDS)
    for moment, number in ends.items():
        runner = start(study, engine)
        wait_for(runner, moment)
        runner.send_signal(number)
        if number == signal.SIGKILL:
            runner.wait()
        else:
            output, _ = runner.communicate()
            assert runner.returncode == 128 + number and "interrupted" in output
        wait_until_gone(study)
    recorded = lines_of(result_of(study))
    assert 6 <= len(recorded) < MORE_ROUNDS
    runner = start(study, engine)
    output, _ = runner.communicate()
    assert runner.returncode == 0, output
    # Lines hold seconds, so equal ones were not written twice; the last may have been, if it had no checkpoint yet.
    assert lines_of(result_of(study))[: len(recorded) - 1] == recorded[:-1]
    assert_equal_to(more, result_of(study))


def lines_of(folder: Path) -> list[str]:
    """The complete lines of a run's record."""
    return [line for line in (folder / "rounds.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_parts_of_flower_are_killed_one_after_another(study: Path, more: Path) -> None:
    """Each costs one attempt; that rounds are finished in between lets the runner go on after more than two."""
    study_of(study.parent, MORE_ROUNDS)
    victims = (
        ("starting", "fedkace_flwr.experiments.running.simulation"),
        ("round ", "fedkace_flwr.experiments.running.simulation"),
        ("round ", "ray::ClientAppActor"),
        ("round ", "raylet/raylet"),
    )
    runner = start(study, "flower")
    said = ""
    for moment, victim in victims:
        if said:
            said += "".join(wait_for(runner, "starting again|continuing after"))
        said += "".join(wait_for(runner, moment))
        while not (found := running(study, victim)) and runner.poll() is None:
            time.sleep(0.02)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another
                process.send_signal(signal.SIGKILL)
        assert found, f"{victim} is not running: {said}"
    output, _ = runner.communicate()
    assert runner.returncode == 0, said + output
    assert_equal_to(more, result_of(study))
    wait_until_gone(study)


def test_two_runners_share_a_study(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "shared.yaml"
    settings = "".join(f"  {key}: {value}\n" for key, value in {**SMALL, "rounds": ROUNDS}.items() if key != "seed")
    path.write_text(f"config:\n{settings}grid: {{seed: [7, 8, 9]}}\nworkers: 1\n")
    runners = [start(path, "inline") for _ in range(2)]
    outputs = [runner.communicate()[0] for runner in runners]
    assert [runner.returncode for runner in runners] == [0, 0], outputs
    begun = [line for output in outputs for line in output.splitlines() if "starting" in line]
    assert sorted(begun) == [f"fedkace_seed-{seed}: starting, 8 rounds" for seed in (7, 8, 9)]
    assert all(f"fedkace_seed-{seed}" in output.split("AA %")[1] for seed in (7, 8, 9) for output in outputs)
    assert_equal_to(whole, tmp_path / "results" / "shared" / "fedkace_seed-7")
    assert not list((tmp_path / "results" / "shared").glob("*.2*"))
