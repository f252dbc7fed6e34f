"""What crosses the wire: all bytes between SuperNodes and SuperLink of insecure runs, searched for clients' images.

Both SuperNodes reach the SuperLink through a proxy that keeps every byte of each connection. By default ``fedkace`` is
run; ``FEDKACE_WIRE=all`` runs every registered method that trains. The contract tests examine the arrays of all methods'
messages, without the processes.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.common import SMALL
from support.systems.federation import ROOT, STEP_SECONDS, environment, until, wait_for_serverapps

from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running.ports import free_ports
from fedkace_flwr.registry import METHODS
from fedkace_flwr.storage import atomic as durable

CLIENTS, WINDOW, DISTINCT = 2, 24, 5
# FedKACE runs two rounds, so that its clients hold a buffer. What the others do with a buffer in messages of their own
# the contract tests show on the arrays of all methods.
ROUNDS = {"fedkace": 2}
NUMBERS = {**SMALL, "clients": CLIENTS, "samples-per-class": 8, "capacity": 12}
# `centralized` trains at the server's word alone and its messages hold no arrays.
ALL = sorted(set(METHODS) - {"centralized"})
METHODS_HERE = ALL if os.environ.get("FEDKACE_WIRE") == "all" else ["fedkace"]
CONNECTION = "wire"

pytestmark = [pytest.mark.slow, pytest.mark.federation, pytest.mark.timeout(1800), pytest.mark.xdist_group("wire")]


class Proxy:
    """Passes connections on to a port and keeps what goes either way, a stream for each way of each connection."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._streams: list[tuple[str, bytearray]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            for way, source, sink in (("up", near, far), ("down", far, near)):
                stream = bytearray()
                self._streams.append((way, stream))
                threading.Thread(target=self._pump, args=(source, sink, stream), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, stream: bytearray) -> None:
        try:
            while block := source.recv(1 << 16):
                stream += block
                sink.sendall(block)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def take(self, way: str = "") -> list[bytes]:
        """All that has gone that way, or either, up to now."""
        return [bytes(stream) for each, stream in list(self._streams) if stream and way in ("", each)]

    def forget(self) -> None:
        """Begin anew; connections stay."""
        for _, stream in list(self._streams):
            stream.clear()

    def close(self) -> None:
        self._listener.close()


def encodings(images: torch.Tensor, mean: Any, std: Any) -> dict[str, torch.Tensor]:
    """uint8 images (n, 3, S, S) as a program might send them."""
    scaled = images.double() / 255
    normal = (scaled - torch.tensor(mean).double().view(3, 1, 1)) / torch.tensor(std).double().view(3, 1, 1)
    found = {"uint8": images, "float32, 0 to 255": images.float()}
    for name, values in (("0 to 1", scaled), ("normalised", normal)):
        for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            found[f"{str(kind)[6:]}, {name}"] = values.to(kind)
    return found


def raw(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of each element, uint8 (..., size of an element)."""
    flat = values.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().reshape(*values.shape, flat.element_size())


def windows(images: torch.Tensor, values: torch.Tensor) -> Iterator[bytes]:
    """Bytes of runs of 24 elements of each image, in both orders of channels; those that are nearly constant aside."""
    for order in ((0, 1, 2, 3), (0, 2, 3, 1)):
        pixels = images.permute(order).reshape(len(images), -1).numpy()
        coded = raw(values.permute(order)).reshape(len(images), pixels.shape[1], -1)
        for image, code in zip(pixels, coded, strict=True):
            starts = range(0, len(image) - WINDOW + 1, WINDOW)
            yield from (
                code[at : at + WINDOW].tobytes() for at in starts if len(set(image[at : at + WINDOW])) >= DISTINCT
            )


def found_in(streams: list[bytes], images: torch.Tensor, mean: Any, std: Any) -> dict[str, int]:
    """How many windows of the images are in the streams, for each encoding in which any is."""
    found = {}
    for name, values in encodings(images, mean, std).items():
        wanted = set(windows(images, values))
        assert len(wanted) >= len(images), "each image has something to look for"
        found[name] = sum(any(window in stream for stream in streams) for window in wanted)
    return {name: count for name, count in found.items() if count}


LEAK = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

app = ClientApp()

@app.query()
def query(message, context):
    images = np.random.default_rng(5).integers(0, 256, (4, 3, 8, 8), dtype=np.uint8)
    kinds = {"raw": images, "hwc": images.transpose(0, 2, 3, 1), "float": (images.astype(np.float64) / 255)}
    kinds["single"] = kinds["float"].astype(np.float32)
    arrays = ArrayRecord({name: Array(np.ascontiguousarray(kind)) for name, kind in kinds.items()})
    return Message(RecordDict({"leak": arrays}), reply_to=message)

server = ServerApp()

@server.main()
def main(grid, context):
    messages = [Message(RecordDict({}), node, "query") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(messages, timeout=1500))
    assert messages and len(replies) == len(messages) and not any(reply.has_error() for reply in replies)
"""
LEAK_PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "leak"
version = "0.1.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "leak:server"
clientapp = "leak:app"
"""


class Wire:
    """An insecure SuperLink and two SuperNodes that reach it through a proxy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = environment(folder, FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1")
        link, *ports = free_ports(CLIENTS + 1)
        self.proxy = Proxy(link)
        (folder / "flwr").mkdir()
        connection = f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
        (folder / "flwr" / "config.toml").write_text(connection)
        self.members: list[subprocess.Popen[bytes]] = []
        self.start("superlink", "flower-superlink", "--port", str(link), "--disable-runtime-dependency-installation")
        until(lambda: accepts(link), "the SuperLink listens", log=lambda: self.log("superlink"))
        for number, port in enumerate(ports):
            place = f"partition-id={number} num-partitions={CLIENTS}"
            address = f"127.0.0.1:{self.proxy.port}"
            options = ["--superlink", address, "--port", str(port), "--node-config", place]
            self.start(f"node-{number}", "flower-supernode", *options)

    def start(self, name: str, command: str, *options: str) -> None:
        with (self.folder / name).open("wb") as log:
            words = [command, "--insecure", *options]
            self.members.append(
                subprocess.Popen(words, env=self.env, stdout=log, stderr=log, cwd=self.folder, start_new_session=True)
            )

    def log(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")[-3000:]

    def flwr(self, *arguments: str) -> dict[str, Any]:
        command = ["flwr", *arguments, "--format", "json"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=STEP_SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        return answer

    def run(self, project: Path, *options: str) -> None:
        number = str(self.flwr("run", str(project), CONNECTION, *options)["run-id"])

        def over() -> dict[str, Any]:
            wait_for_serverapps(self.folder)
            run: dict[str, Any] = self.flwr("list", CONNECTION, "--run-id", number)["runs"][0]
            return run if run["status"].startswith("finished") else {}

        run = until(over, f"run {number} ends", pause=3, log=lambda: self.log("superlink"))
        assert run["status"] == "finished:completed", f"{run} {self.log('superlink')} {self.log('node-0')}"

    def stop(self) -> None:
        for member in reversed(self.members):
            os.killpg(member.pid, signal.SIGTERM)
        for member in self.members:
            try:
                member.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(member.pid, signal.SIGKILL)
                member.wait()
        self.proxy.close()


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    made = Wire(tmp_path_factory.mktemp("wire"))
    try:
        until(lambda: len(made.flwr("supernode", "list", CONNECTION)["nodes"]) == CLIENTS, "the nodes join", pause=1)
        yield made
    finally:
        made.stop()


def test_an_image_that_is_sent_is_found(wire: Wire, tmp_path: Path) -> None:
    """Without this the other test would pass on a compressed or an encrypted wire."""
    (tmp_path / "leak.py").write_text(LEAK)
    (tmp_path / "pyproject.toml").write_text(LEAK_PROJECT)
    wire.proxy.forget()
    wire.run(tmp_path)
    images = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (4, 3, 8, 8), dtype=np.uint8))
    found = found_in(wire.proxy.take("up"), images, (0.5,) * 3, (0.5,) * 3)
    assert set(found) == {"uint8", "float64, 0 to 1", "float32, 0 to 1"}, found
    assert found["uint8"] == 2 * 4 * 8, "both orders of channels, every window"
    others = torch.from_numpy(np.random.default_rng(6).integers(0, 256, (4, 3, 8, 8), dtype=np.uint8))
    assert not found_in(wire.proxy.take(), others, (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize("method", METHODS_HERE)
def test_no_image_of_a_client_crosses_the_wire(wire: Wire, method: str, tmp_path: Path) -> None:
    rounds = ROUNDS.get(method, 1)
    numbers = {**NUMBERS, "rounds": rounds, "method": method, "results-dir": str(tmp_path), "run-name": method}
    (tmp_path / "run.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in numbers.items()))
    wire.proxy.forget()
    wire.run(ROOT, "--run-config", str(tmp_path / "run.toml"))
    records = [json.loads(line) for line in (tmp_path / method / "rounds.jsonl").read_text().splitlines()]
    assert len(records) == rounds and not any(record["failures"] for record in records)

    experiment = Experiment(Config.parse(numbers))
    chunks = [experiment.chunk(client, number + 1) for client in range(CLIENTS) for number in range(rounds)]
    images = torch.cat([chunk.images(experiment.dataset.fetch) for chunk in chunks])
    assert images.dtype == torch.uint8 and images.shape[1] == 3
    assert_the_run_is_seen(wire, tmp_path / method, experiment)
    assert not found_in(wire.proxy.take(), images, experiment.dataset.mean, experiment.dataset.std)


def assert_the_run_is_seen(wire: Wire, folder: Path, experiment: Experiment) -> None:
    """Known numbers of the run are in the plaintext, so what is not in it was not sent."""
    answers = sorted((folder / "clients").glob("client-*/answer-*.npz"))
    assert len(answers) == CLIENTS
    for path in answers:  # the last reply of each client: its model, or with TFCL features and logits
        content = durable.read(path)
        assert content is not None
        largest = max(content[0].values(), key=lambda array: array.nbytes).tobytes()
        assert any(block in stream for block in blocks(largest) for stream in wire.proxy.take("up")), path
    if folder.name != "tfcl":  # which sends clients no model
        first = next(iter(experiment.initial_weights().values())).numpy().tobytes()
        assert any(block in stream for block in blocks(first) for stream in wire.proxy.take("down"))


def blocks(content: bytes) -> list[bytes]:
    """Parts of an array, of which the wire's framing cannot cut all."""
    return [content[at : at + 96] for at in range(0, len(content) - 96, 96)][:50]
