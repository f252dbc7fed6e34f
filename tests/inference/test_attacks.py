"""Attacks on the service as a process of its own: what others pay for them, in memory and in answers."""

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.made import bombs
from support.made.models import constant, picture
from support.systems.service import Service, served, serving_of

from fedkace_flwr.data.images import Framing
from fedkace_flwr.data.picture_process import PictureProcess
from fedkace_flwr.inference import model_files as serving
from fedkace_flwr.inference.server import CONNECTIONS

MEMORY = 256_000_000
AT_ONCE = 8
HALF = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Le"

pytestmark = pytest.mark.slow

BOMBS = {
    "webp": lambda: bombs.blank(7071, 7071, "WEBP", lossless=True, method=0, quality=0),
    "png": lambda: bombs.blank(7071, 7071, "PNG"),
    "scans": lambda: bombs.scans(4096, 3072, 90),
    "largest": lambda: bombs.photo(4096, 3072, quality=75, progressive=True, subsampling=0),
    "largest webp": lambda: bombs.photo(2643, 2643, "WEBP", method=0),
    "nothing": lambda: bytes(9_990_000),
}


@pytest.fixture(scope="module", params=["files", "arrays"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A service for each way of scaling."""
    folder = tmp_path_factory.mktemp(request.param) / "client"
    framing = Framing.of_files(32) if request.param == "files" else Framing.of_arrays(32)
    serving.write(folder, constant(3, 3, framing=framing))
    with serving_of(folder) as service:
        yield service


def memory_of(process: psutil.Process) -> int:
    """Bytes of memory that the service's processes take; what several share is counted once."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error, OSError):
            text = Path(f"/proc/{each.pid}/smaps_rollup").read_text(encoding="ascii")
            total += sum(int(size) for size in re.findall(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE)) * 1024
    return total


@pytest.mark.matrix
@pytest.mark.parametrize("name", BOMBS)
def test_no_picture_takes_more_memory_than_is_promised(name: str, service: Service) -> None:
    bomb, process = BOMBS[name](), psutil.Process(service.process.pid)
    assert service.client.post("/predict", content=picture()).status_code == 200
    before, peak, over = memory_of(process), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            peak[0] = max(peak[0], memory_of(process))

    def send(_: int) -> int:
        with httpx.Client(base_url=service.client.base_url, timeout=None) as client:
            return client.post("/predict", content=bomb).status_code

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(AT_ONCE) as callers:
            found = set(callers.map(send, range(2 * AT_ONCE)))
    finally:
        over.set()
        watcher.join()
    assert found <= ({200, 503} if "largest" in name or name == "scans" else {422, 503})
    assert peak[0] - before <= MEMORY
    assert service.client.post("/predict", content=picture()).status_code == 200


def test_more_connections_than_there_may_be_are_refused_at_once(folder: Path) -> None:
    """Whoever can hold them open keeps others out: only local programs reach them, or nginx."""
    with serving_of(folder) as service:
        with ExitStack() as stack:
            for _ in range(CONNECTIONS):
                stack.enter_context(socket.create_connection(("127.0.0.1", service.port))).sendall(HALF)
            with httpx.Client(base_url=service.client.base_url) as client:
                assert client.get("/health").status_code == 503
        with httpx.Client(base_url=service.client.base_url, timeout=60) as client:
            while client.get("/health", headers={"Connection": "close"}).status_code != 200:
                pass
            assert client.post("/predict", content=picture()).status_code == 200


def test_a_caller_who_hangs_up_is_not_worked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures that wait for another one are not decoded once their callers have gone."""
    decoded, go, square = list[bytes](), threading.Event(), PictureProcess.square

    def waiting(self: PictureProcess, content: bytes, framing: Framing) -> Any:
        decoded.append(content)
        go.wait()
        return square(self, content, framing)

    def sent(content: bytes) -> socket.socket:
        raw = socket.create_connection(("127.0.0.1", port))
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        raw.sendall(head + content)
        return raw

    monkeypatch.setattr(PictureProcess, "square", waiting)
    first, good = picture(seed=1), picture(seed=2)
    with served(folder) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client, sent(first):
        while not decoded:
            client.get("/health")
        for _ in range(CONNECTIONS // 2):
            sent(picture(seed=3)).close()
        for _ in range(9):  # meanwhile, the service has noticed
            client.get("/health")
        go.set()
        assert client.post("/predict", content=good).status_code == 200
    assert decoded == [first, good]


@pytest.mark.exhaustive
def test_what_was_refused_a_thousand_times_is_not_in_the_log(folder: Path) -> None:
    with serving_of(folder) as service:
        for _ in range(300):
            with socket.create_connection(("127.0.0.1", service.port)) as raw:
                raw.sendall(b"\x00\xff\r\n\r\n")
            with socket.create_connection(("127.0.0.1", service.port)) as raw:
                raw.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n")
        while service.client.post("/predict", content=picture()).status_code == 503:  # until they have gone
            pass
        assert service.stop() == 0
        assert len(service.said().splitlines()) < 5, service.said()[-3000:]
