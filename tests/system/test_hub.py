"""A hub and two sites as they should be deployed: real SuperNodes with certificates, behind the real nginx.

The sites accept signed apps alone and have a policy. ``tests/deploy/`` tests the parts.
"""

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from support.common import SMALL
from support.systems.federation import CONNECTION, DEPLOY, Federation, assert_same_numbers, script
from support.systems.proxy import Door, Line, disguises, most_memory, node_context, request
from support.tools import need_tools

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import run_inline

NODES = ("node-1", "node-2")
NUMBERS = {**SMALL, "clients": 2, "rounds": 1, "samples-per-class": 6}
UNNAMED = {"join-deadline": 20}  # of a run in which no node answers; the others wait for nodes on a busy machine
PUSH = "/v1/fleet/push-object"
MEGABYTE = 2**20
NGINX_UNIT = DEPLOY / "systemd" / "nginx.service.d" / "fedkace.conf"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.federation,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("hub"),
]


@dataclass
class Hub:
    """The running federation and its nginx."""

    federation: Federation
    door: Door

    @property
    def folder(self) -> Path:
        return self.federation.folder

    def run(self, task: str, *arguments: object) -> str:
        """Run ``sign-app.py``."""
        command = [sys.executable, str(DEPLOY / "sign-app.py"), task, *map(str, arguments)]
        done = subprocess.run(command, env=self.federation.env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def line(self, name: str) -> Line:
        """Return a connection with a node's own certificate and key."""
        certificates = self.folder / "certificates"
        authority, own = (certificates / "ca.crt").read_bytes(), certificates / "nodes" / f"{name}.crt"
        return Line(self.door, node_context(authority, own, self.folder / name / "key"))


def change(path: Path, **settings: object) -> None:
    """Add settings to a member's environment file, where the last one counts."""
    with path.open("a") as file:
        file.writelines(f"{name}='{value}'\n" for name, value in settings.items())


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    need_tools("nginx")
    federation = Federation(tmp_path_factory.mktemp("hub"), "--nodes", str(len(NODES)))
    folder = federation.folder
    keys = [folder / name / "key.pub" for name in NODES]
    made = script("certificates.sh", "node", folder / "certificates", *keys, env=federation.env)
    assert made.returncode == 0, made.stderr
    port = int((folder / "superlink" / "env").read_text().split("FEDKACE_PORT='")[1].split("'")[0])
    with Door(folder.parent / "nginx", folder / "certificates", port) as door:
        made_hub = Hub(federation, door)
        (folder / "signatures").mkdir()
        change(folder / "superlink" / "env", FEDKACE_SIGNATURES=folder / "signatures")
        trusted, policy = folder / "trusted.yaml", folder / "policy.toml"
        trusted.write_text(made_hub.run("key", folder / "release.key", "releases", "--no-passphrase") + "\n")
        policy.write_text("labels = false\n[keys]\nepochs = { max = 2 }\n")
        for name in NODES:
            change(
                folder / name / "env",
                FEDKACE_SUPERLINK=f"localhost:{door.port}",
                FEDKACE_CERTIFICATE=folder / "certificates" / "nodes" / f"{name}.crt",
                FEDKACE_TRUSTED=trusted,
                FEDKACE_POLICY=policy,
            )
        try:
            federation.must("start")
            yield made_hub
        finally:
            federation.script("stop")


def refused_run(hub: Hub, name: str, **changes: object) -> str:
    """Submit a run that fails; the line in which its server says why."""
    number = hub.federation.submit(name, {**NUMBERS, **changes})
    run = hub.federation.finished(number)
    assert run["status"] == "finished:failed", run
    command = ["flwr", "log", number, CONNECTION, "--show"]
    done = subprocess.run(command, env=hub.federation.env, capture_output=True, text=True, check=False)
    found = re.search(r"ERROR\W.*(?:RunError|BelowQuorumError): .*", done.stdout)
    assert found, done.stdout + done.stderr
    return found[0]


def test_sites_run_no_app_that_nobody_whom_they_trust_has_signed(hub: Hub, tmp_path: Path) -> None:
    said = refused_run(hub, "unsigned", **UNNAMED)
    assert "The FAB could not be verified" in said
    hub.run("key", tmp_path / "stranger", "releases", "--no-passphrase")
    hub.run("sign", tmp_path / "stranger", hub.federation.app, hub.folder / "signatures")
    assert "The FAB could not be verified" in refused_run(hub, "forged", **UNNAMED)
    for name in NODES:
        assert "FAB verification failed" in hub.federation.log(name)
        assert not list((hub.folder / name / "state").iterdir()), "no code of the app has run here"


def test_a_signed_app_that_the_policies_accept_trains_through_nginx(hub: Hub, tmp_path: Path) -> None:
    hub.run("sign", hub.folder / "release.key", hub.federation.app, hub.folder / "signatures")
    run_inline(Config.parse({**NUMBERS, "results-dir": str(tmp_path), "run-name": "whole"}))
    number = hub.federation.submit("signed", NUMBERS)
    run = hub.federation.finished(number)
    assert run["status"] == "finished:completed", run
    assert_same_numbers(hub.federation.results / "signed", tmp_path / "whole")
    used = set(re.findall(r'"POST (\S+) HTTP/1.1" 200', (hub.door.folder / "access.log").read_text()))
    fleet = {path for _, path in PROTOBUF_REQUEST_TYPES if path.startswith("/v1/fleet/")}
    assert fleet - used == {"/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/fleet/deactivate-node"}


def test_a_signed_app_cannot_do_what_the_policies_refuse(hub: Hub) -> None:
    hub.run("sign", hub.folder / "release.key", hub.federation.app, hub.folder / "signatures")
    words = f"{hub.folder}/policy.toml: epochs = 3: this site accepts at most 2"
    assert f"client 0: PolicyError: {words}; client 1: PolicyError: {words}" in refused_run(hub, "refused", epochs=3)
    for name in NODES:
        assert f"PolicyError: {words}" in hub.federation.log(name)


def test_the_superlink_sees_no_request_but_supernodes_calls(hub: Hub) -> None:
    def others() -> list[str]:
        said = hub.federation.log("superlink")
        return [line for line in re.findall(r'"(?:[A-Z]+) (\S+) HTTP', said) if not line.startswith("/v1/fleet/")]

    assert others(), "flwr's own requests, which do not go through nginx, are in the log"
    before, line = others(), hub.line("node-1")
    for path in ("/v1/control/list-nodes", "/v1/runtime/acquire-task"):
        for target in disguises(path):
            assert line.ask(request(target, "Content-Type: application/protobuf")) in (0, 400, 403, 404, 405), target
    assert line.ask(request(PUSH, "Content-Type: application/protobuf")) == 401, "a certificate is not yet a node's key"
    assert others() == before


def test_bodies_without_a_nodes_signature_cost_the_superlink_little_memory(hub: Hub) -> None:
    process = hub.federation.process("superlink")
    allowed = int(re.findall(r"MemoryMax=(\d+)G", (DEPLOY / "systemd" / "fedkace-superlink.service").read_text())[0])
    claimed = request(PUSH).replace(b"Content-Length: 0", b"Content-Length: 300000000")
    with socket.create_connection(("127.0.0.1", hub.door.port)) as plain:
        plain.sendall(claimed)
        assert b" 400 " in plain.recv(1000).splitlines()[0], "without TLS"
    before = process.memory_info().rss
    assert hub.line("node-1").ask(claimed) == 413
    body, statuses = b"\n" + b"x" * (6 * MEGABYTE - 1000), list[int]()
    raw = request(PUSH, "Content-Type: application/protobuf", body=body)

    def flood(name: str) -> None:
        line = hub.line(name)
        statuses.extend(line.ask(raw) for _ in range(2))

    threads = [threading.Thread(target=flood, args=(name,)) for name in NODES for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 2 * len(threads) and set(statuses) <= {400, 401, 502, 503}
    peak = most_memory(process.pid)
    assert peak < allowed * 2**30 / 2, f"{before} bytes before, {peak} at most"
    assert hub.door.most_memory() < int(re.findall(r"MemoryMax=(\d+)M", NGINX_UNIT.read_text())[0]) * 2**20 / 2
    assert psutil.pid_exists(process.pid) and hub.federation.nodes() == ["online"] * len(NODES)
