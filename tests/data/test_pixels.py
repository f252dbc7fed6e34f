"""Pictures that others have made: what is decoded at all, and how much it may take."""

import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from support.made import bombs
from support.made.models import picture

from fedkace_flwr.data import pixels
from fedkace_flwr.data.images import Framing, read_square
from fedkace_flwr.errors import DataError


def saved(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20)).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["BMP", "GIF", "JPEG2000", "TIFF"])
def test_formats_that_no_client_needs_are_refused(kind: str) -> None:
    with pytest.raises(DataError, match=r"its format is not supported \(JPEG, PNG, WEBP are\)$"):
        pixels.rgb(saved(kind))


@pytest.mark.parametrize("kind", pixels.FORMATS)
def test_the_number_of_pixels_follows_from_the_memory(kind: str) -> None:
    memory = 30 * 20 * pixels.FORMATS[kind]
    assert pixels.rgb(picture(kind, (30, 20)), memory).size == (30, 20)
    with pytest.raises(DataError, match="30 x 20 pixels; at most 599 are allowed"):
        pixels.rgb(picture(kind, (30, 20)), memory - 1)


def webp(chunk: bytes, body: bytes) -> bytes:
    content = chunk + len(body).to_bytes(4, "little") + body
    return b"RIFF" + (len(content) + 4).to_bytes(4, "little") + b"WEBP" + content


HUGE = {
    "lossless": webp(b"VP8L", b"\x2f" + ((7070 << 14) + 7070).to_bytes(4, "little") + bytes(40)),
    "lossy": webp(b"VP8 ", b"\x10\0\0\x9d\x01\x2a" + (7071).to_bytes(2, "little") * 2 + bytes(40)),
    "extended": webp(b"VP8X", bytes(4) + (7070).to_bytes(3, "little") * 2 + bytes(40)),
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_huge_webp_file_is_refused_before_its_canvas_is_allocated(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("Pillow would allocate the canvas")

    monkeypatch.setattr(Image, "open", opened)
    with pytest.raises(DataError, match="7071 x 7071 pixels; at most 6,990,506 are allowed for WEBP"):
        pixels.rgb(HUGE[kind])


def test_the_size_of_every_kind_of_webp_file_is_known() -> None:
    for options in ({}, {"lossless": True}, {"exif": b"Exif\0\0more"}):
        file = io.BytesIO()
        Image.new("RGB", (33, 21)).save(file, "WEBP", **options)
        with pytest.raises(DataError, match="33 x 21 pixels; at most 555 are"):
            pixels.rgb(file.getvalue(), 555 * pixels.FORMATS["WEBP"])
    with pytest.raises(DataError, match="it begins like a WebP file and has no size"):
        pixels.rgb(webp(b"VP8Z", bytes(40)))


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    """Each of its scans, of 25 bytes, visits all pixels."""
    assert pixels.rgb(bombs.scans(1024, 1024, 90)).size == (1024, 1024)
    with pytest.raises(DataError, match="a JPEG of more than 100 scans"):
        pixels.rgb(bombs.scans(4096, 3072, 100_000))


def test_a_jpeg_of_many_segments_is_refused() -> None:
    whole = picture("JPEG")
    with pytest.raises(DataError, match="a JPEG of more than 1000 segments"):
        pixels.rgb(whole[:2] + b"\xff\xfe\0\2" * 100_000 + whole[2:])
    assert pixels.rgb(whole[:2] + b"\xff\xfe\0\2" * 100 + whole[2:]).size == (30, 20)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0, "progressive": True}])
def test_the_usual_jpegs_have_few_scans(options: dict[str, object]) -> None:
    assert pixels.rgb(bombs.photo(200, 100, "JPEG", **options)).size == (200, 100)


def test_a_jpeg_with_other_data_at_its_end_is_read() -> None:
    """Telephones append films; what looks like a scan in them is none."""
    assert pixels.rgb(picture("JPEG") + b"\xff\xda\0\2" * 1000).size == (30, 20)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="it has 1099511627776 bytes; at most 67108864 are read"):
        pixels.rgb(path)


def test_memory_that_the_system_refuses_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    content = picture()
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    with pytest.raises(MemoryError):
        pixels.rgb(content)
    with pytest.raises(DataError, match="it needs more memory than there is"):
        read_square(content, Framing.of_files(8))


def test_decoding_without_a_copy_changes_no_pixel() -> None:
    for kind, mode in (("JPEG", "RGB"), ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("JPEG", "CMYK")):
        content = picture(kind, (61, 47), mode)
        with Image.open(io.BytesIO(content)) as opened:
            assert np.array_equal(np.asarray(pixels.rgb(content)), np.asarray(opened.convert("RGB")))


def test_text_in_a_png_is_limited_too() -> None:
    whole, text = picture("PNG"), zlib.compress(bytes(2**25))
    chunk = b"zTXt" + b"a\0\0" + text
    bomb = whole[:33] + len(chunk[4:]).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") + whole[33:]
    with pytest.raises(DataError, match="it is damaged"):
        pixels.rgb(bomb)


GREYS = np.linspace(0, 65535, 20 * 30).round().astype(np.uint16).reshape(20, 30)


def sixteen_bits(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(GREYS).save(file, kind)
    return file.getvalue()


def grey(picture: Image.Image) -> np.ndarray:
    red, green, blue = np.asarray(picture).transpose(2, 0, 1)
    assert (red == green).all() and (red == blue).all()
    return red


def test_greys_of_16_bits_become_greys_of_8_bits_and_not_white() -> None:
    assert np.array_equal(grey(pixels.rgb(sixteen_bits("PNG"))), GREYS >> 8)


def test_colours_and_greys_of_16_bits_are_scaled_alike() -> None:
    """Pillow takes the high byte of a colour's 16 bits."""
    rows = b"".join(b"\0" + np.repeat(row, 3).astype(">u2").tobytes() for row in GREYS)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 30, 20, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    coloured = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )
    assert np.array_equal(np.asarray(pixels.rgb(coloured)), np.asarray(pixels.rgb(sixteen_bits("PNG"))))


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B"])
def test_every_layout_of_16_bits_is_scaled(mode: str) -> None:
    order = ">u2" if mode == "I;16B" else "<u2"
    assert np.array_equal(
        grey(pixels.as_viewed(Image.frombytes(mode, (30, 20), GREYS.astype(order).tobytes()))), GREYS >> 8
    )


def test_a_png_of_16_bits_that_earlier_versions_of_pillow_widen_to_32_is_scaled() -> None:
    """As Pillow did before 10.3: mode I, with values of 16 bits."""
    widened = Image.fromarray(GREYS.astype(np.int32))
    widened.format = "PNG"
    assert np.array_equal(grey(pixels.as_viewed(widened)), GREYS >> 8)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_unknown_range_are_refused_and_not_clipped(mode: str) -> None:
    with pytest.raises(DataError, match=rf"^its pixels have Pillow's mode {mode}, whose range is not known; must have"):
        pixels.as_viewed(Image.new(mode, (3, 3)))


def exif(orientation: int, order: str = "<", kind: int = 3, number: int = 1) -> bytes:
    """Metadata of two entries, a description that says nothing and the orientation."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    entries = struct.pack(order + "HHI4s", 270, 2, 4, b"abc\0") + struct.pack(
        order + "HHIHH", 274, kind, number, orientation, 0
    )
    return b"Exif\0\0" + mark + struct.pack(order + "IH", 8, 2) + entries + bytes(4)


def turned(kind: str, metadata: bytes) -> bytes:
    file = io.BytesIO()
    with Image.open(io.BytesIO(picture(kind))) as opened:
        opened.save(file, kind, exif=metadata, **({"lossless": True} if kind == "WEBP" else {}))
    return file.getvalue()


@pytest.mark.parametrize(("kind", "orientation"), [*(("JPEG", each) for each in range(1, 9)), ("PNG", 6), ("WEBP", 5)])
def test_a_picture_is_turned_as_its_camera_was_held(kind: str, orientation: int) -> None:
    for order in "<>":
        content = turned(kind, exif(orientation, order))
        with Image.open(io.BytesIO(content)) as opened:
            expected = np.asarray(ImageOps.exif_transpose(opened))
            lying = np.asarray(opened)
        found = np.asarray(pixels.rgb(content))
        assert np.array_equal(found, expected)
        assert np.array_equal(found, lying) == (orientation == 1)
        assert found.shape == ((30, 20, 3) if orientation > 4 else (20, 30, 3))


def test_an_orientation_after_a_pngs_pixels_counts() -> None:
    content = turned("PNG", exif(6))
    start = content.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(content[start : start + 4], "big")
    moved = content[:start] + content[end:-12] + content[start:end] + content[-12:]
    assert pixels.rgb(moved).size == (20, 30)
    assert np.array_equal(np.asarray(pixels.rgb(moved)), np.asarray(pixels.rgb(content)))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0nonsense",
        exif(0),
        exif(9),
        exif(65535),
        exif(6, kind=2),
        exif(6, number=2**32 - 1),
        exif(6)[:20],
        exif(6)[:36],
        b"Exif\0\0II*\0" + b"\xff" * 4,
        b"Exif\0\0II*\0" + struct.pack("<I", 2**31),
        b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 65535) + bytes(1000),
    ],
)
def test_metadata_that_says_nothing_of_use_leaves_a_picture_as_it_is(metadata: bytes) -> None:
    plain, content = turned("JPEG", b""), turned("JPEG", metadata)
    assert np.array_equal(np.asarray(pixels.rgb(content)), np.asarray(pixels.rgb(plain)))


@given(metadata=st.binary(max_size=200) | st.binary(max_size=100).map(lambda end: exif(6)[:14] + end))
def test_no_metadata_makes_a_picture_unreadable(metadata: bytes) -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "PNG", exif=metadata)
    assert sorted(pixels.rgb(file.getvalue()).size) == [2, 3]


def test_metadata_whose_entries_all_stand_for_the_whole_file_takes_no_memory() -> None:
    """Whoever reads every entry copies the same bytes again for each."""
    entries = struct.pack("<HHII", 40000, 7, 2**20, 0) * 60_000
    content = turned("PNG", b"Exif\0\0II*\0" + struct.pack("<IH", 8, 60_000) + entries + bytes(2**20))
    tracemalloc.start()
    try:
        assert pixels.rgb(content).size == (30, 20)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_a_picture_that_was_turned_already_stays_so() -> None:
    with Image.open(io.BytesIO(turned("JPEG", exif(6)))) as opened:
        upright = ImageOps.exif_transpose(opened)
        assert pixels.as_viewed(upright).size == pixels.as_viewed(opened).size == (20, 30)
