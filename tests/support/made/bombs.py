"""Bodies that are small to send and were made to cost much: pictures, and what only looks like them."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

_BLOCK = 8  # pixels, in each direction, of a JPEG's blocks
_SHORTEST_RUN, _LONGEST_RUN = 2**14, 2**15 - 1  # blocks that one code of these scans leaves as they are


def photo(width: int, height: int, kind: str = "JPEG", **options: Any) -> bytes:
    """Return a picture of smooth surfaces and noise, as large a file as a photograph's."""
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    grey = 128 + 70 * np.sin(columns / 97 + rows / 51) + 30 * np.cos(columns / 13)
    noise = np.random.default_rng(0).normal(0, 6, (height, width, 3)).astype(np.float32)
    pixels = (grey[..., None] + noise).clip(0, 255).astype(np.uint8)
    return _saved(Image.fromarray(pixels), kind, **options)


def blank(width: int, height: int, kind: str, **options: Any) -> bytes:
    """Return a picture of one colour: few bytes, whatever its size."""
    return _saved(Image.new("RGB", (width, height)), kind, **options)


def scans(width: int, height: int, count: int) -> bytes:
    """Return a JPEG of at least a million pixels in many scans, each of some 25 bytes and a visit to all pixels."""
    blocks = -(-width // _BLOCK) * -(-height // _BLOCK)
    size = struct.pack(">BHHBBBB", 8, height, width, 1, 1, 0x11, 0)
    quantisation = b"\0" + bytes([1]) * 64
    plain = b"\0" + bytes([1] + [0] * 15) + b"\0"  # one code, 0: the difference is 0
    runs = b"\x10" + bytes([1] + [0] * 15) + b"\xe0"  # one code, 0: a run of 2**14 blocks, and of 14 bits more
    head = [
        b"\xff\xd8",
        *(_segment(name, each) for name, each in ((0xDB, quantisation), (0xC2, size), (0xC4, plain), (0xC4, runs))),
        _segment(0xDA, b"\x01\x01\x00\x00\x00\x00"),
        bytes(-(-blocks // 8)),
    ]
    runs_needed = -(-blocks // _LONGEST_RUN)
    lengths = [(blocks + each) // runs_needed for each in range(runs_needed)]
    codes = "".join("0" + format(length - _SHORTEST_RUN, "014b") for length in lengths)
    codes += "1" * (-len(codes) % 8)
    stuffed = int(codes, 2).to_bytes(len(codes) // 8, "big").replace(b"\xff", b"\xff\x00")
    return b"".join([*head, (_segment(0xDA, b"\x01\x01\x00\x01\x3f\x00") + stuffed) * count, b"\xff\xd9"])


def chunks(size: int) -> bytes:
    """Return a PNG file of ``size`` bytes that consists of empty chunks."""
    whole = _saved(Image.new("L", (16, 16)), "PNG")
    head, rest = whole[:33], whole[33:]  # the mark and the first chunk; the others
    empty = struct.pack(">I4sI", 0, b"abCd", zlib.crc32(b"abCd"))
    return head + empty * ((size - len(whole)) // len(empty)) + rest


def _saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def _segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content
