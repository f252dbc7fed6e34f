"""Superlink and supernodes as real processes, with TLS and authentication, started by the scripts of ``deploy/``.

``test_edge.py`` kills SuperNodes.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.common import SMALL
from support.made.models import picture
from support.made.stored import is_sealed
from support.systems.federation import (
    CONNECTION,
    STEP_SECONDS,
    Federation,
    assert_same_numbers,
    results_of,
    script,
    until,
)

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.ports import free_ports
from fedkace_flwr.experiments.running.processes import finish
from fedkace_flwr.inference.predict import main as predict
from fedkace_flwr.sections import SECAGG_RANGE
from fedkace_flwr.storage import encryption as sealing
from fedkace_flwr.storage.checkpoint import Checkpoints

NUMBERS = {**SMALL, "samples-per-class": 6}
STATE_KEY = "A" * 43 + "="

pytestmark = [
    pytest.mark.slow,
    pytest.mark.federation,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("deployment"),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("deployed"), "--nodes", "3", env={sealing.VARIABLE: STATE_KEY})
    try:
        made.must("start")
        yield made
    finally:
        made.script("stop")


@pytest.fixture
def running(federation: Federation) -> Federation:
    """The federation with all members running, whatever the previous test did to them."""
    federation.started()
    return federation


@pytest.fixture
def stranger(running: Federation) -> Iterator[Any]:
    """Start ``supernode.sh`` with node-1's settings, some of them changed; its exit code and output."""

    def start(**changes: str) -> tuple[int, str]:
        lines = (running.folder / "node-1" / "env").read_text().splitlines()
        settings = {name: value.strip("'") for name, _, value in (line.partition("=") for line in lines)}
        settings["FEDKACE_STATE"] = str(running.folder / "stranger")
        env = {**running.env, **settings, "FEDKACE_RUNTIME_PORT": str(free_ports(1)[0]), **changes}
        done = script("supernode.sh", env=env)
        return done.returncode, done.stdout + done.stderr

    yield start


def test_a_wrong_authority_an_unregistered_key_and_no_key_are_refused(
    running: Federation, stranger: Any, tmp_path: Path
) -> None:
    before = sorted(running.nodes())
    assert script("certificates.sh", "ca", tmp_path / "other", env=running.env).returncode == 0
    code, said = stranger(FEDKACE_CA=str(tmp_path / "other" / "ca.crt"))
    assert code != 0 and "CERTIFICATE_VERIFY_FAILED" in said

    assert script("node-key.sh", tmp_path / "unknown", "unknown", env=running.env).returncode == 0
    code, said = stranger(FEDKACE_KEY=str(tmp_path / "unknown"))
    assert code != 0 and "[code: 2004] Failed to activate SuperNode" in said

    code, said = stranger(FEDKACE_KEY="")
    assert code == 2 and "FEDKACE_KEY is not set" in said
    code, said = stranger(FEDKACE_KEY=str(tmp_path / "nowhere"))
    assert code == 2 and f"{tmp_path}/nowhere (FEDKACE_KEY, this machine's key) does not exist" in said
    superlink = (running.folder / "node-1" / "env").read_text().split("FEDKACE_SUPERLINK='")[1].split("'")[0]
    command = ["flower-supernode", "--superlink", superlink, "--port", str(free_ports(1)[0])]
    command += ["--root-certificates", str(running.folder / "certificates" / "ca.crt")]
    done = finish(command, running.env, STEP_SECONDS)
    assert done.returncode != 0 and "[code: 2001] SuperNode authentication is enabled" in done.stdout + done.stderr
    assert sorted(running.nodes()) == before, "nobody was let in, and nobody who was in was thrown out"


def test_a_run_outlives_the_server_app_and_the_superlink(
    running: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sealing.VARIABLE, STATE_KEY)
    numbers = {**NUMBERS, "clients": 2, "rounds": 3}
    run_inline(Config.parse({**numbers, "results-dir": str(tmp_path), "run-name": "whole"}))
    told = {**numbers, "resume": True}
    number = running.submit("resumed", told)
    running.after_round("resumed", 1)
    running.kill_all("flwr-serverapp")
    run = running.finished(number)
    assert run["status"] == "finished:failed" and "heartbeat" in run["status-details"], run

    number = running.submit("resumed", told)
    running.after_round("resumed", 2)
    running.kill("superlink")
    running.started()
    run = running.finished(number)
    until(lambda: running.nodes() == ["online"] * 3, "the nodes find the SuperLink again by themselves", pause=2)
    if run["status"] == "finished:failed":  # it was away for longer than Flower waits for the ServerApp's heartbeat
        run = running.finished(running.submit("resumed", told))
    assert run["status"] == "finished:completed", run
    assert_same_numbers(running.results / "resumed", tmp_path / "whole")
    (running.folder / "a.png").write_bytes(picture())
    assert predict(["--state", str(running.folder / "node-1" / "state" / "node-1"), str(running.folder / "a.png")]) == 0
    kept = list(running.folder.glob("node-*/state/**/*.npz"))
    assert kept and all(is_sealed(path) for path in kept), "the key reaches Flower's processes"


def test_a_finished_run_goes_on_with_more_rounds_and_refuses_another_method(
    running: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sealing.VARIABLE, STATE_KEY)
    numbers = {**NUMBERS, "clients": 2, "rounds": 2}
    run_inline(Config.parse({**numbers, "results-dir": str(tmp_path), "run-name": "whole"}))
    for changed, end in (({"rounds": 1}, "completed"), ({"method": "er"}, "failed"), ({}, "completed")):
        run = running.finished(running.submit("longer", {**numbers, "resume": True, **changed}))
        assert run["status"] == f"finished:{end}", run
    assert_same_numbers(running.results / "longer", tmp_path / "whole")


def test_masked_updates_of_real_supernodes_add_up_to_the_model_of_a_plain_run(
    running: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sealing.VARIABLE, STATE_KEY)
    numbers = {**NUMBERS, "clients": 3, "rounds": 1}
    run_inline(Config.parse({**numbers, "results-dir": str(tmp_path), "run-name": "plain"}))
    number = running.submit("masked", {**numbers, "secagg": True})
    assert running.finished(number)["status"] == "finished:completed"
    (record,) = results_of(running.results / "masked")
    assert not record["failures"] and record["client_drift"] is None, record
    plain = Checkpoints(tmp_path / "plain" / "server").newest()
    masked = Checkpoints(running.results / "masked" / "server").newest()
    assert plain is not None and masked is not None
    step = 2 * SECAGG_RANGE / 2**22
    for name, array in plain.weights.items():
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_allclose(masked.weights[name], array, atol=step + 1e-6, err_msg=name)


def test_stop_ends_every_process_and_nothing_else_and_a_second_start_knows_the_nodes(running: Federation) -> None:
    others = subprocess.Popen(["sleep", "600"])
    try:
        assert len(running.processes()) >= 8
        running.must("stop")
        assert not running.processes() and others.poll() is None
        assert running.script("status").returncode == 1
        assert running.must("start").count("started") == 5
        assert running.nodes() == ["online"] * 3
    finally:
        others.kill()
        others.wait()


def test_what_cannot_start_says_why_in_one_line(running: Federation, tmp_path: Path) -> None:
    port = [line for line in (running.folder / "superlink" / "env").read_text().splitlines() if "PORT" in line]
    taken = port[0].split("'")[1]
    env = {**running.env, "FEDKACE_CERTIFICATES": str(running.folder / "certificates")}
    env |= {"FEDKACE_DATABASE": str(tmp_path / "db"), "FEDKACE_PORT": taken}
    assert_one_line(
        script("superlink.sh", env=env), f"FEDKACE_PORT = {taken}: port {taken} of 127.0.0.1 is already in use"
    )
    assert_one_line(running.script("setup"), "is already set up")
    assert_one_line(running.script("start", "node-9"), "node-9 is not a member of")
    done = script("connection.sh", CONNECTION, "localhost:1", running.folder / "certificates" / "ca.crt", env=env)
    assert_one_line(done, f"already has superlink.{CONNECTION}")


def assert_one_line(done: "subprocess.CompletedProcess[str]", words: str) -> None:
    assert done.returncode != 0 and done.stderr.startswith("error: ") and words in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_stranger_who_reaches_the_superlink_gets_no_task(running: Federation) -> None:
    """The ServerApp's task holds the token by which it may speak for the whole run."""
    settings = (running.folder / "superexec" / "env").read_text()
    port = settings.split("FEDKACE_PORT='")[1].split("'")[0]
    command = ["flower-superexec", "--runtime-api-address", f"127.0.0.1:{port}"]
    command += ["--root-certificates", str(running.folder / "certificates" / "ca.crt")]
    done = finish(command, running.env, STEP_SECONDS)
    assert "SuperExec authentication failed" in running.log("superlink"), done.stdout + done.stderr


def test_a_node_whose_key_has_been_unregistered_keeps_no_other_member_from_starting(running: Federation) -> None:
    """The last test of this file: the federation has one node less from here on."""
    (number,) = re.findall(r"^(\d+) node-2 1$", (running.folder / "superlink" / "nodes").read_text(), re.MULTILINE)
    running.flwr("supernode", "unregister", number, CONNECTION)
    running.must("stop")
    done = running.script("start")
    assert done.returncode == 0 and done.stdout.count("started") == 4 and "node-2" not in done.stdout, done.stderr
    assert done.stderr.startswith("node-2: left out: ") and len(done.stderr.splitlines()) == 1, done.stderr
    assert "node-2: not registered" in running.must("status")
