"""Pictures from inboxes, decoded in another process: what a picture does to its decoder happens to nothing else.

The process starts with the first picture. It has the limits of memory and time of :data:`LIMITS`; a decoder that reaches
them, or that a picture makes crash, is replaced, and the picture is refused.
"""

import errno
import io
import json
import socket
import subprocess
from contextlib import suppress
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data import decoding, pixels
from fedkace_flwr.data.decoding import FRAME, MESSAGE, Limits
from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import DataError

LIMITS = Limits(
    pixel_memory=pixels.PICTURE_MEMORY,
    memory=pixels.PICTURE_MEMORY + pixels.MAX_FILE + 15 * 2**20,
    seconds=1.0,
    pixel_seconds=200e-9,
    nice=0,
)
"""Of each picture, for processor time and memory."""

_MODULE = "fedkace_flwr.data.decoding"
_END_SECONDS = 5.0


class PictureProcess:
    """Decodes one picture at a time. Use it in a ``with`` block, which ends the process.

    Parameters
    ----------
    limits : Limits
        What a picture may take.
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._fork_server: socket.socket | None = None
        self._decoder: socket.socket | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in (self._decoder, self._fork_server):
            if connection is not None:
                connection.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            self._process.kill()
            self._process.wait()
        self._process = self._fork_server = self._decoder = None

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
        if self._decoder is None:
            self._renew()
        try:
            answer, cut = self._asked(content, framing)
        except (EOFError, OSError, ValueError) as fault:
            self._renew()  # raises OSError if it is not the picture that stops a decoder
            raise DataError("decoding it takes too much time or memory, or makes the decoder crash") from fault
        if cut is None:
            raise DataError(str(answer.get("unusable", "it needs more memory than it may take")))
        return framing.finished(cut)

    def _asked(self, content: bytes, framing: Framing) -> tuple[Any, NDArray[np.uint8] | None]:
        assert self._decoder is not None
        text = decoding.job(framing)
        self._decoder.sendall(FRAME.pack(len(text), len(content)) + text)
        self._decoder.sendall(content)
        told, size = decoding.sizes_in(decoding.exactly(self._decoder, FRAME.size))
        answer = json.loads(decoding.exactly(self._decoder, told))
        pixels_of = np.frombuffer(decoding.exactly(self._decoder, size), dtype=np.uint8)
        return answer, decoding.square_in(answer, pixels_of, framing)

    def _renew(self) -> None:
        """Start a decoder in place of the present one, and see that it works."""
        try:
            if self._fork_server is None:
                self._process, self._fork_server = decoding.start(_MODULE)
            if self._decoder is not None:
                self._decoder.close()
                self._tell(decoding.end_message(self._pid))
            self._decoder, theirs = socket.socketpair()
            self._decoder.settimeout(self._limits.patience)
            with theirs:
                self._pid = self._tell(decoding.limits_message(self._limits), theirs.fileno())["pid"]
            if self._asked(_sample(), Framing.of_files(1))[1] is None:
                raise ValueError("it does not decode")
        except (EOFError, OSError, ValueError) as fault:
            raise OSError(errno.EIO, f"the process that decodes pictures does not work ({fault})") from fault

    def _tell(self, message: bytes, *descriptors: int) -> dict[str, Any]:
        assert self._fork_server is not None
        socket.send_fds(self._fork_server, [message], descriptors)
        answer = self._fork_server.recv(MESSAGE)
        if not answer:
            raise EOFError("it has ended")
        found: dict[str, Any] = json.loads(answer)
        return found


@cache
def _sample() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    return file.getvalue()
