"""The command ``predict`` and its service, each in a separate process; and the service's server in this one."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from fedkace_flwr.data.picture_process import Limits
from fedkace_flwr.inference.access import Access
from fedkace_flwr.inference.server import server_for
from fedkace_flwr.inference.service import Watched, application

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "fedkace_flwr.inference.predict"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def predict(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *(str(argument) for argument in arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@contextmanager
def serving_at(folder: Path, path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A service in a separate process, on a Unix socket."""
    command = [*COMMAND, "serve", "--state", str(folder), "--socket", str(path)]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"serving {folder} at unix:{path}\n"
        try:
            yield process
        finally:
            process.kill()


class Service:
    """A service in a separate process."""

    def __init__(self, folder: Path, *arguments: str, **options: Any) -> None:
        self.log = (folder.parent / "service.log").open("w+")
        command = [*COMMAND, "serve", "--state", str(folder), "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=self.log, text=True, **options
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+:(\d+)$", line)
        assert found, line + self.said()
        self.port = int(found[1])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=None)

    def said(self) -> str:
        """Return the process's log."""
        return Path(self.log.name).read_text()

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def close(self) -> None:
        """End the process."""
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


@contextmanager
def serving_of(folder: Path, *arguments: str, **options: Any) -> Iterator[Service]:
    service = Service(folder, *arguments, **options)
    try:
        yield service
    finally:
        service.close()


@contextmanager
def served(folder: Path, access: Access | None = None, limits: Limits | None = None) -> Iterator[int]:
    """Serve a folder from a thread, with limits of the test's choice; yield the port."""
    watched = Watched(folder)
    watched.look()
    server = server_for(application(watched, access, limits))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()


@asynccontextmanager
async def living(application: Any) -> AsyncIterator[None]:
    """Start an application without a server, and end it."""
    to, fro = asyncio.Queue[dict[str, str]](), asyncio.Queue[dict[str, str]]()
    await to.put({"type": "lifespan.startup"})
    task = asyncio.create_task(application({"type": "lifespan", "asgi": {"version": "3.0"}}, to.get, fro.put))
    assert (await fro.get())["type"] == "lifespan.startup.complete"
    yield
    await to.put({"type": "lifespan.shutdown"})
    await task
