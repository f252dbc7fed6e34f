"""Where the service listens: addresses, Unix sockets, and how many files it may open."""

import resource
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.made.models import picture
from support.systems.service import COMMAND, ENVIRONMENT, ROOT

from fedkace_flwr.inference.connections import Limits
from fedkace_flwr.inference.predict import main
from fedkace_flwr.inference.server import Address, affordable, listening


@contextmanager
def serving_at(folder: Path, path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [*COMMAND, "serve", "--state", str(folder), "--socket", str(path)]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"serving {folder} at unix:{path}\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_the_service_answers_on_a_unix_socket_that_it_removes(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "predict"
    with serving_at(folder, path) as process:
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o660
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.post("/predict", content=picture()).status_code == 200
            assert client.get("/health", headers={"Host": "evil.example"}).status_code == 421
        process.terminate()
        assert process.wait() == 0
    assert not path.exists()


def test_a_unix_socket_is_taken_over_only_if_nobody_listens(tmp_path: Path) -> None:
    path = tmp_path / "predict"
    first, shown = listening(Address(socket=path))
    assert shown == f"unix:{path}"
    with pytest.raises(OSError, match=rf"^--socket {path}: cannot listen there \(Address already in use\)"):
        listening(Address(socket=path))
    first.close()
    second, _ = listening(Address(socket=path))
    second.close()


def test_a_file_in_the_place_of_a_unix_socket_stays(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    assert main(["serve", "--state", str(folder), "--socket", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --socket {path}: cannot listen there")
    assert path.read_text() == "mine"


def test_the_address_that_is_shown_can_be_called() -> None:
    for host, shown in (("127.0.0.1", "http://127.0.0.1:"), ("localhost", "http://")):
        listener, url = listening(Address(host, 0))
        assert url.startswith(shown) and url.endswith(f":{listener.getsockname()[1]}")
        listener.close()
    if socket.has_dualstack_ipv6():
        listener, url = listening(Address("::1", 0))
        assert url == f"http://[::1]:{listener.getsockname()[1]}"
        listener.close()


@pytest.fixture
def descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("descriptors")
def test_connections_fit_the_files_that_may_be_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Limits()
    limits = (1024, 4096)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: changed.append(pair))
    assert affordable(wanted) == wanted and not changed
    limits = (64, 4096)  # may be raised
    assert affordable(wanted) == wanted and changed[-1][0] > wanted.connections
    limits = (64, 128)
    fewer = affordable(wanted).connections
    assert 64 <= fewer < 96 and changed[-1] == (128, 128)
    limits = (64, 64)
    assert main(["serve", "--state", str(folder), "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ulimit -n = 64: the service may open too few files; must be at least 120")
