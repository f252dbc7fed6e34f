"""The processes that decode pictures of others: ``python -m fedkace_flwr.data.decoding DESCRIPTOR``.

A decoder runs with limits that the system enforces. One that exceeds its memory gets no more, and one that exceeds its
processor time is killed, in whatever library it is at that moment. Decoders are forked from a **fork server**: a
process that has imported what they need and does nothing else, because a fork is much faster than a new interpreter.
Fork server and decoders have neither models nor keys nor the sockets of the process that uses them, the client. They
ignore the signals that end the client, and end when their connection to it closes.

The fork server takes messages in JSON, one at a time, and answers each: limits, with a socket for a new decoder, gives
``{"pid": ...}``; ``{"end": pid}`` ends a decoder and gives ``{"status": ...}`` once its memory is free.

A decoder takes a :data:`FRAME`, a JSON object and a body, and answers with a :data:`FRAME`, a JSON object and pixels.
If there are no pixels, the object has the reason: ``unusable``, that of a picture, or ``malformed``, that of the body
around it; ``exceeded`` if a decoder with other limits might succeed.
"""

import json
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data import pixels
from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import DataError

FRAME = struct.Struct("!II")
"""Length of a JSON object, and of the bytes after it."""

MESSAGE = 4096
"""Largest message to the fork server, and largest JSON object from a decoder, in bytes."""

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_REASON = 500  # characters


Unpack = Callable[[bytes, str], bytes]
"""Return the file in a body of a content type."""


@dataclass(frozen=True)
class Limits:
    """What a decoder may take.

    Attributes
    ----------
    pixel_memory : int
        Memory for pixels, in bytes; pictures that need more are not decoded.
    memory : int
        All memory beyond that of an idle decoder, in bytes, which includes the file.
    seconds : float
        Processor time for one file until its number of pixels is known.
    pixel_seconds : float
        Further processor time for each pixel.
    nice : int
        How much lower its priority is than that of the process that uses it.
    """

    pixel_memory: int
    memory: int
    seconds: float
    pixel_seconds: float
    nice: int

    @property
    def patience(self) -> float:
        """Seconds after which a decoder is given up: ten times its processor time, as it may wait for a processor."""
        return 10.0 * (self.seconds + pixels.max_pixels(memory=self.pixel_memory) * self.pixel_seconds)


def limits_message(limits: Limits) -> bytes:
    """Return the message to the fork server that asks for a decoder."""
    return json.dumps({each.name: getattr(limits, each.name) for each in fields(Limits)}).encode()


def end_message(pid: int) -> bytes:
    """Return the message to the fork server that ends a decoder."""
    return json.dumps({"end": pid}).encode()


def job(framing: Framing, kind: str = "") -> bytes:
    """Return the JSON object of a job.

    Parameters
    ----------
    framing : Framing
        How the picture becomes a square.
    kind : str
        Content type of the body if the picture is to be unpacked from it, else empty.
    """
    return json.dumps({"framing": asdict(framing), "kind": kind}).encode()


def start(module: str) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start a fork server.

    Parameters
    ----------
    module : str
        Whose :func:`main` it runs.

    Returns
    -------
    process, connection
        The process ends when the connection is closed.

    Raises
    ------
    OSError
        The system refuses.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Without the keys of the state and of models; with the folder of this package, which need not be installed.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDKACE_")}
    paths = (str(Path(__file__).parents[2]), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


def square_in(answer: Any, content: NDArray[np.uint8], framing: Framing) -> NDArray[np.uint8] | None:
    """Check a decoder's answer.

    Parameters
    ----------
    answer : Any
        Its JSON object.
    content : ndarray
        The bytes after it, uint8 (n,).
    framing : Framing
        As in the job.

    Returns
    -------
    ndarray or None
        What :meth:`Framing.cut` returned; None if the object says why there is nothing.

    Raises
    ------
    ValueError
        A sane decoder would not say this.
    """
    if not isinstance(answer, dict):
        raise ValueError("no object")
    if answer:
        return None
    side = math.isqrt(len(content) // 3)
    if len(content) != 3 * side * side or (framing.scaling != "torch" and side != framing.size):
        raise ValueError("no square")
    return content.reshape(3, side, side)


def sizes_in(head: bytes | bytearray) -> tuple[int, int]:
    """The lengths in a decoder's :data:`FRAME`.

    Raises
    ------
    ValueError
        They are larger than those of any answer.
    """
    told, size = FRAME.unpack(head)
    if told > MESSAGE or size > 3 * pixels.max_pixels():
        raise ValueError("too much")
    return told, size


def main(arguments: list[str], unpack: Unpack | None = None) -> int:
    """Run the fork server until the client closes the socket.

    Parameters
    ----------
    arguments : list of str
        The socket's descriptor.
    unpack : callable, optional
        Takes pictures out of other bodies; raises DataError if it cannot.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    with suppress(DataError):
        pixels.rgb(b"\xff\xd8\xff")  # imports Pillow's readers, for all decoders
    with socket.socket(fileno=int(arguments[0])) as client, suppress(ConnectionError):
        _fork_for(client, unpack)
    return 0


def _fork_for(client: socket.socket, unpack: Unpack | None) -> None:
    """Do what the client asks for, until it closes the socket."""
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(client, MESSAGE, 1)
        if not message:
            return
        asked = json.loads(message)
        answer = (
            _ended(asked["end"], children) if "end" in asked else _forked(asked, descriptors, client, children, unpack)
        )
        client.send(json.dumps(answer).encode())


def _ended(pid: int, children: set[int]) -> dict[str, Any]:
    if pid not in children:  # of an earlier fork server
        return {"status": None}
    children.remove(pid)
    os.kill(pid, signal.SIGKILL)
    return {"status": os.waitpid(pid, 0)[1]}


def _forked(
    limits: Mapping[str, Any],
    descriptors: list[int],
    client: socket.socket,
    children: set[int],
    unpack: Unpack | None,
) -> dict[str, Any]:
    (descriptor,) = descriptors
    child = os.fork()
    if not child:
        try:
            client.close()
            _decode_all(socket.socket(fileno=descriptor), Limits(**limits), unpack)
        finally:
            os._exit(0)
    os.close(descriptor)
    children.add(child)
    return {"pid": child}


def _decode_all(client: socket.socket, limits: Limits, unpack: Unpack | None) -> None:
    """Decode pictures until the client closes the socket."""
    _limit(limits)
    while True:
        try:
            asked, body = _received(client)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        try:
            answer, cut = _answer(asked, body, limits, unpack)
        except MemoryError:
            answer, cut = {"exceeded": "memory"}, None
        signal.setitimer(signal.ITIMER_PROF, 0)
        del body
        content = memoryview(b"") if cut is None else cut.reshape(-1).data
        text = json.dumps(answer).encode()
        client.sendall(FRAME.pack(len(text), len(content)) + text)
        client.sendall(content)


def _limit(limits: Limits) -> None:
    os.nice(limits.nice)
    with suppress(OSError), Path("/proc/self/oom_score_adj").open("w") as file:
        file.write("1000")  # if the machine runs out of memory, a decoder goes first
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for name, most in (
        (resource.RLIMIT_AS, size + limits.memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(name, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process


def _received(client: socket.socket) -> tuple[dict[str, Any], bytearray]:
    head, body = FRAME.unpack(exactly(client, FRAME.size))
    return json.loads(exactly(client, head)), exactly(client, body)


def exactly(connection: socket.socket, size: int) -> bytearray:
    """Receive so many bytes; raise EOFError if the connection is closed before."""
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise EOFError("the connection was closed")
        rest = rest[count:]
    return content


def _answer(
    asked: Mapping[str, Any], body: bytearray, limits: Limits, unpack: Unpack | None
) -> tuple[dict[str, Any], NDArray[np.uint8] | None]:
    try:
        picture = bytes(body)
        body.clear()
        if asked["kind"]:
            assert unpack is not None
            picture = unpack(picture, asked["kind"])
        try:
            return {}, _cut(picture, Framing(**asked["framing"]), limits)
        except pixels.TooLargeError as fault:
            return {"exceeded": "pixels", "unusable": str(fault)[:_REASON]}, None
        except DataError as fault:
            return {"unusable": str(fault)[:_REASON]}, None
    except DataError as fault:
        return {"malformed": str(fault)[:_REASON]}, None


def _cut(picture: bytes, framing: Framing, limits: Limits) -> NDArray[np.uint8]:
    def sized(count: int) -> None:
        rest, _ = signal.getitimer(signal.ITIMER_PROF)
        signal.setitimer(signal.ITIMER_PROF, rest + count * limits.pixel_seconds)

    most = pixels.max_pixels(memory=limits.pixel_memory)
    return np.ascontiguousarray(framing.cut(pixels.rgb(picture, limits.pixel_memory, sized), most))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
