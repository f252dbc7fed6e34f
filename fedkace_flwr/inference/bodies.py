"""The bodies of requests, with limits on their size, on the time that they take, and on the memory of all together."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

MAX_BYTES = 10_000_000
"""Largest body of a request, in bytes."""

MEMORY = 24 * 2**20
"""Most bytes of all bodies together."""

_BLOCK = 2**16


@dataclass(frozen=True)
class Pace:
    """How fast a body has to arrive.

    Attributes
    ----------
    seconds : float
        Time for a whole body.
    window : float
        After so many seconds without ``quota`` bytes a body is given up.
    quota : int
        See ``window``.
    """

    seconds: float = 30.0
    window: float = 5.0
    quota: int = 2**16


class Bodies:
    """The bodies that are in memory.

    If there is no room for another block, the largest body is given up that is still arriving, or that waits for the
    decoding of other large pictures. Bodies that are about to be decoded are waited for.

    Parameters
    ----------
    memory : int
        Most bytes of all bodies together.
    pace : Pace
        How fast each has to arrive.
    """

    def __init__(self, memory: int = MEMORY, pace: Pace | None = None) -> None:
        self.pace = pace or Pace()
        self._memory = memory
        self._held = 0
        self._uploads: dict[Upload, None] = {}
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def upload(self) -> AsyncIterator["Upload"]:
        """A request's body, empty at first; its memory is released at the end.

        Raises
        ------
        HTTPException
            The body was given up while the request was being answered.
        """
        upload = Upload(self)
        self._uploads[upload] = None
        try:
            async with asyncio.timeout(None) as upload.timeout:
                yield upload
        except TimeoutError as error:
            if upload.timeout is None or not upload.timeout.expired():
                raise
            slow = HTTPException(408, "the body did not arrive fast enough")
            raise upload.fault or slow from error
        finally:
            del self._uploads[upload]
            upload.end()

    async def make_room(self, size: int) -> None:
        """Wait until ``size`` more bytes fit, and count them."""
        while self._held + size > self._memory:
            given_up = max(
                (each for each in self._uploads if each.expendable), key=lambda each: each.size, default=None
            )
            if given_up is not None:
                given_up.give_up(HTTPException(503, "too many large requests at once; try again", {"Retry-After": "1"}))
            else:
                self._freed.clear()
                await self._freed.wait()
        self._held += size

    def free(self, size: int) -> None:
        """Count bytes as released."""
        self._held -= size
        self._freed.set()


class Upload:
    """One request's body.

    Attributes
    ----------
    blocks : list of bytearray
        The content; its blocks are large even if it arrives byte by byte.
    size : int
        Bytes in the blocks.
    fault : HTTPException or None
        Why it was given up.
    """

    def __init__(self, bodies: Bodies) -> None:
        self.blocks: list[bytearray] = []
        self.size = 0
        self.fault: HTTPException | None = None
        self.timeout: asyncio.Timeout | None = None
        self._bodies = bodies
        self._needed = 0
        self._ended = False

    @property
    def expendable(self) -> bool:
        """Whether it holds memory that could be released for others."""
        return self.size > 0 and not self._needed and not self._is_ending()

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Keep its memory while this lasts."""
        self._needed += 1
        try:
            yield
        finally:
            self._needed -= 1
            if self._ended:
                self.end()

    def give_up(self, fault: HTTPException) -> None:
        """Release its memory and end its request, at the next moment when that waits for anything."""
        if self.timeout is not None and not self._is_ending():
            self.fault = fault
            self.timeout.reschedule(asyncio.get_running_loop().time())
            if not self._needed:
                self.release()

    def _is_ending(self) -> bool:
        return self.fault is not None or (self.timeout is not None and self.timeout.expired())

    def end(self) -> None:
        """Release its memory as soon as nothing needs it."""
        self._ended = True
        if not self._needed:
            self.release()

    def abandon(self) -> None:
        """End its request, because nobody waits for the answer."""
        self.give_up(HTTPException(400, "the connection was closed"))

    def release(self) -> None:
        """Release its memory."""
        if self.size:
            self._bodies.free(self.size)
        self.blocks, self.size = [], 0

    async def read(self, request: Request) -> None:
        """Read a request's body.

        Raises
        ------
        HTTPException
            It is empty, too large or too slow, or ends early.
        """
        stated = int(request.headers.get("content-length", "0"))
        if stated > MAX_BYTES:
            raise HTTPException(413, f"the body is too large: at most {MAX_BYTES:,} bytes are allowed")
        if not stated:
            raise HTTPException(422, "the body is empty; send the bytes of a picture")
        try:
            await self._read(request)
        except ClientDisconnect as error:
            raise HTTPException(400, "the body ended early") from error

    async def _read(self, request: Request) -> None:
        pace, clock = self._bodies.pace, asyncio.get_running_loop().time
        end, due, arrived = clock() + pace.seconds, clock() + pace.window, 0
        self._expect_until(min(due, end))
        async for block in request.stream():
            before = clock()
            self._expect_until(None)  # waiting for room is not the sender's fault
            await self._bodies.make_room(len(block))
            self._append(block)
            arrived += len(block)
            end, due = end + clock() - before, due + clock() - before
            if arrived >= pace.quota:
                due, arrived = clock() + pace.window, 0
            self._expect_until(min(due, end))
        self._expect_until(None)

    def _append(self, block: bytes) -> None:
        if self.blocks and len(self.blocks[-1]) + len(block) <= _BLOCK:
            self.blocks[-1] += block
        else:
            self.blocks.append(bytearray(block))
        self.size += len(block)

    def _expect_until(self, when: float | None) -> None:
        if self.timeout is not None and not self._is_ending():
            self.timeout.reschedule(when)
