"""The hub's nginx: what gets through to the SuperLink, from whom, and how much of it.

The real nginx runs with ``deploy/nginx.conf``. Behind it stands a server that keeps what arrives;
``tests/system/test_hub.py`` puts a real SuperLink and SuperNodes there.
"""

import http.client
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from support.systems.federation import ROOT
from support.systems.proxy import Authority, Door, Line, Recorder, disguises, node_context, request

MEGABYTE = 2**20
PATHS = sorted(path for _, path in PROTOBUF_REQUEST_TYPES)
# With a key, a SuperNode registers and unregisters nothing by itself.
FLEET = [path for path in PATHS if path.startswith("/v1/fleet/") and "register" not in path]
OTHERS = [path for path in PATHS if path not in FLEET]
DISGUISED = ("/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/register-node")
PUSH = "/v1/fleet/push-object"

pytestmark = pytest.mark.xdist_group("nginx")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def recorder(authority: Authority) -> Iterator[Recorder]:
    with Recorder(authority.folder) as made:
        yield made


@pytest.fixture(scope="module")
def door(authority: Authority, recorder: Recorder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with Door(tmp_path_factory.mktemp("nginx"), authority.folder, recorder.port) as made:
        yield made


@pytest.fixture
def arrived(recorder: Recorder) -> list[str]:
    """Targets that reach the server behind nginx in this test."""
    recorder.forget()
    return recorder.begun


def test_every_call_of_a_supernode_gets_through_and_flower_has_no_other(
    door: Door, authority: Authority, recorder: Recorder, arrived: list[str]
) -> None:
    line = Line(door, authority.context("edge-1"))
    assert [line.ask(request(path, body=b"x")) for path in FLEET] == [200] * len(FLEET)
    assert arrived == FLEET
    assert {each.line for each in recorder.arrived} == {f"POST {path} HTTP/1.1" for path in FLEET}
    assert all(each.headers["Host"] == "localhost" and each.length == 1 for each in recorder.arrived)


def test_no_other_path_of_flower_gets_through(door: Door, authority: Authority, arrived: list[str]) -> None:
    line = Line(door, authority.context("edge-1"))
    others = [*OTHERS, "/", "/health", "/docs", "/openapi.json", "/v1", "/v1/fleet", "/v1/fleet/", "/v1/responses"]
    assert len(OTHERS) > 60
    assert {line.ask(request(path, body=b"x")) for path in others} == {403}
    assert arrived == []


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("path", DISGUISED)
def test_no_spelling_of_a_path_gets_through(path: str, door: Door, authority: Authority, arrived: list[str]) -> None:
    line = Line(door, authority.context("edge-1"))
    for target in disguises(path):
        assert line.ask(request(target)) in (0, 400, 403, 404, 405), target
        assert arrived == [], target


@pytest.mark.parametrize("target", [f"/v1/control/..{PUSH[3:]}", f"/{PUSH}", "/v1/fleet/%70ush-object", f"{PUSH}?a=b"])
def test_a_supernodes_path_gets_through_in_its_plain_form_alone(
    target: str, door: Door, authority: Authority, arrived: list[str]
) -> None:
    assert Line(door, authority.context("edge-1")).ask(request(target)) == 403
    assert arrived == []


@pytest.mark.slow
def test_no_method_host_or_header_gets_a_path_through(door: Door, authority: Authority, arrived: list[str]) -> None:
    line, path = Line(door, authority.context("edge-1")), DISGUISED[0]
    for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "post", "POST\t", "PRI", "X" * 99):
        for target in (path, PUSH, "*", "localhost:9092"):
            assert line.ask(request(target, method=method), method=method) in (0, 400, 403, 405), (method, target)
    for host in ("localhost:9092", "127.0.0.1", "superlink", "", "hub/v1/fleet/", "hub\r\nHost: localhost", "a b"):
        assert line.ask(request(path, host=host)) in (400, 403), host
    for header in ("X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Path", "X-Forwarded-Prefix", "Referer", "Location"):
        assert line.ask(request(path, f"{header}: {PUSH}")) == 403, header
    assert line.ask(f"POST {path}\r\n\r\n".encode()) in (0, 400, 403)
    assert line.ask(f"POST {path} HTTP/1.0\r\n\r\n".encode()) in (400, 403)
    assert line.ask(f"POST  {path}  HTTP/1.1\r\nHost: hub\r\n\r\n".encode()) in (400, 403)
    assert line.ask(f"POST {path} HTTP/2.0\r\nHost: hub\r\n\r\n".encode()) in (400, 403, 505)
    assert line.ask(f"POST {PUSH}\0 HTTP/1.1\r\nHost: hub\r\n\r\n".encode()) == 400
    assert arrived == []


@pytest.mark.matrix
@pytest.mark.parametrize(
    "headers",
    [
        ["Transfer-Encoding: chunked"],
        ["Transfer-Encoding: xchunked"],
        ["Transfer-Encoding: chunked, identity"],
        ["Transfer-Encoding: identity, chunked"],
        ["Transfer-Encoding : chunked"],
        ["Transfer-Encoding:\x0bchunked"],
        ["Transfer-Encoding:\r\n chunked"],
        ["Content-Length: 5"],
        ["Content-Length: +0"],
        ["X: y\r\n\r\n"],
        ["Expect: 100-continue", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABk"],
        ["Connection: close, Host", "Upgrade: websocket", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="],
    ],
)
def test_no_request_hides_in_the_body_of_another(
    headers: list[str], door: Door, authority: Authority, recorder: Recorder
) -> None:
    recorder.forget()
    hidden = request(DISGUISED[0], body=b"x")
    for body in (b"0\r\n\r\n" + hidden, b"5\r\nabcde\r\n0\r\n\r\n" + hidden, hidden):
        line = Line(door, authority.context("edge-1"))
        line.ask(request("/v1/fleet/get-run", *headers, body=body))
        line.close()
        bare = request("/v1/fleet/get-run", *headers).replace(b"Content-Length: 0\r\n", b"")
        line.ask(bare + body)
        line.close()
    assert {each.target for each in recorder.arrived} <= {"/v1/fleet/get-run"}
    assert all("Upgrade" not in each.headers and "Transfer-Encoding" not in each.headers for each in recorder.arrived)


def test_there_is_no_http_2_with_paths_of_its_own(door: Door, authority: Authority, arrived: list[str]) -> None:
    context = authority.context("edge-1")
    context.set_alpn_protocols(["h2"])
    with pytest.raises(ssl.SSLError, match="no application protocol"):
        door.connect(context)
    with door.connect(authority.context("edge-1")) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        assert b" 400 " in connection.recv(1000).splitlines()[0]
    assert arrived == []


def made_by_hand(authority: Authority, folder: Path, *options: str) -> Path:
    """Return a certificate for edge-1's key that certificates.sh would not make."""
    public, made = folder / "public", folder / "made.crt"
    command = ["ssh-keygen", "-e", "-m", "PKCS8", "-f", f"{authority.key('edge-1')}.pub"]
    public.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    command = ["openssl", "x509", "-new", "-force_pubkey", str(public), "-subj", "/O=fedkace_flwr/CN=edge-1"]
    subprocess.run([*command, *options, "-out", str(made)], check=True, capture_output=True)
    return made


@pytest.mark.slow
def test_nobody_gets_in_without_a_valid_certificate_for_a_supernode(
    door: Door, authority: Authority, tmp_path: Path, arrived: list[str]
) -> None:
    (tmp_path / "stranger").mkdir()
    stranger = Authority(tmp_path / "stranger")
    signed = ["-CA", str(authority.folder / "ca.crt"), "-CAkey", str(authority.folder / "ca.key"), "-set_serial", "7"]
    ca, key = (authority.folder / "ca.crt").read_bytes(), authority.key("edge-1")
    of_stranger = node_context(ca, stranger.certificate("edge-1"), stranger.key("edge-1"))
    expired = made_by_hand(authority, tmp_path, *signed, "-days", "-1")
    of_superlink = authority.context()
    of_superlink.load_cert_chain(authority.folder / "superlink.crt", authority.folder / "superlink.key")
    contexts = {
        "none": authority.context(),
        "another authority's": of_stranger,
        "expired": node_context(ca, expired, key),
        "the SuperLink's own": of_superlink,
    }
    for what, context in contexts.items():
        with door.connect(context) as connection:
            connection.sendall(request(PUSH, body=b"x"))
            assert b" 400 " in connection.recv(1000).splitlines()[0], what
    assert arrived == []
    assert Line(door, authority.context("edge-1")).ask(request(PUSH)) == 200


def test_both_authorities_get_in_while_machines_move_from_one_to_the_other(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    new, both = Authority(tmp_path / "new"), tmp_path / "both"
    for made in (authority, new):
        shutil.copytree(made.folder, both, dirs_exist_ok=True)  # the SuperLink already has its new certificate
    bundle = b"".join((made.folder / "ca.crt").read_bytes() for made in (authority, new))
    (both / "ca.crt").write_bytes(bundle)
    with Recorder(both) as superlink, Door(tmp_path / "nginx", both, superlink.port) as door:
        for made in (authority, new):
            context = node_context(bundle, made.certificate("edge-1"), made.key("edge-1"))
            assert Line(door, context).ask(request(PUSH)) == 200
        old = authority.context("edge-1")
        with pytest.raises(ssl.SSLCertVerificationError):
            door.connect(old)


def test_the_line_of_the_page_shuts_out_a_lost_certificate(
    authority: Authority, recorder: Recorder, tmp_path: Path
) -> None:
    (line,) = re.findall(r"`(if \(\$ssl_client_serial = [^`]*)`", (ROOT / "docs" / "deployment.md").read_text())
    command = ["openssl", "x509", "-noout", "-serial", "-in", str(authority.certificate("edge-1"))]
    serial = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().removeprefix("serial=")
    recorder.forget()
    with Door(tmp_path, authority.folder, recorder.port, line.replace("04CD63E1...", serial)) as door:
        assert Line(door, authority.context("edge-1")).ask(request(PUSH)) == 403
        assert recorder.begun == []
        assert Line(door, authority.context("edge-2")).ask(request(PUSH)) == 200


def test_bodies_larger_than_a_piece_of_a_model_are_refused_unread(
    door: Door, authority: Authority, recorder: Recorder
) -> None:
    recorder.forget()
    line, piece = Line(door, authority.context("edge-1")), b"x" * (5 * MEGABYTE + 1000)
    assert line.ask(request(PUSH, body=piece)) == 200
    assert [each.length for each in recorder.arrived] == [len(piece)]
    claimed = request(PUSH).replace(b"Content-Length: 0", b"Content-Length: 300000000")
    assert line.ask(claimed) == 413
    chunks = b"100000\r\n" + b"x" * MEGABYTE + b"\r\n"
    chunked = request(PUSH).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with door.connect(authority.context("edge-1")) as connection:
        connection.sendall(chunked + 7 * chunks)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 413
    for path in set(FLEET) - {PUSH}:
        assert line.ask(request(path, body=b"x" * (MEGABYTE // 4 + 1))) == 413, path
        line.close()
    assert len(recorder.arrived) == 1


def test_a_request_reaches_the_superlink_only_when_it_is_complete(
    door: Door, authority: Authority, recorder: Recorder
) -> None:
    recorder.forget()
    with door.connect(authority.context("edge-1")) as slow:
        half = request(PUSH, "Expect: 100-continue", body=b"x" * 100000)
        head, _, body = half.partition(b"\r\n\r\n")
        slow.sendall(head + b"\r\n\r\n")
        assert slow.recv(1000).startswith(b"HTTP/1.1 100 ")
        slow.sendall(body[:50000])
        assert Line(door, authority.context("edge-2")).ask(request("/v1/fleet/get-run")) == 200
        assert recorder.begun == ["/v1/fleet/get-run"]
        slow.sendall(body[50000:])
        answer = http.client.HTTPResponse(slow)
        answer.begin()
        assert answer.status == 200
    assert [each.length for each in recorder.arrived] == [0, 100000]


@pytest.mark.slow
def test_a_certificate_has_a_limited_number_of_requests_in_progress(door: Door, authority: Authority) -> None:
    context = authority.context("edge-3")
    held = []
    try:
        for _ in range(16):
            held.append(door.connect(context))
            held[-1].sendall(request(PUSH, "Expect: 100-continue").replace(b"Length: 0", b"Length: 9"))
            assert held[-1].recv(1000).startswith(b"HTTP/1.1 100 ")
        assert Line(door, authority.context("edge-3")).ask(request("/v1/fleet/pull-messages")) == 503
        assert Line(door, authority.context("edge-2")).ask(request("/v1/fleet/pull-messages")) == 200, (
            "another machine is not affected"
        )
    finally:
        for connection in held:
            connection.close()


@pytest.mark.slow
def test_a_certificate_has_a_limited_rate_of_requests(door: Door, authority: Authority) -> None:
    line, statuses = Line(door, authority.context("edge-4")), list[int]()
    while 503 not in statuses and len(statuses) < 5000:
        statuses.append(line.ask(request("/v1/fleet/pull-messages")))
    assert len(statuses) > 400 and set(statuses) == {200, 503}
    assert Line(door, authority.context("edge-2")).ask(request("/v1/fleet/pull-messages")) == 200, (
        "another machine is not affected"
    )
