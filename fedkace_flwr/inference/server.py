"""The server process of the HTTP service: its socket, its limits, its signals."""

import ctypes
import ipaddress
import logging
import resource
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.inference import service
from fedkace_flwr.inference.access import Access
from fedkace_flwr.inference.connections import ACCEPTED, HEADER_BYTES, Application, Connections, Limits
from fedkace_flwr.inference.service import Watched, application

logger = logging.getLogger(__name__)

_LAST_REQUESTS_SECONDS = 20
_MMAP_THRESHOLD, _RETURNED = -3, 2**22  # glibc's number of the setting; bytes
_QUEUE = 2048  # connections that wait to be accepted
_OTHER_DESCRIPTORS = 56  # files, sockets of the decoders, accepted connections that are not yet counted, and reserve
_FEWEST = 64  # connections; more than there are places in the decoders' lanes


@dataclass(frozen=True)
class Address:
    """Where the service listens.

    Attributes
    ----------
    host, port : str and int
        Address and port; 0 picks a port.
    socket : Path or None
        A Unix socket, in place of them.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    socket: Path | None = None


def serve(folder: Path, address: Address, access: Access) -> int:
    """Serve until SIGTERM or SIGINT, finish the current requests, and return the exit status.

    Raises
    ------
    OSError
        The address is not available.
    ConfigError
        The process may open too few files.
    RunError
        The service cannot start.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else anyone can fill the log
    for each in (logger, service.logger):
        each.setLevel(logging.INFO)
    limits = affordable(Limits())
    _return_memory()
    listener, shown = listening(address)
    try:
        watched = Watched(folder)
        watched.look()
        server = server_for(application(watched, access), limits)
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again at its end; this absorbs it
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        _warn_of_others(listener, access)
        print(f"serving {folder} at {shown}", flush=True)
        run(server, listener)
    finally:
        if address.socket is not None:
            address.socket.unlink(missing_ok=True)
    return 0


def server_for(served: Application, limits: Limits) -> uvicorn.Server:
    """Return a server for an application."""
    config = uvicorn.Config(
        served,
        http=Connections(limits).protocol,  # type: ignore[arg-type]
        loop="asyncio",
        ws="none",
        interface="asgi3",
        lifespan="on",
        backlog=ACCEPTED,
        h11_max_incomplete_event_size=HEADER_BYTES,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_LAST_REQUESTS_SECONDS,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """A server for which many connections may wait to be accepted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(_QUEUE)  # asyncio takes one number for this and for how many it accepts at a time


def run(server: uvicorn.Server, listener: socket.socket) -> None:
    """Run a server until it is told to end; in the main thread, by a signal.

    Raises
    ------
    RunError
        It could not start; the log says why.
    """
    server.run(sockets=[listener])
    if not server.started:
        raise RunError("the service could not start")


def affordable(limits: Limits) -> Limits:
    """Fit the number of connections to the files that the process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        limits = replace(limits, connections=soft - _OTHER_DESCRIPTORS)
    if limits.connections < _FEWEST:
        fewest = _FEWEST + _OTHER_DESCRIPTORS
        raise ConfigError(f"ulimit -n = {soft}: the service may open too few files; must be at least {fewest}")
    return limits


def _return_memory() -> None:
    """Have memory of large pictures returned to the system when it is released; glibc would keep some of it."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _RETURNED)


def listening(address: Address) -> tuple[socket.socket, str]:
    """Return a listening socket, and the address to show: who is told of it may connect at once."""
    if address.socket is not None:
        return _unix_socket(address.socket), f"unix:{address.socket}"
    try:
        info = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listener = socket.create_server((address.host, address.port), family=info[0][0])
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"--host {address.host} --port {address.port}: cannot listen there ({reason})") from error
    host, port = listener.getsockname()[:2]
    return listener, f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


def _unix_socket(path: Path) -> socket.socket:
    """Listen on a Unix socket that owner and group may connect to, in place of one that nobody listens on any more."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o660)
        listener.listen()
    except OSError as error:
        listener.close()
        raise OSError(f"--socket {path}: cannot listen there ({error.strerror or error})") from error
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def _warn_of_others(listener: socket.socket, access: Access) -> None:
    if listener.family == socket.AF_UNIX:
        return
    host = listener.getsockname()[0]
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        lacking = "encryption" if access.token else "authentication"
        logger.warning("%s is reachable from other machines without %s; use a reverse proxy", host, lacking)
