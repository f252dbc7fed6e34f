"""The real nginx with the files of ``deploy/``, and a server behind it that keeps what reaches it."""

import contextlib
import http.client
import importlib.util
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import psutil

from fedkace_flwr.experiments.running.ports import free_ports
from support.systems.federation import DEPLOY, environment, script, until
from support.tools import need_tools


def most_memory(process: int) -> int:
    """Return the most bytes that a process has had so far."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def deployed(name: str) -> ModuleType:
    """Import a Python file of ``deploy/``."""
    spec = importlib.util.spec_from_file_location(f"deployed_{name}", DEPLOY / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Authority:
    """A federation's authority, with the SuperLink's certificate and one for each machine asked for."""

    def __init__(self, folder: Path) -> None:
        need_tools("openssl", "ssh-keygen")
        self.folder = folder / "certificates"
        self._env = environment(folder)
        self._must("certificates.sh", "ca", self.folder)
        self._must("certificates.sh", "superlink", self.folder, "localhost")

    def _must(self, *command: object) -> None:
        done = script(str(command[0]), *command[1:], env=self._env)
        assert done.returncode == 0, done.stderr

    def key(self, name: str) -> Path:
        """Return a machine's private key, which is made first if need be."""
        path = self.folder.parent / f"{name}.key"
        if not path.exists():
            self._must("node-key.sh", path, name)
        return path

    def certificate(self, name: str) -> Path:
        """Return a machine's certificate."""
        path = self.folder / "nodes" / f"{name}.crt"
        if not path.exists():
            self._must("certificates.sh", "node", self.folder, f"{self.key(name)}.pub")
        return path

    def context(self, name: str = "") -> ssl.SSLContext:
        """Return the TLS context with which a SuperNode connects; without a name, one without a certificate."""
        authority = (self.folder / "ca.crt").read_bytes()
        if name:
            return node_context(authority, self.certificate(name), self.key(name))
        return ssl.create_default_context(cadata=authority.decode())


def node_context(authority: bytes, certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS context that ``supernode.py`` makes."""
    made = deployed("supernode").client_context(authority, certificate, key)
    assert isinstance(made, ssl.SSLContext)
    return made


@dataclass
class Arrived:
    """A request that got through."""

    line: str
    headers: dict[str, str]
    length: int

    @property
    def target(self) -> str:
        return self.line.split(" ")[1]


@dataclass
class Recorder:
    """A TLS server that answers every request with 200 and keeps what arrives; stands where the SuperLink would.

    Attributes
    ----------
    answers : dict of str to tuple
        Status and body for targets that get another answer.
    begun : list of str
        Targets of all requests whose headers have arrived.
    arrived : list of Arrived
        Requests that have arrived as a whole.
    """

    certificates: Path
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    arrived: list[Arrived] = field(default_factory=list)

    def forget(self) -> None:
        """Forget all requests."""
        self.begun.clear()
        self.arrived.clear()

    def __enter__(self) -> "Recorder":
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle_one_request()

            def __getattr__(self, name: str) -> Any:
                if name.startswith("do_"):
                    return self.answer
                raise AttributeError(name)

            def answer(self) -> None:
                recorder.begun.append(self.path)
                length = len(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                recorder.arrived.append(Arrived(self.requestline, dict(self.headers.items()), length))
                status, body = recorder.answers.get(self.path, (200, b""))
                self.send_response(status)
                self.send_header("Content-Type", "application/protobuf")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificates / "superlink.crt", self.certificates / "superlink.key")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def configuration(folder: Path, name: str, changes: Mapping[str, str]) -> Path:
    """Write a file of ``deploy/`` with other ports and paths, and nothing else changed, and the main one, its path."""
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    site = folder / "fedkace.conf"
    _adapt(name, site, changes)
    main = folder / "nginx.conf"
    _adapt(
        "nginx-main.conf",
        main,
        {
            "daemon off;": "daemon off; user root;",
            "/tmp/nginx.pid": str(folder / "pid"),
            "error_log stderr;": f"error_log {folder}/error.log;",
            "access_log /dev/stdout;": f"access_log {folder}/access.log; {temporary}",
            "/etc/nginx/conf.d/fedkace.conf": str(site),
        },
    )
    return main


def _adapt(name: str, path: Path, changes: Mapping[str, str]) -> None:
    """Copy a file of ``deploy/`` with some texts replaced, all of which it must contain."""
    text = (DEPLOY / name).read_text()
    for old, new in changes.items():
        assert old in text, f"deploy/{name}: {old}"
        text = text.replace(old, new)
    path.write_text(text)


@dataclass
class Nginx:
    """The real nginx with a file of ``deploy/``, on ports of the loopback.

    Parameters
    ----------
    folder : Path
        Folder for everything that nginx writes.
    certificates : Path
        Folder of the authority's and the SuperLink's certificates.

    Attributes
    ----------
    port, second : int
        Free ports that it may listen on; it does on the first.
    """

    folder: Path
    certificates: Path

    name: ClassVar[str]

    def changes(self) -> Mapping[str, str]:
        """Texts of the file and what replaces them."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        need_tools("nginx")
        self.folder.mkdir(exist_ok=True)
        self.port, self.second = free_ports(2)
        main = configuration(self.folder, self.name, self.changes())
        command = ["nginx", "-p", str(self.folder), "-e", str(self.folder / "error.log"), "-c", str(main)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        until(self._is_up, "nginx listens", pause=0.02, log=self.log)
        return self

    def _is_up(self) -> bool:
        if self._process.poll() is not None:
            assert self._process.stderr is not None
            raise AssertionError(self._process.stderr.read() + self.log())
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def most_memory(self) -> int:
        """Return the most bytes that nginx's processes have had so far, together."""
        main = psutil.Process(self._process.pid)
        return sum(most_memory(process.pid) for process in (main, *main.children(recursive=True)))

    def log(self) -> str:
        """Return nginx's own messages."""
        path = self.folder / "error.log"
        return path.read_text() if path.exists() else ""


@dataclass
class Door(Nginx):
    """The hub's nginx in front of a server on a port of the loopback.

    Parameters
    ----------
    superlink : int
        Port of the server behind it.
    more : str
        Lines that an administrator adds to the ``server`` block.
    """

    superlink: int
    more: str = ""

    name = "nginx.conf"

    def changes(self) -> Mapping[str, str]:
        """Its ports, and where its certificates are."""
        return {
            "listen 9093 ssl;": f"listen 127.0.0.1:{self.port} ssl;",
            "listen [::]:9093 ssl;": self.more,
            "127.0.0.1:9092": f"127.0.0.1:{self.superlink}",
            "/etc/fedkace/certificates": str(self.certificates),
        }

    def connect(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Open a connection."""
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return context.wrap_socket(plain, server_hostname="localhost")


@dataclass
class Front(Nginx):
    """The nginx in front of the prediction service, with TLS on its first port and without on its second.

    Parameters
    ----------
    path : Path
        The Unix socket of the service.
    """

    path: Path

    name = "nginx-predict.conf"

    def changes(self) -> Mapping[str, str]:
        """Its ports, and where its certificate and the service are."""
        return {
            "listen 8443 ssl;": f"listen 127.0.0.1:{self.port} ssl;",
            "listen [::]:8443 ssl;": f"listen 127.0.0.1:{self.second};",
            "/run/fedkace-serve/predict": str(self.path),
            "/etc/fedkace/certificates/predict": str(self.certificates / "superlink"),
        }


class Line:
    """Sends raw requests one after another, over as few connections as possible."""

    def __init__(self, door: Door, context: ssl.SSLContext) -> None:
        self._door = door
        self._context = context
        self._socket: ssl.SSLSocket | None = None

    def ask(self, raw: bytes, method: str = "POST") -> int:
        """Return the status of the answer; 0 if the connection is closed without one."""
        if self._socket is None:
            self._socket = self._door.connect(self._context)
        answer = http.client.HTTPResponse(self._socket, method=method)
        try:
            self._socket.sendall(raw)
            answer.begin()
            answer.read()
        except (OSError, http.client.HTTPException):
            self.close()
            return 0
        if answer.will_close:
            self.close()
        return answer.status

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def request(target: str | bytes, *headers: str, method: str = "POST", body: bytes = b"", host: str = "hub") -> bytes:
    """Return the bytes of a request, which need not be a valid one."""
    raw = target if isinstance(target, bytes) else target.encode("utf-8", "surrogateescape")
    lines = [f"Host: {host}", f"Content-Length: {len(body)}", *headers]
    return method.encode() + b" " + raw + b" HTTP/1.1\r\n" + "\r\n".join([*lines, "", ""]).encode() + body


def disguises(path: str) -> Iterator[str]:
    """Yield spellings under which a careless server might still find a path."""
    first, second, last = path.strip("/").split("/")
    yield path
    for end in (
        "/",
        "//",
        "/.",
        ".",
        "%00",
        "%20",
        "%09",
        "%0a",
        "%0d%0a",
        "%2f",
        "%3f",
        "%23",
        ";",
        ";a=b",
        "?",
        "?a=b",
    ):
        yield path + end
    for end in ("#", "#/v1/fleet/push-object", "?/v1/fleet/push-object", ";/v1/fleet/push-object", "\\", "/..", "%5c"):
        yield path + end
    yield from (path.upper(), path.title(), path.swapcase())
    yield "/" + "".join(f"%{ord(letter):02x}" for letter in path[1:])
    yield "".join(f"%{ord(letter):02X}" for letter in path)
    yield f"/{first}/%{ord(second[0]):02x}{second[1:]}/{last}"
    yield f"/{first}/%25{ord(second[0]):02x}{second[1:]}/{last}"
    yield f"/{first}%2f{second}%2f{last}"
    yield f"/{first}%252f{second}%252f{last}"
    yield f"/{first}%5c{second}%5c{last}"
    yield f"/{first}%c0%af{second}%c0%af{last}"
    yield f"/{first}%u002f{second}%u002f{last}"
    yield f"/{first}\\{second}\\{last}"
    yield f"/{first}/\N{FULLWIDTH LATIN SMALL LETTER C}{second[1:]}/{last}"
    for slashes in ("//", "///", "/./", "/.//", "/%2e/", "/%2f/", "/x/../", "/x/%2e%2e/", "/x/..%2f", "//x/..//../"):
        yield f"{slashes}{first}/{second}/{last}"
        yield f"/{first}{slashes}{second}/{last}"
        yield f"/{first}/{second}{slashes}{last}"
    ways_up = ("..", "%2e%2e", ".%2e", "%2e.", "%252e%252e", "..%00", "..;", "..;a=b", "..%20", "..%0a", ".%00.")
    for up in ways_up:
        for begin in ("/v1/fleet", "/v1/fleet/", "/v1//fleet"):
            yield f"{begin}/{up}/{second}/{last}"
            yield f"{begin}/{up}%2f{second}%2f{last}"
            yield f"{begin}%2f{up}%2f{second}/{last}"
        yield f"/v1/fleet/push-object/{up}/{up}/{second}/{last}"
        yield f"/v1/fleet/push-object/{up}/{up}/{up}/{first}/{second}/{last}"
        yield f"/v1/fleet\\{up}\\{second}\\{last}"
    for scheme in ("http", "https", "HTTPS", "ftp", "h2"):
        for host in ("localhost", "127.0.0.1:9092", "hub:9093", "user@localhost", "[::1]:9092", ""):
            yield f"{scheme}://{host}{path}"
    yield f"https://localhost/v1/fleet/..{path[3:]}"
    yield f"https://localhost/v1/fleet/push-object?{path}"
    yield f"https://localhost//{path}"
    yield f"//localhost{path}"
    yield f"localhost{path}"
    yield path[1:]
