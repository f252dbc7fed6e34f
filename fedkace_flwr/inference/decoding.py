"""The processes that decode pictures for the HTTP service: ``python -m fedkace_flwr.inference.decoding DESCRIPTOR``.

A decoder runs with limits that the system enforces. One that exceeds its memory gets no more, and one that exceeds its
processor time is killed, in whatever library it is at that moment. Decoders are forked from a **fork server**: a
process that has imported what they need and does nothing else, because a fork is much faster than a new interpreter.
Fork server and decoders have neither the models nor the token nor the service's sockets. They ignore the signals that
end the service, and end when their connection to it closes.

The fork server takes messages in JSON, one at a time, and answers each: limits, with a socket for a new decoder, gives
``{"pid": ...}``; ``{"end": pid}`` ends a decoder and gives ``{"status": ...}`` once its memory is free.

A decoder takes a :data:`FRAME`, a JSON object and a body, and answers with a :data:`FRAME`, a JSON object and pixels.
"""

import json
import os
import resource
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data import pixels
from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import DataError
from fedkace_flwr.inference import forms

FRAME = struct.Struct("!II")
"""Length of a JSON object, and of the bytes after it."""

MESSAGE = 4096
"""Largest message to the fork server, and largest JSON object from a decoder, in bytes."""

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_REASON = 500  # characters


@dataclass(frozen=True)
class Lane:
    """What a decoder may take, and how many pictures may wait for it.

    Attributes
    ----------
    places : int
        Most pictures at once, with the one that is being decoded.
    file : int
        Largest file, in bytes.
    pixel_memory : int
        Memory for pixels, in bytes; pictures that need more are not decoded.
    memory : int
        All memory beyond that of an idle decoder, in bytes, which includes the file.
    seconds : float
        Processor time for one file until its number of pixels is known.
    pixel_seconds : float
        Further processor time for each pixel.
    nice : int
        How much lower its priority is than the service's.
    """

    places: int
    file: int
    pixel_memory: int
    memory: int
    seconds: float
    pixel_seconds: float
    nice: int

    def patience(self, pixels: int) -> float:
        """Processor time, in seconds, for decoding so many pixels."""
        return self.seconds + pixels * self.pixel_seconds


def main(arguments: list[str]) -> int:
    """Run the fork server until the service closes the socket."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    with suppress(DataError):
        pixels.rgb(b"\xff\xd8\xff")  # imports Pillow's readers, for all decoders
    with socket.socket(fileno=int(arguments[0])) as service, suppress(ConnectionError):
        _fork_for(service)
    return 0


def _fork_for(service: socket.socket) -> None:
    """Do what the service asks for, until it closes the socket."""
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(service, MESSAGE, 1)
        if not message:
            return
        asked = json.loads(message)
        answer = _ended(asked["end"], children) if "end" in asked else _forked(asked, descriptors, service, children)
        service.send(json.dumps(answer).encode())


def _ended(pid: int, children: set[int]) -> dict[str, Any]:
    if pid not in children:  # of an earlier fork server
        return {"status": None}
    children.remove(pid)
    os.kill(pid, signal.SIGKILL)
    return {"status": os.waitpid(pid, 0)[1]}


def _forked(
    limits: Mapping[str, Any], descriptors: list[int], service: socket.socket, children: set[int]
) -> dict[str, Any]:
    (descriptor,) = descriptors
    child = os.fork()
    if not child:
        try:
            service.close()
            _decode_all(socket.socket(fileno=descriptor), Lane(**limits))
        finally:
            os._exit(0)
    os.close(descriptor)
    children.add(child)
    return {"pid": child}


def _decode_all(service: socket.socket, limits: Lane) -> None:
    """Decode pictures until the service closes the socket."""
    _limit(limits)
    while True:
        try:
            asked, body = _received(service)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        try:
            answer, cut = _answer(asked, body, limits)
        except MemoryError:
            answer, cut = {"exceeded": "memory"}, None
        signal.setitimer(signal.ITIMER_PROF, 0)
        del body
        content = memoryview(b"") if cut is None else cut.reshape(-1).data
        text = json.dumps(answer).encode()
        service.sendall(FRAME.pack(len(text), len(content)) + text)
        service.sendall(content)


def _limit(limits: Lane) -> None:
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


def _received(service: socket.socket) -> tuple[dict[str, Any], bytearray]:
    head, body = FRAME.unpack(_exactly(service, FRAME.size))
    return json.loads(_exactly(service, head)), _exactly(service, body)


def _exactly(service: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        count = service.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return content


def _answer(asked: Mapping[str, Any], body: bytearray, limits: Lane) -> tuple[dict[str, Any], NDArray[np.uint8] | None]:
    try:
        picture = bytes(body)
        body.clear()
        if asked["form"]:
            picture = forms.file_in(picture, asked["form"])
        try:
            return {}, _cut(picture, Framing(**asked["framing"]), limits)
        except pixels.TooLargeError as fault:
            return {"exceeded": "pixels", "refused": f"the picture cannot be used: {fault}"[:_REASON]}, None
        except DataError as fault:
            return {"refused": f"the picture cannot be used: {fault}"[:_REASON]}, None
    except DataError as fault:
        return {"refused": str(fault)[:_REASON]}, None


def _cut(picture: bytes, framing: Framing, limits: Lane) -> NDArray[np.uint8]:
    def sized(count: int) -> None:
        rest, _ = signal.getitimer(signal.ITIMER_PROF)
        signal.setitimer(signal.ITIMER_PROF, rest + count * limits.pixel_seconds)

    most = pixels.max_pixels(memory=limits.pixel_memory)
    return np.ascontiguousarray(framing.cut(pixels.rgb(picture, limits.pixel_memory, sized), most))


def job(framing: Framing, form: str) -> bytes:
    """Return the JSON object of a job.

    Parameters
    ----------
    framing : Framing
        How the picture becomes a square.
    form : str
        Content type of the body if it is a form, else empty.
    """
    return json.dumps({"framing": asdict(framing), "form": form}).encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
