"""Callers who send little, nothing or too much: they lose their connection, and others do not wait for them."""

import select
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from support.made.models import CLASSES, constant, picture
from support.systems.service import served

from fedkace_flwr.inference import kept_models as serving
from fedkace_flwr.inference.bodies import Bodies, Pace
from fedkace_flwr.inference.connections import ACCEPTED, Limits

HALF = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Le"
LONG = 600.0


def post(port: int) -> httpx.Response:
    with httpx.Client(timeout=60) as client:
        return client.post(f"http://127.0.0.1:{port}/predict", content=picture())


def all_of(raw: socket.socket) -> bytes:
    """Everything until the service closes the connection."""
    found = b""
    try:
        while more := raw.recv(65536):
            found += more
    except ConnectionResetError:
        pass
    return found


def ended(connections: list[socket.socket]) -> list[socket.socket]:
    """Those on which something can be read, an answer or the end."""
    return select.select(connections, [], [], 0)[0]


def test_half_sent_headers_are_closed_at_their_deadline(folder: Path) -> None:
    with served(folder, limits=Limits(header_seconds=0.1)) as port, ExitStack() as stack:
        for sent in (b"", b"G", HALF, b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            raw.sendall(sent)
            assert all_of(raw) == b""
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")  # an answer, and then half a header
        assert all_of(raw).count(b"HTTP/1.1 200") == 1
        assert post(port).status_code == 200


@pytest.mark.parametrize("sent", [b"", HALF, HALF + b"ngth: 1000\r\n\r\nhalf of it"], ids=["nothing", "header", "body"])
def test_the_connection_that_has_waited_longest_gives_way_to_a_new_one(sent: bytes, folder: Path) -> None:
    bound = 4 * ACCEPTED
    limits = Limits(connections=bound, header_seconds=LONG, answer_seconds=LONG)
    with served(folder, limits=limits, bodies=Bodies(pace=Pace(LONG, LONG))) as port, ExitStack() as stack:
        slow = []
        for _ in range(3 * bound):
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)))
            slow[-1].sendall(sent)
        assert post(port).status_code == 200
        for raw in slow[:bound]:
            assert all_of(raw) == b""
        assert not ended(slow[-ACCEPTED:])  # the newest are still waited for


def test_slow_bodies_keep_nobody_waiting(folder: Path) -> None:
    """The answer comes although none of these bodies ever ends."""
    with served(folder, bodies=Bodies(pace=Pace(LONG, LONG))) as port, ExitStack() as stack:
        slow = []
        for _ in range(40):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            raw.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n" + bytes(1000))
            slow.append(raw)
        assert post(port).status_code == 200
        assert not ended(slow)


@pytest.mark.parametrize("pace", [Pace(0.2, LONG, 1), Pace(LONG, 0.2, 2000)], ids=["whole", "window"])
def test_a_body_that_stays_behind_its_pace_is_given_up(pace: Pace, folder: Path) -> None:
    with served(folder, bodies=Bodies(pace=pace)) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
            raw.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n" + bytes(1000))
            answer = all_of(raw)
        assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive fast enough" in answer
        assert post(port).status_code == 200


def test_whoever_goes_on_sending_after_an_answer_is_closed(folder: Path) -> None:
    with served(folder, limits=Limits(linger_seconds=0.2)) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
            raw.sendall(b"POST /elsewhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n")
            answer = b""
            try:
                while True:
                    raw.sendall(bytes(1000))
                    if ended([raw]):
                        answer += raw.recv(65536)
            except (BrokenPipeError, ConnectionResetError):
                pass
        assert answer.startswith(b"HTTP/1.1 404") and b"connection: close" in answer
        assert post(port).status_code == 200


def test_an_answer_that_is_not_taken_is_given_up(tmp_path: Path) -> None:
    names = tuple(f"class {number} {'x' * 2_000_000}" for number in range(CLASSES))
    serving.write(tmp_path / "client", constant(1, 1, class_names=names))
    with served(tmp_path / "client", limits=Limits(answer_seconds=0.2, header_seconds=0.2)) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
            raw.sendall(b"GET /model HTTP/1.1\r\nHost: localhost\r\n\r\n")
            peer = raw.getsockname()
            assert post(port).status_code == 200  # by now the other connection is accepted
            while any(each.raddr == peer for each in psutil.Process().net_connections("tcp4")):
                assert post(port).status_code == 200
            assert len(all_of(raw)) < 20_000_000
        assert post(port).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 101,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\na: " + b"b" * 8192 + b"\r\n",
        b"GET /" + b"a" * 9000,
        bytes(9000),
    ],
    ids=["lines", "line", "target", "nothing"],
)
def test_a_long_header_is_refused(header: bytes, folder: Path) -> None:
    with served(folder) as port:
        for pieces in ([header + b"\r\n"], [header[:100], header[100:] + b"\r\n"]):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
                for piece in pieces:
                    raw.sendall(piece)
                answer = all_of(raw)
            assert answer.startswith(b"HTTP/1.1 431") and b'{"error":"the header of the request is too long' in answer
        assert post(port).status_code == 200


def test_a_header_may_come_byte_by_byte(folder: Path) -> None:
    body = picture()
    request = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with served(folder) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(len(request)):
            raw.sendall(request[number : number + 1])
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")


def test_requests_may_follow_each_other_on_a_connection(folder: Path) -> None:
    with served(folder) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(3):
            assert client.post("/predict", content=picture()).status_code == 200
            assert client.get("/health").status_code == 200
            assert client.post("/predict", content=b"none").status_code == 422


def test_a_request_that_comes_too_early_is_not_taken_for_the_body_of_another(folder: Path) -> None:
    with served(folder) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        answer = all_of(raw)
    assert answer.count(b"HTTP/1.1 200") == 1 and b"connection: close" in answer
