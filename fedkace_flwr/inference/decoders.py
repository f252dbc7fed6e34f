"""Pictures decoded in other processes (:mod:`fedkace_flwr.data.decoding`), in three lanes, each one at a time.

A picture enters the first lane that takes files of its size. A lane decodes pictures up to a number of pixels, in as
much processor time as such pictures usually take and no more. What has more pixels, or is not finished when its time
is over, is decoded anew in the next lane, at a lower priority. So usual pictures do not wait until large ones are
decoded, and a queue of pictures that were made to take long moves as fast as one of usual pictures. In the last lane a
picture gets a process of its own, whose memory is free again before the next one begins.
"""

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data import decoding, pixels
from fedkace_flwr.data.decoding import FRAME, MESSAGE, Limits
from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import DataError, FedkaceError
from fedkace_flwr.inference.bodies import MAX_BYTES, Upload

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Lane(Limits):
    """What a decoder may take, and how many pictures may wait for it.

    Attributes
    ----------
    places : int
        Most pictures at once, with the one that is being decoded.
    file : int
        Largest file, in bytes.
    """

    places: int
    file: int


LANES = (
    Lane(
        places=20,
        file=1_000_000,
        pixel_memory=10 * 2**20,  # 1,048,576 pixels
        memory=14 * 2**20,
        seconds=0.01,
        pixel_seconds=30e-9,
        nice=0,
    ),
    Lane(
        places=20,
        file=5_000_000,
        pixel_memory=24 * 2**20,  # 2,516,582 pixels, more than 1920 x 1080
        memory=30 * 2**20,
        seconds=0.02,
        pixel_seconds=40e-9,
        nice=5,
    ),
    Lane(
        places=20,
        file=MAX_BYTES,
        pixel_memory=pixels.PICTURE_MEMORY,
        memory=pixels.PICTURE_MEMORY + 15 * 2**20,
        seconds=1.0,
        pixel_seconds=200e-9,
        nice=10,
    ),
)
"""From small pictures to the largest. They have fewer places together than there are connections, so that whoever fills
one lane leaves connections for the others.
"""

_MODULE = "fedkace_flwr.inference.decoding"
_END_SECONDS = 5.0

Pixels = NDArray[np.uint8]


class DecoderError(FedkaceError):
    """A picture could not be decoded, for a reason that does not lie in the picture."""


class BusyError(DecoderError):
    """Too many pictures wait already."""


class Decoders:
    """The lanes. Started and closed with the event loop in which they are used.

    Parameters
    ----------
    lanes : sequence of Lane
        From small pictures to the largest.
    """

    def __init__(self, lanes: Sequence[Lane] = LANES) -> None:
        self._fork_server = _ForkServer()
        self._lanes = [_Queue(self._fork_server, limits, last=limits is lanes[-1]) for limits in lanes]
        self._running: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the processes; the first picture does so otherwise."""
        if not self._running:
            self._running = [asyncio.create_task(lane.run()) for lane in self._lanes]

    async def close(self) -> None:
        """End the processes."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running = []
        await self._fork_server.stop()

    async def square(self, upload: Upload, form: str, framing: Framing) -> Pixels:
        """Decode a picture.

        Parameters
        ----------
        upload : Upload
            The file, or a form with the file. Its memory may be given up when this returns or raises.
        form : str
            Content type of the body if it is a form, else empty.
        framing : Framing
            How the picture becomes a square.

        Returns
        -------
        ndarray
            uint8 (3, S, S).

        Raises
        ------
        DataError
            The picture is refused; the message says why.
        BusyError
            Its lane is full.
        DecoderError
            The decoders had to be started anew.
        """
        self.start()
        found = _Found()
        for lane in self._lanes:
            if found.exceeded and upload.size <= lane.limits.file:
                found = await lane.decode(upload, form, framing)
        if found.cut is None:
            raise DataError(found.refused or _EXCEEDED)
        return found.cut


_EXCEEDED = "the picture cannot be used: decoding it takes too much time or memory"


@dataclass(frozen=True)
class _Found:
    """What a decoder made of a picture: the square, or a reason; by default nothing, because it exceeded its limits."""

    cut: Pixels | None = None
    refused: str = ""
    exceeded: bool = True


@dataclass(frozen=True)
class _Job:
    upload: Upload
    form: str
    framing: Framing
    done: "asyncio.Future[_Found]"


class _Queue:
    """Decodes one picture at a time, in the order in which they come."""

    def __init__(self, fork_server: "_ForkServer", limits: Lane, *, last: bool) -> None:
        self.limits = limits
        self._fork_server = fork_server
        self._last = last
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._taken = 0
        self._idle: _Decoder | None = None

    async def decode(self, upload: Upload, form: str, framing: Framing) -> _Found:
        """Wait for the turn and decode; in the last lane, the upload's memory may be given to others meanwhile."""
        with contextlib.nullcontext() if self._last else upload.needed():
            return await self._queued(upload, form, framing)

    async def _queued(self, upload: Upload, form: str, framing: Framing) -> _Found:
        if self._taken >= self.limits.places:
            raise BusyError("too many pictures of this size at once; try again")
        done: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait(_Job(upload, form, framing, done))
        self._taken += 1
        try:
            return await done
        finally:
            self._taken -= 1

    async def run(self) -> None:
        """Do the jobs. Whoever waits for one may be cancelled; a job that has begun is finished regardless."""
        if not self._last:
            with contextlib.suppress(OSError, FedkaceError):  # the first picture tries again, and says what is wrong
                self._idle = await self._fork_server.decoder(self.limits)
        while True:
            waiting = await self._jobs.get()
            if waiting.done.done():
                continue
            try:
                with waiting.upload.needed():
                    found = await self._decoded(waiting)
            except Exception as error:
                self._idle = None
                logger.exception("the decoders are started anew")
                await self._fork_server.stop()
                if not waiting.done.done():
                    waiting.done.set_exception(DecoderError(f"the decoders had to be started anew ({error})"))
            else:
                if not waiting.done.done():
                    waiting.done.set_result(found)

    async def _decoded(self, waiting: _Job) -> _Found:
        decoder, self._idle = self._idle or await self._fork_server.decoder(self.limits), None
        try:
            async with asyncio.timeout(self.limits.patience):
                await decoder.send(decoding.job(waiting.framing, waiting.form), waiting.upload)
                if self._last:
                    waiting.upload.release()
                answer, content = await decoder.receive()
            found = _found(answer, content, waiting.framing)
            alive = True
        except (EOFError, OSError, TimeoutError, ValueError):  # it was killed at its limit, or worse
            found, alive = _Found(), False
        if alive and not self._last:
            self._idle = decoder
        else:
            await self._fork_server.end(decoder)
        if found.cut is not None:
            return _Found(await asyncio.to_thread(waiting.framing.finished, found.cut), exceeded=False)
        return found


def _found(answer: Any, content: Pixels, framing: Framing) -> _Found:
    """What a decoder says; raise ValueError if a sane one would not say it."""
    cut = decoding.square_in(answer, content, framing)
    if cut is None:
        reason = f"the picture cannot be used: {answer['unusable']}" if "unusable" in answer else ""
        return _Found(None, str(answer.get("malformed", reason)), "exceeded" in answer)
    return _Found(cut)


class _Decoder:
    """A decoder's process."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self._loop = asyncio.get_running_loop()

    async def send(self, what: bytes, upload: Upload) -> None:
        blocks, size = upload.blocks, upload.size  # the caller may go away, and the upload with it
        await self._loop.sock_sendall(self.connection, FRAME.pack(len(what), size) + what)
        for block in blocks:
            await self._loop.sock_sendall(self.connection, block)

    async def receive(self) -> tuple[Any, Pixels]:
        """Its answer: a JSON object, and pixels, uint8 (n,)."""
        head, size = decoding.sizes_in((await self._exactly(FRAME.size)).tobytes())
        return json.loads((await self._exactly(head)).tobytes()), await self._exactly(size)

    async def _exactly(self, size: int) -> Pixels:
        content = np.empty(size, dtype=np.uint8)
        rest = content.data
        while rest:
            count = await self._loop.sock_recv_into(self.connection, rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return content


class _ForkServer:
    """The process that decoders are forked from; started when it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def decoder(self, limits: Lane) -> _Decoder:
        """A new decoder."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                answer = await self._told(decoding.limits_message(limits), [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return _Decoder(answer["pid"], ours)

    async def end(self, decoder: _Decoder) -> None:
        """End a decoder; its memory is free when this returns."""
        decoder.connection.close()
        await self._told(decoding.end_message(decoder.pid), [])

    async def stop(self) -> None:
        """End the process; the decoders end with it."""
        async with self._turn:
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _END_SECONDS)
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _told(self, message: bytes, descriptors: list[int]) -> dict[str, Any]:
        async with self._turn:
            connection = self._connection or self._start()
            socket.send_fds(connection, [message], descriptors)
            answer = await asyncio.get_running_loop().sock_recv(connection, MESSAGE)
        if not answer:
            raise DecoderError("their parent process has ended")
        found: dict[str, Any] = json.loads(answer)
        return found

    def _start(self) -> socket.socket:
        self._process, connection = decoding.start(_MODULE)
        connection.setblocking(False)
        self._connection = connection
        return connection
