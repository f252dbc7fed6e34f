"""Opening pictures that others have made: which formats, how many pixels, how much memory, and what the pixels mean.

Only formats that cameras, phones and browsers write are accepted. Size and structure are read from the file's first
bytes before a decoder sees them, because some decoders allocate the whole picture as soon as they open a file.
"""

import io
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedkace_flwr.errors import DataError
from fedkace_flwr.storage.files import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE_MEMORY = 120 * 2**20
"""Most memory that decoding one picture may take, in bytes, without the file itself."""

FORMATS: Mapping[str, int] = {"JPEG": 10, "PNG": 10, "WEBP": 18}
"""The accepted formats, by Pillow's names, with the bytes that decoding takes for each pixel.

A picture in RGB takes 4 bytes a pixel. A progressive JPEG also holds its coefficients, a PNG with transparency its four
channels, and a WebP two frames and its planes.
"""

SUFFIXES = (".jpeg", ".jpg", ".jfif", ".jpe", ".png", ".webp")
"""What names of files in these formats end in."""

MAX_FILE = 2**26
"""Largest file of a picture, in bytes."""

READING = 2
"""A part of the fingerprints of data sets of image files: increase it whenever the same picture would be other pixels."""

_SCANS = 100  # of a JPEG; the usual progressive ones have ten, and each takes time for all pixels
_SEGMENTS = 1000  # of a JPEG
_NEXT_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])", re.DOTALL)
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_WITHOUT_LENGTH = (0x01, 0xD8)
_WIDENED = ("PNG", "PPM")  # of these formats, Pillow's mode I holds 16 bits; of PNG, only before Pillow 10.3
_UNKNOWN_RANGE = ("I", "F")
_BITS_PER_SAMPLE = 258  # a tag of TIFF
_ORIENTATION, _SHORT = 274, 3  # a tag of EXIF, and its type
_TURNS = (  # by orientation, from 2; 1 is upright
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_270",
    "TRANSVERSE",
    "ROTATE_90",
)


def max_pixels(kind: str = "JPEG", memory: int = PICTURE_MEMORY) -> int:
    """How many pixels a picture of a format may have if decoding it may take ``memory`` bytes."""
    return memory // FORMATS[kind]


def rgb(
    source: Path | bytes, memory: int = PICTURE_MEMORY, sized: Callable[[int], None] = lambda pixels: None
) -> "Image":
    """Decode a picture from an untrusted source.

    Parameters
    ----------
    source : Path or bytes
        A file, or a file's bytes.
    memory : int
        Memory for decoding, in bytes; a picture whose pixels need more is not decoded.
    sized : callable
        Called with the number of pixels before they are decoded.

    Returns
    -------
    Image
        As :func:`as_viewed` has it.

    Raises
    ------
    DataError
        The source cannot be read, is not a picture of an accepted format, is damaged, or has too many pixels. The message is one line and
        does not name the file.
    MemoryError
        The system refuses the memory.
    """
    content = source if isinstance(source, bytes) else _read(source)
    kind = _kind(content)
    if kind == "WEBP":
        _check_size(kind, _webp_size(content), memory)
    elif kind == "JPEG":
        _check_scans(content)
    return _turned(*_decoded(content, kind, memory, sized))  # of another mode, the original is out of memory here


def as_viewed(picture: "Image") -> "Image":
    """Return a picture as viewers show it: upright, in RGB with 8 bits for each channel, without transparency.

    EXIF's orientation decides what is upright; a picture without one, or with a damaged one, stays as it is. Of 16-bit
    greys the high byte counts, as Pillow takes that of 16-bit colours.

    Parameters
    ----------
    picture : Image
        Of any of Pillow's modes.

    Raises
    ------
    DataError
        The range of the values is not known: whole numbers of 32 bits, or floating-point numbers. The message is one
        line and does not name the file.
    """
    picture.load()  # a PNG's metadata may follow its pixels, and Pillow itself turns a TIFF
    return _turned(_in_rgb(picture), _turn(picture))


def _in_rgb(picture: "Image") -> "Image":
    if picture.mode.startswith("I;") or (picture.mode == "I" and picture.format in _WIDENED):
        picture = _in_8_bits(picture)
    if picture.mode in _UNKNOWN_RANGE:
        raise DataError(
            f"its pixels have Pillow's mode {picture.mode}, whose range is not known; must have 8 or 16 bits for each "
            "channel"
        )
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _in_8_bits(greys: "Image") -> "Image":
    bits = getattr(greys, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0]  # TIFF has greys of 12 bits, too
    table = [min(value >> bits - 8, 255) for value in range(2**16)]
    return greys.convert("I").point(table, "L")


def _turn(picture: "Image") -> str | None:
    """Name of the transposition that makes a picture upright; None if it is.

    Pillow's own reader of EXIF copies what every entry stands for. This one looks at nothing but the orientation.
    """
    exif = picture.info.get("exif")
    if not isinstance(exif, bytes):
        return None
    start = 6 if exif.startswith(b"Exif\0\0") else 0
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[start : start + 4])
    if order is None:
        return None
    try:
        place = start + struct.unpack_from(f"{order}I", exif, start + 4)[0]
        (entries,) = struct.unpack_from(f"{order}H", exif, place)
        for number in range(entries):
            tag, kind, count, value = struct.unpack_from(f"{order}HHIH", exif, place + 2 + 12 * number)
            if tag == _ORIENTATION:
                known = kind == _SHORT and count == 1 and 2 <= value < 2 + len(_TURNS)
                return _TURNS[value - 2] if known else None
    except struct.error:  # it ends early
        pass
    return None


def _turned(picture: "Image", turn: str | None) -> "Image":
    if turn is None:
        return picture
    from PIL.Image import Transpose

    return picture.transpose(Transpose[turn])


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_FILE)
    except OSError as fault:
        raise DataError(str(fault.strerror or fault)) from fault


def _kind(content: bytes) -> str:
    if content.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return "WEBP"
    raise DataError(f"it is not an image, or its format is not supported ({', '.join(FORMATS)} are)")


def _check_size(kind: str, size: tuple[int, int], memory: int) -> None:
    most = max_pixels(kind, memory)
    if size[0] * size[1] > most:
        raise DataError(f"it has {size[0]} x {size[1]} pixels; at most {most:,} are allowed for {kind}")


def _webp_size(content: bytes) -> tuple[int, int]:
    """Width and height of the canvas, by the first chunk of a WebP file."""
    chunk, start = content[12:16], content[20:30]
    if len(start) == 10:
        if chunk == b"VP8X":
            return int.from_bytes(start[4:7], "little") + 1, int.from_bytes(start[7:10], "little") + 1
        if chunk == b"VP8L" and start[0] == 0x2F:
            bits = int.from_bytes(start[1:5], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        if chunk == b"VP8 " and start[3:6] == b"\x9d\x01\x2a":
            return int.from_bytes(start[6:8], "little") & 0x3FFF, int.from_bytes(start[8:10], "little") & 0x3FFF
    raise DataError("it is damaged (it begins like a WebP file and has no size)")


def _check_scans(content: bytes) -> None:
    """Refuse a JPEG that would be decoded many times over: each scan of a progressive one visits every pixel."""
    place, scans = 2, 0
    for _ in range(_SEGMENTS):
        marker = _NEXT_MARKER.search(content, place)
        if marker is None or marker[1][0] == _END_OF_IMAGE:
            return
        place = marker.end()
        if marker[1][0] in _WITHOUT_LENGTH:
            continue
        scans += marker[1][0] == _START_OF_SCAN
        if scans > _SCANS:
            raise DataError(f"it is a JPEG of more than {_SCANS} scans")
        place += int.from_bytes(content[place : place + 2], "big")
    raise DataError(f"it is a JPEG of more than {_SEGMENTS} segments")


def _decoded(content: bytes, kind: str, memory: int, sized: Callable[[int], None]) -> tuple["Image", str | None]:
    """The pixels in RGB, and how they are to be turned."""
    # Pillow would import the readers of all formats for one that it does not know yet.
    from PIL import Image, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError, WebPImagePlugin  # noqa: F401

    try:
        with Image.open(io.BytesIO(content), formats=[kind]) as found:
            _check_size(kind, found.size, memory)
            sized(found.width * found.height)
            found.load()
            return _in_rgb(found), _turn(found)
    except (DataError, MemoryError):
        raise
    except Image.DecompressionBombError as fault:
        raise DataError(f"it has too many pixels; at most {max_pixels(kind, memory):,} are allowed") from fault
    except UnidentifiedImageError as fault:
        raise DataError(f"it is damaged (it begins like {kind} and cannot be opened)") from fault
    except Exception as fault:  # on damaged files, decoders raise anything from SyntaxError to struct.error
        reason = " ".join(str(fault).split()) or type(fault).__name__
        raise DataError(f"it is damaged ({reason})") from fault
