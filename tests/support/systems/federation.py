"""A federation of real processes on the loopback, started by the scripts of ``deploy/``."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from fedkace_flwr.experiments.running.processes import all_of, finish, flower_environment, staged_app
from fedkace_flwr.storage.checkpoint import Checkpoints
from support.tools import need_tools

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
CONNECTION = "under-test"
# The limit for a single command. Whole runs have no limit other than the test's own timeout.
STEP_SECONDS = 600.0


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of the scripts and Flower's command line: this Python first, and a separate Flower home."""
    # Without compiled files, every message would compile the app again.
    left_out = ("FLWR", "RAY", "PYTHONDONTWRITEBYTECODE")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    return flower_environment(home / "flwr", kept) | more


def serverapps_of(home: Path) -> list[psutil.Process]:
    """Return the running ServerApps whose Flower home is that of :func:`environment`."""
    found = []
    for process in all_of("FLWR_HOME", str(home / "flwr")):
        with contextlib.suppress(psutil.Error):
            if "flwr-serverapp" in " ".join(process.cmdline()):
                found.append(process)
    return found


def wait_for_serverapps(home: Path) -> None:
    """Wait until no ServerApp of this Flower home is running.

    One that has ended counts as gone even if its parent has not collected it yet; psutil's own waiting would not return
    before that, and the parent collects it only when it starts the next one.
    """
    until(lambda: not serverapps_of(home), "the ServerApp ends", pause=1)


def script(name: str, *arguments: object, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a script of ``deploy/`` and wait for its end."""
    return finish([str(DEPLOY / name), *map(str, arguments)], env, STEP_SECONDS)


def good(name: str, *arguments: object, env: dict[str, str]) -> str:
    """Run a script that succeeds, and return its output."""
    done = script(name, *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(name: str, *arguments: object, env: dict[str, str]) -> str:
    """Run a script that fails, and return its one line."""
    done = script(name, *arguments, env=env)
    assert done.returncode != 0 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


def until(what: Callable[[], T], goal: str, *, pause: float = 0.2, log: Callable[[], str] = str) -> T:
    """Wait until a condition is true, and return its value; the test's timeout is the only limit.

    Parameters
    ----------
    what : callable
        The condition.
    goal : str
        Description of the condition, for the report of a timeout.
    pause : float
        Seconds between two checks.
    log : callable
        Further text for the report of a timeout.
    """
    try:
        while not (value := what()):
            time.sleep(pause)
    except BaseException as stopped:
        stopped.add_note(f"while waiting: {goal}\n{log()}")
        raise
    return value


class Federation:
    """SuperLink and SuperNodes with TLS and keys.

    Parameters
    ----------
    folder : Path
        Folder for everything that the federation writes.
    setup : sequence of str
        Further options of ``federation.sh setup``.
    env : mapping, optional
        Further environment variables of all its processes.
    """

    def __init__(self, folder: Path, *setup: str, env: dict[str, str] | None = None) -> None:
        need_tools("openssl", "ssh-keygen")
        self.folder = folder / "federation"
        self.app = staged_app(folder / "app")
        self.results = folder / "results"
        self.env = environment(folder, **(env or {}))
        options = ["--port", "0", "--connection", CONNECTION, *setup]
        self.must("setup", *options)

    def script(self, task: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
        """``federation.sh TASK FOLDER ...``."""
        return script("federation.sh", task, self.folder, *arguments, env=self.env)

    def must(self, task: str, *arguments: object) -> str:
        """Run the script, assert that it succeeds, and return what it prints."""
        done = self.script(task, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Run Flower's command line and return its JSON output."""
        command = ["flwr", *arguments, "--format", "json"]
        done = subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=STEP_SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        return answer

    def submit(self, name: str, config: dict[str, Any]) -> str:
        """Start a run of the app with a configuration, and return its id."""
        path = self.folder.parent / f"{name}.toml"
        told = {"results-dir": str(self.results), "run-name": name, **config}
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items()))
        return str(self.flwr("run", str(self.app), CONNECTION, "--run-config", str(path))["run-id"])

    def run(self, number: str) -> dict[str, Any]:
        """Return the SuperLink's description of a run."""
        found: dict[str, Any] = self.flwr("list", CONNECTION, "--run-id", number)["runs"][0]
        return found

    def finished(self, number: str) -> dict[str, Any]:
        """Wait for the end of a run and return the SuperLink's description of it.

        The command line takes a second of CPU time, so it is called only when no ServerApp is running any more.
        """

        def over() -> dict[str, Any]:
            wait_for_serverapps(self.folder.parent)
            run = self.run(number)
            return run if run["status"].startswith("finished") else {}

        return until(over, f"run {number} ends", pause=3, log=self.logs)

    def rounds(self, name: str) -> int:
        """Return the number of rounds that a run has recorded."""
        path = self.results / name / "rounds.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def after_round(self, name: str, number: int) -> None:
        """Wait until a run has recorded a round."""
        until(lambda: self.rounds(name) >= number, f"round {number} of {name} is recorded", log=self.logs)

    def logs(self) -> str:
        """Return the ends of all members' logs."""
        return "\n".join(
            f"{path.parent.name}: {self.log(path.parent.name)[-500:]}" for path in self.folder.glob("*/log")
        )

    def log(self, member: str) -> str:
        """Return a member's log without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", (self.folder / member / "log").read_text(errors="replace"))

    def process(self, member: str) -> psutil.Process:
        """Return a member's main process."""
        return psutil.Process(int((self.folder / member / "pid").read_text()))

    def processes(self, words: str = "") -> list[psutil.Process]:
        """Return all processes of this federation whose command line contains the words."""
        found = []
        for process in psutil.process_iter():
            try:
                member = process.environ().get("FEDKACE_MEMBER", "")
                if Path(member).parent == self.folder and words in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill_all(self, words: str = "") -> None:
        """Kill all processes whose command line contains the words; some end by themselves when their parents die."""
        for process in self.processes(words):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def kill(self, member: str) -> None:
        """Kill a member with SIGKILL, but not its children."""
        process = self.process(member)
        process.send_signal(signal.SIGKILL)
        process.wait(STEP_SECONDS)

    def nodes(self) -> list[str]:
        """Return the status of each registered node."""
        return [node["status"] for node in self.flwr("supernode", "list", CONNECTION)["nodes"]]

    def started(self) -> None:
        """Start stopped members, which includes waiting until the SuperLink admits a killed node again."""
        self.must("start")


def results_of(folder: Path) -> list[dict[str, Any]]:
    """Return a run's records without times and bytes, which depend on the transport."""
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in ("seconds", "bytes")} for record in records]


def assert_same_numbers(folder: Path, whole: Path) -> None:
    """Assert that two runs have the same records and the same final model."""
    assert results_of(folder) == results_of(whole)
    assert_same_weights(folder, whole)


def assert_same_weights(folder: Path, whole: Path) -> None:
    """Assert that the newest checkpoints of two runs hold the same model, bit for bit."""
    mine, theirs = Checkpoints(folder / "server").newest(), Checkpoints(whole / "server").newest()
    assert mine is not None and theirs is not None and mine.round == theirs.round
    assert all(mine.weights[name].tobytes() == theirs.weights[name].tobytes() for name in theirs.weights)
