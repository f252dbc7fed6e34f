"""The server process of the HTTP service: its socket, its limits, its signals."""

import ctypes
import logging
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from fedkace_flwr.errors import RunError
from fedkace_flwr.inference import service
from fedkace_flwr.inference.access import Access
from fedkace_flwr.inference.service import Watched, application

logger = logging.getLogger(__name__)

CONNECTIONS = 16
"""Connections from which on requests are refused; each may hold a body in memory."""

HEADER_BYTES = 8192
"""Longest header of a request, with the request line."""

_MMAP_THRESHOLD, _RETURNED = -3, 2**22  # glibc's number of the setting; bytes
_KEEP_ALIVE_SECONDS, _LAST_REQUESTS_SECONDS = 5, 20


def serve(folder: Path, port: int, path: Path | None, access: Access) -> int:
    """Serve until SIGTERM or SIGINT, finish the current requests, and return the exit status.

    Parameters
    ----------
    folder : Path
        With the models.
    port : int
        Port on 127.0.0.1; 0 picks one.
    path : Path or None
        A Unix socket, in place of the port.
    access : Access
        Who is answered.

    Raises
    ------
    OSError
        The port or the socket is not available.
    RunError
        The service cannot start.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else anyone can fill the log
    service.logger.setLevel(logging.INFO)
    _return_memory()
    listener, shown = listening(port, path)
    try:
        watched = Watched(folder)
        watched.look()
        server = server_for(application(watched, access))
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again at its end; this absorbs it
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        print(f"serving {folder} at {shown}", flush=True)
        server.run(sockets=[listener])
        if not server.started:
            raise RunError("the service could not start")
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    return 0


def server_for(served: Starlette) -> uvicorn.Server:
    """Return a server for an application, with uvicorn's limits."""
    config = uvicorn.Config(
        served,
        http="h11",
        loop="asyncio",
        ws="none",
        interface="asgi3",
        lifespan="on",
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        h11_max_incomplete_event_size=HEADER_BYTES,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_LAST_REQUESTS_SECONDS,
    )
    return uvicorn.Server(config)


def _return_memory() -> None:
    """Have memory of large pictures returned to the system when it is released; glibc would keep some of it."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _RETURNED)


def listening(port: int, path: Path | None = None) -> tuple[socket.socket, str]:
    """Return a listening socket, and the address to show: who is told of it may connect at once."""
    if path is not None:
        return _unix_socket(path), f"unix:{path}"
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise OSError(f"--port {port}: cannot listen there ({error.strerror or error})") from error
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


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
