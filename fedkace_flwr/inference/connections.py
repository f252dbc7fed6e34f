"""Connections that can be held open only for so long, and only so many at once.

uvicorn reads requests and writes answers, but waits for the header of a request for ever. A :class:`Connection` stands
between uvicorn's protocol and the socket and knows what the connection is waiting for. While it waits for its peer, a
deadline runs, and if there are too many connections, the one that has waited longest is closed for a new one. While it
waits for an answer of this service, it is left alone.
"""

import asyncio
import re
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

ACCEPTED = 8
"""Connections that are accepted at a time. So few that a new one is read before it could be the one that has waited
longest: the event loop takes some turns to begin to read it.
"""

HEADER_BYTES = 8192
"""Longest header of a request, with the request line; it has at most 100 lines."""

_HEADER_LINES = 100
_END_OF_HEADER = re.compile(rb"\n\r?\n")
_REASON = b'{"error":"the header of the request is too long: at most 8192 bytes in 100 lines are allowed"}'
_TOO_LONG = b"\r\n".join(
    (
        b"HTTP/1.1 431 Request Header Fields Too Large",
        b"content-type: application/json",
        b"content-length: %d" % len(_REASON),
        b"connection: close",
        b"",
        _REASON,
    )
)

_KEY = "connection"  # of the state that uvicorn hands to the application
_READ = 2**16  # bytes read at a time

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """Limits of connections.

    Attributes
    ----------
    connections : int
        Most connections at once.
    header_seconds : float
        Time for the header of a request, from the beginning of the connection or the last answer.
    answer_seconds : float
        Time in which the peer has to take an answer.
    linger_seconds : float
        How long what the peer still sends is read and dropped after an answer that was given before the request was
        read whole. Without this the peer might lose the answer.
    """

    connections: int = 96
    header_seconds: float = 5.0
    answer_seconds: float = 5.0
    linger_seconds: float = 5.0


class _Phase(Enum):
    """What a connection waits for."""

    HEADER = "the header of a request"
    BODY = "its body"
    WORK = "its answer"
    ANSWER = "the peer to take the answer"
    LINGER = "the peer to close the connection"
    CLOSED = "nothing"


class Connections:
    """All connections of a service.

    Parameters
    ----------
    limits : Limits
        Their number and their deadlines.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.buffer = memoryview(bytearray(_READ))
        self._open: dict[Connection, None] = {}
        self._waiting: dict[Connection, None] = {}  # for their peers, the longest first

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> "Connection":
        """Make the protocol of a new connection, as uvicorn asks for it."""
        connection = Connection(self)
        connection.serve_with(H11Protocol(config, server_state, {**app_state, _KEY: connection}, _loop))
        return connection

    def add(self, connection: "Connection") -> None:
        """Count a new connection; close another one, or this one, if there are too many."""
        self._open[connection] = None
        if len(self._open) > self.limits.connections:
            closed = next(iter(self._waiting), connection)
            self.remove(closed)  # at once, because others may come before the event loop closes it
            closed.abort()

    def note(self, connection: "Connection", *, waits: bool) -> None:
        """Note that a connection began to wait for its peer, or that it no longer does."""
        self._waiting.pop(connection, None)
        if waits and connection in self._open:
            self._waiting[connection] = None

    def remove(self, connection: "Connection") -> None:
        """Forget a connection."""
        self._open.pop(connection, None)
        self._waiting.pop(connection, None)


class Connection(asyncio.BufferedProtocol):
    """One connection.

    Attributes
    ----------
    on_lost : callable or None
        Called if the connection ends before the answer is complete.
    """

    def __init__(self, connections: Connections) -> None:
        self.on_lost: Callable[[], None] | None = None
        self._inner: H11Protocol | None = None
        self._all = connections
        self._phase = _Phase.CLOSED
        self._timer: asyncio.TimerHandle | None = None
        self._header: bytearray | None = bytearray()  # None once it was handed on
        self._owed = 0  # bytes of the request that have not arrived; negative if there are more

    def serve_with(self, inner: H11Protocol) -> None:
        """Set uvicorn's protocol."""
        self._inner = inner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        assert isinstance(transport, asyncio.Transport) and self._inner is not None
        self._transport = transport
        self._all.add(self)
        self._enter(_Phase.HEADER, self._all.limits.header_seconds)
        self._inner.connection_made(_Outlet(self, transport))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that all connections share; it is emptied at once."""
        return self._all.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Hand on what has arrived: the header as a whole, the body as it comes."""
        if self.closing or self._inner is None:
            return
        data = bytes(self._all.buffer[:nbytes])
        if self._header is None:
            self._owed -= nbytes
            self._inner.data_received(data)
            return
        looked_at = max(0, len(self._header) - 3)
        self._header += data
        end = _END_OF_HEADER.search(self._header, looked_at)
        size = len(self._header) if end is None else end.end()
        if size > HEADER_BYTES or self._header.count(b"\n", 0, size) > _HEADER_LINES:
            self._transport.write(_TOO_LONG)
            self.close()
        elif end is not None:
            whole, self._header = bytes(self._header), None
            self._owed = size - len(whole)
            self._inner.data_received(whole)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request, if there is one."""
        answering = self._phase in (_Phase.BODY, _Phase.WORK, _Phase.ANSWER)
        self._enter(_Phase.CLOSED)
        self._all.remove(self)
        if answering and self.on_lost is not None:
            self.on_lost()
        self.on_lost = None
        inner, self._inner = self._inner, None  # each refers to the other
        if inner is not None:
            inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Hand on."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Hand on."""
        if self._inner is not None:
            self._inner.resume_writing()

    def asked(self, length: int) -> None:
        """The header of a request is complete.

        Parameters
        ----------
        length : int
            That of the body; of a body whose length is not known any number above 0.
        """
        if not self.closing:
            self._owed += length
            self._enter(_Phase.BODY if length else _Phase.WORK)

    def body_read(self) -> None:
        """The body is complete."""
        if self._phase is _Phase.BODY:
            self._enter(_Phase.WORK)

    def answering(self) -> bool:
        """The answer begins; return whether the connection has to be closed after it."""
        if not self.closing:
            self._enter(_Phase.ANSWER, self._all.limits.answer_seconds)
        return self._owed != 0

    def answered(self) -> None:
        """The answer is complete."""
        self.on_lost = None
        if self._phase is _Phase.ANSWER:
            self._header, self._owed = bytearray(), 0
            self._enter(_Phase.HEADER, self._all.limits.header_seconds)

    def abort(self) -> None:
        """Close at once."""
        if self._phase is _Phase.ANSWER or self._transport.get_write_buffer_size():
            # Otherwise the system would keep what the peer does not take.
            raw = self._transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def close(self) -> None:
        """Close once what was written is sent and, if the peer is still sending, once it has stopped."""
        if self.closing:
            return
        unread = bool(self._header) or self._owed != 0
        self._enter(_Phase.LINGER, self._all.limits.linger_seconds)
        if not unread:
            self._transport.close()
            return
        try:
            self._transport.resume_reading()
            self._transport.write_eof()
        except OSError:  # the peer is gone
            self._transport.abort()

    @property
    def closing(self) -> bool:
        """Whether it was closed."""
        return self._phase in (_Phase.LINGER, _Phase.CLOSED) or self._transport.is_closing()

    def _enter(self, phase: _Phase, seconds: float | None = None) -> None:
        self._phase = phase
        self._all.note(self, waits=phase not in (_Phase.WORK, _Phase.CLOSED))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)


class _Outlet(asyncio.Transport):
    """What uvicorn's protocol takes for the socket; closing it is up to the connection."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        super().__init__()
        self._connection = connection
        self._transport = transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def write(self, data: Any) -> None:
        if not self._connection.closing:
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self._connection.closing:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._connection.closing:
            self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._connection.closing

    def close(self) -> None:
        self._connection.close()

    def abort(self) -> None:
        self._connection.abort()


def connection_of(scope: MutableMapping[str, Any]) -> Connection | None:
    """Return a request's connection; None in an application that runs without :class:`Connections`."""
    found = scope.get("state", {}).get(_KEY)
    return found if isinstance(found, Connection) else None


def following(application: Application) -> Application:
    """Wrap an application so that it tells each connection how far its request has come."""

    async def followed(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        connection = connection_of(scope) if scope["type"] == "http" else None
        if connection is None:
            await application(scope, receive, send)
            return

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                connection.body_read()
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and connection.answering():
                message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                connection.answered()

        headers = dict(scope["headers"])
        length = 1 if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))
        connection.asked(length)
        await application(scope, receiving, sending)

    return followed
