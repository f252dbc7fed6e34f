"""Files that something else has written: what is accepted, what is refused and why, and that nothing else happens."""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from support.made.models import blank

from fedkace_flwr.data import inbox_files as arrivals
from fedkace_flwr.data.images import read_square
from fedkace_flwr.data.inbox_files import Arrival
from fedkace_flwr.errors import DataError
from fedkace_flwr.samples import Form
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.storage.folders import OpenFolder

CLASSES = ("cat", "dog", "sea lion")
SIZE = 8
FORM = Form.picture(SIZE)


def images(count: int = 2, shape: tuple[int, ...] = (SIZE, SIZE, 3)) -> NDArray[np.uint8]:
    return np.arange(count * int(np.prod(shape)), dtype=np.int64).astype(np.uint8).reshape(count, *shape)


def archive(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def read(path: Path, class_name: str | None = None, form: Form = FORM) -> arrivals.Arrived:
    with OpenFolder.at(path.parent) as folder:
        return arrivals.read(Arrival(folder, path.name, class_name), CLASSES, form, read_square)


def count(path: Path, class_name: str | None = None) -> int:
    with OpenFolder.at(path.parent) as folder:
        return arrivals.count(Arrival(folder, path.name, class_name))[0]


def test_three_layouts_of_images_mean_the_same(tmp_path: Path) -> None:
    grey = images(2, (SIZE, SIZE))
    last = np.repeat(grey[..., None], 3, axis=-1)
    for name, content in {"grey": grey, "last": last, "first": last.transpose(0, 3, 1, 2)}.items():
        found, labels = read(archive(tmp_path / f"{name}.npz", images=content, labels=np.array([2, 0])))
        assert found.dtype == np.uint8 and found.shape == (2, 3, SIZE, SIZE)
        assert labels.dtype == np.int64 and labels.tolist() == [2, 0]
        assert np.array_equal(found[:, 1], grey)


def test_channels_stay_where_they_are(tmp_path: Path) -> None:
    colour = images(1)
    found, _ = read(archive(tmp_path / "a.npz", images=colour, labels=np.array([0])))
    assert np.array_equal(found[0, 2], colour[0, :, :, 2])


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint64, "U"])
def test_labels_are_numbers_or_names(kind: Any, tmp_path: Path) -> None:
    labels = np.array(["dog", "sea lion"]) if kind == "U" else np.array([1, 2], dtype=kind)
    assert read(archive(tmp_path / "a.npz", images=images(), labels=labels))[1].tolist() == [1, 2]


def test_a_picture_is_scaled_by_its_shorter_side_and_cut_in_the_middle(tmp_path: Path) -> None:
    picture = np.zeros((16, 48, 3), dtype=np.uint8)
    picture[:, 16:32] = 200  # the middle third alone is bright
    Image.fromarray(picture).save(tmp_path / "a.png")
    found, labels = read(tmp_path / "a.png", "dog")
    assert found.shape == (1, 3, SIZE, SIZE) and labels.tolist() == [1]
    assert found[0, :, :, 1:-1].min() > 150


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"images": images()}, "no array 'labels'"),
    "no images": ({"labels": np.array([0])}, "no array 'images'"),
    "floats": ({"images": images().astype(np.float32), "labels": np.array([0, 1])}, "must be uint8"),
    "another size": ({"images": images(2, (9, 9, 3)), "labels": np.array([0, 1])}, "must be uint8 of shape"),
    "more labels": ({"images": images(), "labels": np.array([0, 1, 2])}, "must be uint8 of shape (3,"),
    "a table of labels": ({"images": images(), "labels": np.array([[0], [1]])}, "must be (n,)"),
    "nothing": ({"images": images(0), "labels": np.empty(0, dtype=np.int64)}, "with n at least 1"),
    "too high": ({"images": images(), "labels": np.array([0, 3])}, "label 3 is not one of the 3 agreed classes"),
    "negative": ({"images": images(), "labels": np.array([-1, 1])}, "label -1 is not one of"),
    "unknown name": ({"images": images(), "labels": np.array(["cat", "cow"])}, "class 'cow' is not one of the 3"),
    "shares": ({"images": images(), "labels": np.array([0.5, 1.0])}, "must be whole numbers or class names"),
    "objects": ({"images": images(), "labels": np.array([0, None])}, "an array of object"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", BAD)
def test_an_archive_that_was_not_agreed_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    arrays, words = BAD[case]
    with pytest.raises(DataError, match=r"a\.npz") as caught:
        read(archive(tmp_path / "a.npz", **arrays))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_huge_promise_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (2**40,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("labels.npy", head.getvalue())
        file.writestr("images.npy", head.getvalue())
    with pytest.raises(DataError, match="promises 1099511627776 bytes"):
        read(tmp_path / "a.npz")
    with pytest.raises(DataError, match="promises"):
        count(tmp_path / "a.npz")


def test_a_place_that_no_file_has_is_a_damaged_file_and_no_broken_disk(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(WHOLE.getvalue()[1:])  # its first part now begins one byte before the file
    with pytest.raises(DataError, match=r"a\.npz: damaged"):
        read(tmp_path / "a.npz")


@pytest.mark.slow
def test_a_bomb_is_refused_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("images.npy", "w", force_zip64=True) as member:
            for _ in range(2 + arrivals.LARGEST_FILE // 2**20):
                member.write(bytes(2**20))
        file.writestr("labels.npy", b"")
    with pytest.raises(DataError, match="unpacked; must be at most"):
        read(tmp_path / "a.npz")


@pytest.mark.slow
def test_a_picture_that_would_take_much_memory_is_refused(tmp_path: Path) -> None:
    Image.new("1", (2, 6_000_000)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png: it is too long and thin"):
        read(tmp_path / "a.png", "cat")


@pytest.mark.parametrize(("name", "class_name"), [("a.txt", None), ("a.npz", "cat"), ("a.png", None)])
def test_a_file_of_another_kind_is_refused(name: str, class_name: str | None, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(DataError, match=r"a\.\w+: must be an .npz"):
        read(tmp_path / name, class_name)


def test_an_unknown_class_folder_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (SIZE, SIZE)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="class 'cow' is not one of the 3 agreed classes"):
        read(tmp_path / "a.png", "cow")


def test_a_class_is_the_same_however_its_name_is_composed(tmp_path: Path) -> None:
    """Macs write the names of folders decomposed."""
    agreed = DataConfig(class_names="cafe\u0301, tea").named_classes()
    path = archive(tmp_path / "a.npz", images=images(2), labels=np.array(["caf\u00e9", "cafe\u0301"]))
    with OpenFolder.at(tmp_path) as folder:
        assert arrivals.read(Arrival(folder, path.name, None), agreed, FORM, read_square)[1].tolist() == [0, 0]
    (tmp_path / "cafe\u0301").mkdir()
    Image.new("RGB", (SIZE, SIZE)).save(tmp_path / "cafe\u0301" / "a.png")
    with OpenFolder.at(tmp_path / "cafe\u0301") as folder:
        assert arrivals.read(Arrival(folder, "a.png", "cafe\u0301"), agreed, FORM, read_square)[1].tolist() == [0]


def test_unfinished_and_hidden_files_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    for name in (
        ".hidden.npz",
        "a.npz.part",
        "b.tmp",
        "c.partial",
        "z.npz",
        "cat/.x.png",
        "cat/y.png",
        "cat/y.png.tmp",
    ):
        (tmp_path / name).touch()
    with OpenFolder.at(tmp_path) as folder:
        found = [(each.name, each.class_name) for each in arrivals.listing(folder)]
    assert found == [("y.png", "cat"), ("z.npz", None)]


WHOLE = io.BytesIO()
np.savez(WHOLE, images=images(), labels=np.array([0, 1]))
PICTURE = io.BytesIO()
Image.fromarray(images(1)[0]).save(PICTURE, "PNG")


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Any bytes, or a good file with some of its bytes changed, cut off or put in; headers rewritten to match."""
    start = draw(st.sampled_from([WHOLE.getvalue(), PICTURE.getvalue(), b""]))
    if not start:
        return draw(st.binary(max_size=400))
    content = bytearray(start)
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, max(0, len(content) - 1)))
        change = draw(st.sampled_from(["flip", "cut", "insert", "number"]))
        if change == "flip" and content:
            content[place] ^= draw(st.integers(1, 255))
        elif change == "cut":
            del content[place : place + draw(st.integers(1, 60))]
        elif change == "insert":
            content[place:place] = draw(st.binary(max_size=20))
        else:
            content[place : place + 4] = struct.pack("<I", draw(st.integers(0, 2**32 - 1)))
    return bytes(content)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """An archive that is sound outside, its arrays' heads and bodies anything."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name in draw(st.lists(st.sampled_from(["images.npy", "labels.npy", "x"]), unique=True)):
            magic = draw(st.sampled_from([b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00", b"\x93NUMPY\x03\x00", b"PK"]))
            shape = draw(st.lists(st.integers(-3, 2**33), max_size=5)) or draw(
                st.sampled_from(["()", "(2,)", "2", "((2,),)"])
            )
            kind = draw(st.sampled_from(["|u1", "<i8", "<U4", "|O", "<f8", "|V0", "junk", [("a", "<i8")]]))
            text = draw(
                st.one_of(
                    st.just(f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape!r}, }}"),
                    st.just(f"{{'descr': {kind!r}, 'fortran_order': True, 'shape': {tuple(shape)!r}, }}"),
                    st.text(max_size=60),
                )
            ).encode()
            length = struct.pack("<H" if magic[6:7] == b"\x01" else "<I", len(text))
            file.writestr(name, magic + length + text + draw(st.binary(max_size=64)))
    return packed.getvalue()


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(damaged(), heads()),
    st.sampled_from([("a.npz", None), ("a.png", "cat"), ("a.gif", "dog"), ("a.jpg", "cat")]),
)
def test_no_bytes_do_anything_but_load_or_be_refused(
    tmp_path: Path, content: bytes, place: tuple[str, str | None]
) -> None:
    name, class_name = place
    (tmp_path / name).write_bytes(content)
    for parse in (read, count):
        try:
            parse(tmp_path / name, class_name)
        except DataError as refused:
            assert "\n" not in str(refused)


def test_an_inbox_accepts_the_same_formats(tmp_path: Path) -> None:
    for kind, name in (("JPEG2000", "a.jpg"), ("TIFF", "a.png"), ("GIF", "a.webp")):
        Image.new("RGB", (20, 20)).save(tmp_path / name, kind)
        with pytest.raises(DataError, match=rf"^{name}: it is not an image, or its format is not supported"):
            read(tmp_path / name, "cat")
    for name in ("a.tif", "a.gif", "a.jp2", "a.bmp"):
        with pytest.raises(
            DataError, match=rf"^{name}: must be an .npz .*, or a picture \(.jpeg, .jpg, .jfif, .jpe, .png, .webp\)"
        ):
            count(tmp_path / name, "cat")


def test_an_inbox_has_the_same_limit_of_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(blank(4097, 3072))
    with pytest.raises(DataError, match=r"^a\.png: it has 4097 x 3072 pixels; at most 12,582,912 are allowed"):
        read(tmp_path / "a.png", "cat")
