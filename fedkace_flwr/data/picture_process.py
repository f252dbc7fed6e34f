"""Pictures of others are decoded in a process of their own: what one does to its decoder happens to nothing else.

Inboxes and the prediction service use it. The process (``python -m fedkace_flwr.data.picture_process LIMITS``) starts
with the first picture and runs within limits that the system enforces: beyond its memory it gets no more, and if its
processor time for a picture is over it is killed, in whatever library it is at that moment. One that reaches its limits,
or that a picture makes crash, is replaced, and the picture is refused. It has neither models nor keys nor the sockets of
the process that uses it, which talks to it over its standard input, a socket. It ignores the signals that end that
process, and ends when the socket is closed.

It takes two messages, a JSON object and a picture, and answers with two: the reason why there is nothing, and pixels.
"""

import errno
import io
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data import pixels
from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import DataError

_MODULE = "fedkace_flwr.data.picture_process"
_REASON = 500  # most characters of one
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PIXEL_SECONDS = 200e-9
_PATIENCE = 10.0  # times its processor time, as it may wait for a processor
_END_SECONDS = 5.0


@dataclass(frozen=True)
class Limits:
    """What a picture may take.

    Attributes
    ----------
    memory : int
        All memory beyond that of the idle process, in bytes, which includes the file.
    seconds : float
        Processor time until the number of pixels is known; each pixel adds 200 ns.
    """

    memory: int = pixels.PICTURE_MEMORY + pixels.MAX_FILE + 15 * 2**20
    seconds: float = 1.0

    @property
    def most_seconds(self) -> float:
        """Processor time for the largest picture."""
        return self.seconds + pixels.max_pixels() * _PIXEL_SECONDS


class PictureProcess:
    """Decodes one picture at a time. Use it in a ``with`` block, which ends the process.

    Parameters
    ----------
    limits : Limits, optional
        What a picture may take.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._running is None:
            return
        process, connection = self._running
        self._running = None
        connection.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()

    def square(self, content: bytes, framing: Framing) -> NDArray[np.uint8]:
        """Decode a file's bytes, as :func:`fedkace_flwr.data.images.read_square` does.

        Raises
        ------
        DataError
            The picture is refused. The message is one line and does not name the file.
        OSError
            The process cannot do its work, whatever the picture.
        """
        connection = self._renewed() if self._running is None else self._running[1]
        try:
            cut = _asked(connection, content, framing, _PATIENCE * self._limits.most_seconds)
        except (EOFError, OSError, ValueError) as fault:
            self._renewed()  # raises OSError if it is not the picture that stops a decoder
            raise DataError("decoding it takes too much time or memory, or makes the decoder crash") from fault
        return framing.finished(cut)

    def _renewed(self) -> Connection:
        """Start a process in place of the present one, and see that it works."""
        if self._running is not None:
            self._running[0].kill()  # it may be busy
        self.__exit__()
        try:
            self._running = _started(self._limits)
            _asked(self._running[1], _sample(), Framing.of_files(1), _PATIENCE * self._limits.most_seconds)
        except (DataError, EOFError, OSError, ValueError) as fault:
            raise OSError(errno.EIO, f"the process that decodes pictures does not work ({fault})") from fault
        return self._running[1]


def _started(limits: Limits) -> tuple["subprocess.Popen[bytes]", Connection]:
    ours, theirs = socket.socketpair()
    # Without the keys of the state and of models; with the folder of this package, which need not be installed.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDKACE_")}
    paths = (str(Path(__file__).parents[2]), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", _MODULE, json.dumps(asdict(limits))]
    with ours, theirs:
        process = subprocess.Popen(command, env=environment, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        return process, Connection(ours.detach())


def _asked(connection: Connection, content: bytes, framing: Framing, patience: float) -> NDArray[np.uint8]:
    """What :meth:`Framing.cut` returns; raise ValueError if no sane decoder would answer so."""
    connection.send_bytes(json.dumps(asdict(framing)).encode())
    connection.send_bytes(content)
    if not connection.poll(patience):
        raise EOFError("it does not answer")
    reason = connection.recv_bytes(4 * _REASON).decode()
    cut = np.frombuffer(connection.recv_bytes(3 * pixels.max_pixels()), dtype=np.uint8)
    if reason:
        raise DataError(reason)
    side = math.isqrt(len(cut) // 3)
    if len(cut) != 3 * side * side or (framing.scaling != "torch" and side != framing.size):
        raise ValueError("no square")
    return cut.reshape(3, side, side)


@cache
def _sample() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    return file.getvalue()


def main(arguments: list[str]) -> None:
    """Decode pictures until the client closes the socket."""
    limits = Limits(**json.loads(arguments[0]))
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    with suppress(DataError):
        pixels.rgb(b"\xff\xd8\xff")  # imports Pillow's readers
    _limit(limits)
    with Connection(0) as client, suppress(EOFError, OSError):
        while True:
            framing, picture = Framing(**json.loads(client.recv_bytes())), client.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, limits.seconds)
            try:
                reason, cut = _cut(picture, framing)
            except MemoryError:
                reason, cut = "it needs more memory than it may take", None
            signal.setitimer(signal.ITIMER_PROF, 0)
            client.send_bytes(reason[:_REASON].encode())
            client.send_bytes(b"" if cut is None else cut.reshape(-1).data)


def _limit(limits: Limits) -> None:
    with suppress(OSError), Path("/proc/self/oom_score_adj").open("w") as file:
        file.write("1000")  # if the machine runs out of memory, this process goes first
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for name, most in (
        (resource.RLIMIT_AS, size + limits.memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(name, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process


def _cut(picture: bytes, framing: Framing) -> tuple[str, Any]:
    def sized(count: int) -> None:
        rest, _ = signal.getitimer(signal.ITIMER_PROF)
        signal.setitimer(signal.ITIMER_PROF, rest + count * _PIXEL_SECONDS)

    try:
        return "", np.ascontiguousarray(framing.cut(pixels.rgb(picture, sized=sized), pixels.max_pixels()))
    except DataError as fault:
        return str(fault), None


if __name__ == "__main__":
    main(sys.argv[1:])
