"""Pictures decoded in another process: what a picture does to its decoder happens to nothing else.

Inboxes and the prediction service use it. The process starts with the first picture. One that reaches its limits
(:class:`fedkace_flwr.data.decoding.Limits`), or that a picture makes crash, is replaced, and the picture is refused.
"""

import errno
import io
import json
import math
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data import pixels
from fedkace_flwr.data.decoding import REASON, Limits
from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import DataError

_MODULE = "fedkace_flwr.data.decoding"
_PATIENCE = 10.0  # times its processor time, as it may wait for a processor
_END_SECONDS = 5.0


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
        """Decode a picture, as :func:`fedkace_flwr.data.images.read_square` does.

        Parameters
        ----------
        content : bytes
            The file's bytes, at most :data:`fedkace_flwr.data.pixels.MAX_FILE`.
        framing : Framing
            How the picture becomes a square.

        Returns
        -------
        ndarray
            uint8 (3, S, S).

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
    reason = connection.recv_bytes(4 * REASON).decode()
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
