"""Edge machines as real processes: TLS, keys, inboxes; and machines that go down at the worst moments."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.common import SMALL
from support.systems.federation import Federation, assert_same_weights, results_of, until

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.feed import feed
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.inference.predict import main as predict

ROUNDS = 3
STREAM = {**SMALL, "clients": 2, "rounds": ROUNDS, "epochs": 80, "samples-per-class": 6, "normalise": False}
EDGE = {
    **STREAM,
    "dataset": "inbox",
    "class-names": ",".join("0123456789"),
    "image-size": 8,
    "inbox-bound": 12,  # a chunk, which is one file
}
# Nobody continues without a machine that is away: the round is repeated until it is back. The probe finds messages
# that were lost with the machine.
PATIENT = {"quorum": 1.0, "below-quorum": "repeat:100", "probe": 30}

pytestmark = [pytest.mark.slow, pytest.mark.federation, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test images, for all nodes."""
    folder = tmp_path_factory.mktemp("tests")
    feed(Config.parse({**STREAM, "rounds": 1}), folder)
    return folder / "client-0" / "test"


@pytest.fixture(scope="module")
def federation(tests: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    options = ["--nodes", "2", "--inboxes", "--node-config", f'test="{tests}"']
    made = Federation(tmp_path_factory.mktemp("edge"), *options)
    try:
        yield made
    finally:
        made.script("stop")


def arrive(federation: Federation, folder: Path) -> None:
    """Put everything that the cameras will see into the inboxes, one file for each round."""
    config = Config.parse(STREAM)
    feed(config, folder)
    for client in range(config.stream.clients):
        new = federation.folder / f"node-{client + 1}" / "inbox" / "new"
        new.mkdir(parents=True, exist_ok=True)
        for path in (folder / f"client-{client}" / "new").iterdir():
            shutil.move(path, new / path.name)


def test_a_machine_that_dies_before_during_and_after_training_loses_no_sample_and_learns_none_twice(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rounds over the inboxes give the numbers of an undisturbed run over the same stream in one process."""
    run_inline(Config.parse({**STREAM, "results-dir": str(tmp_path), "run-name": "whole"}))
    arrive(federation, tmp_path / "fed")
    federation.started()
    home = federation.folder / "node-2"
    number = federation.submit("killed", {**EDGE, **PATIENT})

    federation.after_round("killed", 1)
    kill(home)  # before training: round 2 is about to begin
    federation.started()

    watch(federation, lambda: taken(home, 2) and not state(home, 2), "the machine trains in round 2")
    kill(home)
    assert taken(home, 2) and not state(home, 2)
    federation.started()

    watch(federation, lambda: state(home, 3), "round 3 is learned")
    kill(home)  # after training: the state is on disk, the reply perhaps not yet sent
    federation.started()

    run = federation.finished(number)
    assert run["status"] == "finished:completed", run
    assert without_outages(federation.results / "killed") == without_outages(tmp_path / "whole")
    assert_same_weights(federation.results / "killed", tmp_path / "whole")
    assert "https://" in federation.log("superlink") and "http://127" not in federation.log("superlink")
    for name in ("node-1", "node-2"):
        folder = federation.folder / name
        assert not list((folder / "inbox" / "new").iterdir()) and not list((folder / "inbox" / "rejected").iterdir())
        assert ledger(folder) == [f"chunk-{each:06d}.npz" for each in range(1, ROUNDS + 1)]
        kept = [path.name for path in (folder / "state").iterdir()]
        assert kept == [name], "each node keeps its own client alone"
    no_picture = federation.folder / "node-1" / "inbox"  # a folder: the answer is one line and no traceback
    assert predict(["--state", str(federation.folder / "node-1" / "state" / "node-1"), str(no_picture)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def processes(home: Path) -> list[psutil.Process]:
    """The SuperNode of a machine and what it has started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("FEDKACE_MEMBER") == str(home):
                found.append(process)
    return found


def kill(home: Path) -> None:
    """The machine goes down: its process group, in an instant in which no training can end, and then any other process."""
    os.killpg(int((home / "pid").read_text()), signal.SIGKILL)
    for process in processes(home):
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


def watch(federation: Federation, what: Callable[[], object], goal: str) -> None:
    """Wait for a short moment of a run."""
    until(what, goal, pause=0.02, log=lambda: federation.log("node-2")[-500:])


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
