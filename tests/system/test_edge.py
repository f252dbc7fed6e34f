"""Edge machines as real processes: TLS, keys, inboxes; and machines that go down at the worst moments."""

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.common import SMALL
from support.federation import STALL_SECONDS, Federation, assert_same_numbers, results_of

from experiments.feed import feed
from experiments.running.inline import run_inline
from fedkace_flwr.config import Config
from fedkace_flwr.inference.predict import main as predict

ROUNDS = 6
STREAM = {**SMALL, "clients": 4, "rounds": ROUNDS, "samples-per-class": 6, "normalise": False}
EDGE = {
    **STREAM,
    "data-source": "inbox",
    "class-names": ",".join("0123456789"),
    "image-size": 8,
    "inbox-bound": 12,  # a chunk, which is one file
}
# What a machine that comes back needs: nobody goes on without it, and the round is asked again until it is there.
# A node that is back before the server has noticed that it was away never answers what it had been asked: that phase
# lasts until its deadline.
PATIENT = {"quorum": 1.0, "below-quorum": "repeat", "below-quorum-limit": 100, "deadline": 240.0}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test images, for all nodes."""
    folder = tmp_path_factory.mktemp("tests")
    feed(Config.parse({**STREAM, "rounds": 1}), folder)
    return folder / "client-0" / "test"


@pytest.fixture(scope="module")
def federation(tests: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    options = ["--nodes", "4", "--inboxes", "--node-config", f'test="{tests}"']
    made = Federation(tmp_path_factory.mktemp("edge"), *options)
    try:
        yield made
    finally:
        made.script("stop")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run over the same samples in one process, to which nothing happens."""

    def run(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        run_inline(Config.parse({**STREAM, **changes, "results-dir": str(folder), "run-name": "whole"}))
        return folder / "whole"

    return run


def arrive(federation: Federation, folder: Path, **changes: Any) -> None:
    """Everything that the cameras will see lies in the inboxes, a round's worth a file."""
    config = Config.parse({**STREAM, **changes})
    feed(config, folder)
    for client in range(config.stream.clients):
        new = federation.folder / f"node-{client + 1}" / "inbox" / "new"
        new.mkdir(parents=True, exist_ok=True)
        for path in (folder / f"client-{client}" / "new").iterdir():
            shutil.move(path, new / path.name)


def test_six_rounds_over_inboxes_give_the_numbers_of_the_stream(
    federation: Federation, whole: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrive(federation, tmp_path)
    federation.started()
    run = federation.finished(federation.submit("six", EDGE))
    assert run["status"] == "finished:completed", run
    assert_same_numbers(federation.results / "six", whole())
    assert "https://" in federation.log("superlink") and "http://127" not in federation.log("superlink")
    for number in range(1, 5):
        home = federation.folder / f"node-{number}"
        assert not list((home / "inbox" / "new").iterdir()) and not list((home / "inbox" / "rejected").iterdir())
        assert ledger(home) == [f"chunk-{each:06d}.npz" for each in range(1, ROUNDS + 1)]
        kept = [path.name for path in (home / "state").iterdir()]
        assert kept == [f"node-{number}"], "each node keeps its own client alone"
    pictures = federation.folder / "node-1" / "inbox"  # not a picture: the answer is one line, and no traceback
    assert predict(["--state", str(federation.folder / "node-1" / "state" / "node-1"), str(pictures)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_machine_that_dies_before_during_and_after_training_loses_nothing_and_learns_nothing_twice(
    federation: Federation, whole: Callable[..., Path], tmp_path: Path
) -> None:
    told = {**EDGE, **PATIENT, "clients": 2, "seed": 8, "epochs": 40}
    arrive(federation, tmp_path, clients=2, seed=8)
    federation.started()
    home = federation.folder / "node-2"
    number = federation.submit("killed", told)

    federation.after_round("killed", 1)
    kill(home)  # before: the round is about to begin
    federation.started()

    watch(federation, lambda: taken(home, 3) and not state(home, 3), "the machine trains in round 3")
    kill(home)
    assert taken(home, 3) and not state(home, 3)
    federation.started()

    watch(federation, lambda: state(home, 5), "round 5 is learned")
    kill(home)  # after: what it has learned is on disk, its answer perhaps not yet sent
    federation.started()

    run = federation.finished(number)
    assert run["status"] == "finished:completed", run
    undisturbed = whole(clients=2, seed=8, epochs=40)
    assert without_outages(federation.results / "killed") == without_outages(undisturbed)
    assert ledger(home) == [f"chunk-{each:06d}.npz" for each in range(1, ROUNDS + 1)]
    assert ledger(home) == ledger(federation.folder / "node-1")


def kill(home: Path) -> None:
    """The machine goes down: the SuperNode and what it has started."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("FEDKACE_MEMBER") == str(home):
                process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue


def watch(federation: Federation, what: Callable[[], object], goal: str) -> None:
    """Wait for a short moment of a run."""
    end = time.monotonic() + STALL_SECONDS
    while not what():
        assert time.monotonic() < end, (
            f"not within {STALL_SECONDS:g} seconds: {goal}; {federation.log('node-2')[-500:]}"
        )
        time.sleep(0.005)


def taken(home: Path, number: int) -> list[Path]:
    return list((home / "inbox" / "taken").glob(f"*-{number:06d}"))


def state(home: Path, number: int) -> list[Path]:
    return list((home / "state").rglob(f"state-{number:06d}.npz"))


def ledger(home: Path) -> list[str]:
    """The files of the newest run that are learned, each as often as it was."""
    runs = sorted({path.name.split("-")[0] for part in ("taken", "done") for path in (home / "inbox" / part).iterdir()})
    newest = max(runs, key=lambda run: max(p.stat().st_mtime for p in (home / "inbox").glob(f"*/{run}-*")))
    return sorted(path.name for path in (home / "inbox").glob(f"*/{newest}-*/*.npz"))


def without_outages(folder: Path) -> list[dict[str, Any]]:
    """A run's records, less what is said of clients that could not be reached for a while."""
    records = results_of(folder)
    for record in records:
        record["failures"] = []
        record.pop("repeated", None)
    return records
