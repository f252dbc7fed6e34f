"""Callers who do their worst: :func:`run_attack` runs in a process of its own and keeps some connections busy."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from experiments.bench.serving import bombs

_Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_PAUSE_SECONDS = 0.5
_WHOLE = 9_900_000
_TRICKLE = 16_000  # bytes in each pause; slower than the service allows would only be closed sooner


@dataclass(frozen=True)
class Attack:
    """What each connection does, again and again.

    Attributes
    ----------
    header : str
        Lines of the request before its length.
    body : callable
        Makes the body; called once, in the attacking process.
    pace : {"fast", "slow", "never"}
        Whether the body is sent at once, in a trickle that never ends, or the header itself is never finished.
    connections : int
        How many do so at once.
    """

    header: str
    body: Callable[[], bytes]
    pace: str = "fast"
    connections: int = 16


_PICTURE = "POST /predict HTTP/1.1\r\nHost: localhost\r\n"
_FORM = f"{_PICTURE}Content-Type: {bombs.FORM}\r\n"
_LONG = "GET /health HTTP/1.1\r\nHost: localhost\r\n" + "a:\r\n" * 1900


def _nothing() -> bytes:
    return b""


ATTACKS: dict[str, Attack] = {
    "half-sent headers": Attack(_PICTURE, _nothing, "never"),
    "half-sent headers on 1,400 connections": Attack(_PICTURE, _nothing, "never", 1400),
    "slow bodies": Attack(_PICTURE, _nothing, "slow"),
    "long headers": Attack(_LONG, _nothing),
    "bodies of 9.9 MB": Attack(_PICTURE, lambda: bytes(_WHOLE)),
    "WebP of 7071 x 7071": Attack(_PICTURE, lambda: bombs.blank(7071, 7071, "WEBP", lossless=True, method=0)),
    "JPEG 2000 of 7071 x 7071": Attack(_PICTURE, lambda: bombs.blank(7071, 7071, "JPEG2000")),
    "JPEG of 100,000 scans": Attack(_PICTURE, lambda: bombs.scans(4096, 3072, 100_000)),
    "PNG of empty chunks, 1 MB": Attack(_PICTURE, lambda: bombs.chunks(999_000)),
    "forms of false boundaries, 1 MB": Attack(_FORM, lambda: bombs.form(999_000)),
    "WebP of 2640 x 2640": Attack(_PICTURE, lambda: bombs.photo(2640, 2640, "WEBP", method=0)),
    "PNG of 3547 x 3547": Attack(_PICTURE, lambda: bombs.blank(3547, 3547, "PNG")),
    "JPEG of 4096 x 3072": Attack(
        _PICTURE, lambda: bombs.photo(4096, 3072, quality=90, progressive=True, subsampling=0)
    ),
    "JPEG of 1920 x 1080": Attack(_PICTURE, lambda: bombs.photo(1920, 1080)),
    "JPEG of 640 x 480": Attack(_PICTURE, lambda: bombs.photo(640, 480)),
}
"""Each attack by name."""

EVERYTHING = "one connection of each"
"""Name of the attack in which each connection does something else."""

_AT_ONCE = {EVERYTHING: list(ATTACKS.values())}


def run_attack(name: str, port: int, ready: Connection) -> None:
    """Attack the service at a port until this process is ended; tell ``ready`` when all connections are at it."""
    asyncio.run(_run_attack(_AT_ONCE.get(name) or [ATTACKS[name]] * ATTACKS[name].connections, port, ready))


async def _run_attack(attacks: list[Attack], port: int, ready: Connection) -> None:
    begun = asyncio.Semaphore(0)

    async def connection(talk: _Talk) -> None:
        first = True
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    if first:
                        begun.release()
                    first = False
                    await talk(reader, writer)
                finally:
                    writer.transport.abort()

    talks = {attack: _talk(attack) for attack in set(attacks)}
    tasks = [asyncio.create_task(connection(talks[attack])) for attack in attacks]
    for _ in tasks:
        await begun.acquire()
    ready.send(None)
    await asyncio.gather(*tasks)


def _talk(attack: Attack) -> _Talk:
    if attack.pace == "fast":
        return _fast(attack.header, attack.body())
    return _slow(attack.header) if attack.pace == "slow" else _never(attack.header)


def _fast(header: str, body: bytes) -> _Talk:
    request = f"{header}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request)
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")

    return talk


def _slow(header: str) -> _Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{header}Content-Length: {_WHOLE}\r\n\r\n".encode())
        while not reader.at_eof() and not writer.is_closing():
            writer.write(bytes(_TRICKLE))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), _PAUSE_SECONDS)

    return talk


def _never(header: str) -> _Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(header.encode())
        await reader.read()

    return talk
