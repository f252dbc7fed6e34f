"""Who is answered: by host name, origin, framing of the request, and token."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.made.models import constant
from support.systems.service import served

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.inference import model_files as serving
from fedkace_flwr.inference.access import Access
from fedkace_flwr.inference.predict import main

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client")
    serving.write(folder, constant(1, 1))
    return folder


@pytest.fixture(scope="module")
def port(model: Path) -> Iterator[int]:
    with served(model, Access.of(["Camera-7.example.org"])) as port:
        yield port


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[int]:
    """The port of a service that asks for a token."""
    token = model / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    with served(model, Access.of((), token)) as port:
        yield port


def said(port: int, *lines: str, body: str = "") -> str:
    """Return the whole answer to a request on a connection of its own."""
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall("\r\n".join([*lines, "Connection: close", "", body]).encode("latin-1"))
        return b"".join(iter(lambda: raw.recv(65536), b"")).decode()


def status(port: int, *lines: str, body: str = "") -> int:
    return int(said(port, *lines, body=body).split()[1])


OWN = ["LOCALHOST:80", "127.0.0.1:{port}", "camera-7.example.org"]
OTHERS = ["evil.example", "localhost.evil.example", "127.0.0.2", "[::1]", "", "localhost@evil.example", "local\xe9host"]


@pytest.mark.parametrize("host", OWN)
def test_the_services_own_hosts_are_answered(host: str, port: int) -> None:
    assert status(port, "GET /health HTTP/1.1", f"Host: {host.format(port=port)}") == 200


@pytest.mark.matrix
@pytest.mark.parametrize("host", OTHERS)
def test_other_hosts_are_not_answered(host: str, port: int) -> None:
    """A browser that was told that evil.example is 127.0.0.1 sends that name (DNS rebinding)."""
    answer = said(port, "GET /model HTTP/1.1", f"Host: {host.format(port=port)}")
    assert int(answer.split()[1]) in (400, 421) and "class" not in answer


def test_a_request_with_no_host_or_two_is_refused(port: int) -> None:
    assert status(port, "GET /health HTTP/1.0") == 421
    assert status(port, "GET /health HTTP/1.1") == 400
    assert status(port, "GET /health HTTP/1.1", "Host: localhost", "Host: localhost") == 400


def test_a_host_in_the_request_line_does_not_help(port: int) -> None:
    answer = said(port, "GET http://localhost/model HTTP/1.1", "Host: evil.example")
    assert int(answer.split()[1]) == 421 and "class" not in answer


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://localhost:1"],
)
def test_pages_of_other_origins_are_refused(origin: str, port: int) -> None:
    lines = ["POST /predict HTTP/1.1", "Host: localhost", f"Origin: {origin}", "Content-Length: 3"]
    answer = said(port, *lines, body="abc")
    assert int(answer.split()[1]) == 403 and "requests from other origins are refused" in answer


def test_pages_of_the_services_own_origin_are_answered(port: int) -> None:
    lines = ["Host: camera-7.example.org", "Origin: https://Camera-7.example.org"]
    assert status(port, "GET /health HTTP/1.1", *lines) == 200


def test_a_request_of_two_lengths_is_refused(port: int) -> None:
    """Two programs that read such a request differently can be made to take its body for another request."""
    lines = ["POST /predict HTTP/1.1", "Host: localhost", "Content-Length: 4", "Transfer-Encoding: chunked"]
    for more in ("", "GET /model HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        answer = said(port, *lines, body=f"0\r\n\r\n{more}")
        assert answer.startswith("HTTP/1.1 411") and answer.count("HTTP/1.1") == 1
    two = ["POST /predict HTTP/1.1", "Host: localhost", "Content-Length: 3", "Content-Length: 30"]
    assert status(port, *two, body="abc") == 400


def test_chunks_are_refused(port: int) -> None:
    lines = ["POST /predict HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked"]
    assert status(port, *lines, body="3\r\nabc\r\n0\r\n\r\n") == 411
    lines[-1] = "Transfer-Encoding: gzip"
    assert status(port, *lines) == 400


@pytest.mark.parametrize(
    "line",
    ["", "Authorization: Bearer ", f"Authorization: Basic {TOKEN}", f"Authorization: Bearer {TOKEN[:-1]}", TOKEN],
)
def test_without_the_token_nothing_is_answered(line: str, guarded: int) -> None:
    lines = ["Host: localhost", *([line] if ":" in line else [])]
    for request in ("GET /health", "GET /model", "GET /elsewhere", "POST /predict"):
        answer = said(guarded, f"{request} HTTP/1.1", *lines)
        assert answer.startswith("HTTP/1.1 401") and "www-authenticate: Bearer" in answer
    twice = [f"Authorization: Bearer {TOKEN}"] * 2
    assert status(guarded, "GET /health HTTP/1.1", "Host: localhost", *twice) == 401


def test_with_the_token_everything_is_answered(guarded: int) -> None:
    for kind in ("Bearer", "bearer"):
        lines = ["Host: localhost", f"Authorization: {kind} {TOKEN}"]
        assert status(guarded, "GET /model HTTP/1.1", *lines) == 200


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (None, 0o600, "cannot be read (No such file"),
        ("short", 0o600, "must hold one token of 16 to 1024"),
        (f"{TOKEN}\n{TOKEN}\n", 0o600, "must hold one token of 16 to 1024"),
        (TOKEN, 0o604, "has mode 604, so everyone can read it; run chmod 600"),
    ],
    ids=["missing", "short", "lines", "open"],
)
def test_a_token_file_that_will_not_do_is_named(
    content: str | None, mode: int, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    assert main(["serve", "--state", str(tmp_path), "--port", "0", "--token-file", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --token-file {path}: ") and reason in line
    assert TOKEN not in line


@pytest.mark.parametrize("name", ["", "a:80", "*"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--allow-host .*: must be a host name, without a port"):
        Access.of([name])
