"""The command ``predict`` and its service, each in a separate process."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "fedkace_flwr.inference.predict"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def predict(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *(str(argument) for argument in arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)


class Service:
    """A service in a separate process."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = (folder.parent / "service.log").open("w+")
        command = [*COMMAND, "serve", "--state", str(folder), "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=self.log, text=True
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
def serving_of(folder: Path, *arguments: str) -> Iterator[Service]:
    service = Service(folder, *arguments)
    try:
        yield service
    finally:
        service.close()
