"""The process that decodes pictures of others: ``python -m fedkace_flwr.data.decoding LIMITS``.

It runs within limits that the system enforces. Beyond its memory it gets no more, and if its processor time for a picture
is over it is killed, in whatever library it is at that moment. It has neither models nor keys nor the sockets of the
process that uses it, which talks to it over its standard input, a socket. It ignores the signals that end that process,
and ends when the socket is closed.

It takes two messages, a JSON object and a picture, and answers with two: the reason why there is nothing, and pixels.
"""

import json
import resource
import signal
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.data import pixels
from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import DataError

REASON = 500
"""Most characters of a reason."""

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PIXEL_SECONDS = 200e-9


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
            client.send_bytes(reason[:REASON].encode())
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
