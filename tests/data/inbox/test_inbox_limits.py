"""What an inbox does about files that it may not move, disks that fail, sizes without measure, and others' access."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.made.inboxes import CLASSES, FORM, SIZE, drop, numbers_of, opened, picture

from fedkace_flwr.errors import DataError
from fedkace_flwr.sources import read_folder

pytestmark = pytest.mark.timeout(60)  # a client that waits for a pipe waits for ever
WARNINGS = "fedkace_flwr.data.inbox"


# What the system refuses


def test_a_file_that_cannot_be_moved_stays_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a folder with the sticky bit, where only its owner can move a file."""
    drop(tmp_path, "good.npz", 1)
    drop(tmp_path, "theirs.npz", 2)
    (tmp_path / "new" / "bad.npz").write_text("hello")
    real = os.rename

    def owned(source: Any, target: Any, **folders: Any) -> None:
        if os.fspath(source).endswith(("theirs.npz", "bad.npz")):
            raise PermissionError(1, "Operation not permitted")
        real(source, target, **folders)

    monkeypatch.setattr(os, "rename", owned)
    box = opened(tmp_path)
    with caplog.at_level("WARNING", WARNINGS):
        assert numbers_of(box.take(1, 0)) == [1]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["bad.npz", "theirs.npz"]
    assert list((tmp_path / "rejected").iterdir()) == []
    assert len([record for record in caplog.records if "nor moved away" in record.getMessage()]) == 2


def test_a_class_folder_that_cannot_be_read_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drop(tmp_path, "good.npz", 1)
    picture(tmp_path / "new" / "b" / "shot.png")
    for name in ("open", "scandir"):
        real = getattr(os, name)

        def closed(path: Any, *args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            if not isinstance(path, int) and os.path.basename(os.fspath(path)) == "b":  # noqa: PTH119
                raise PermissionError(13, "Permission denied")
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, name, closed)
    assert numbers_of(opened(tmp_path).take(1, 0)) == [1]


def test_a_producer_may_take_a_file_back_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drop(tmp_path, "good.npz", 1)
    path = tmp_path / "new" / "bad.npz"
    path.write_text("hello")
    real = os.rename

    def gone(source: Any, target: Any, **folders: Any) -> None:
        if os.fspath(source).endswith("bad.npz"):
            path.unlink()
        real(source, target, **folders)

    monkeypatch.setattr(os, "rename", gone)
    assert numbers_of(opened(tmp_path).take(1, 0)) == [1]
    assert list((tmp_path / "rejected").iterdir()) == []


@pytest.mark.parametrize("error", [28, 5, 30], ids=["full", "broken", "read-only"])
def test_an_error_of_the_disk_stops_the_round_and_loses_nothing(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(tmp_path, "1.npz", 1)
    drop(tmp_path, "2.npz", 2)
    box = opened(tmp_path)
    with monkeypatch.context() as patch:

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(error, os.strerror(error))

        patch.setattr(os, "rename", full)
        with pytest.raises(DataError, match=r"inbox = .*: cannot be used"):
            box.take(1, 0)
    assert numbers_of(box.take(1, 0)) == [1, 2]


# Sizes


def test_a_sparse_file_of_gigabytes_is_rejected_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drop(tmp_path, "good.npz", 1)
    for path in (tmp_path / "new" / "huge.npz", tmp_path / "new" / "a" / "huge.png"):
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(2**31)
    assert numbers_of(opened(tmp_path).take(1, 0)) == [1]
    reasons = [path.read_text() for path in (tmp_path / "rejected").glob("huge*.reason.txt")]
    assert len(reasons) == 2 and all("it has 2147483648 bytes" in reason for reason in reasons)


def test_an_archive_of_very_many_parts_is_rejected_before_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(tmp_path, "good.npz", 1)
    body = (tmp_path / "new" / "good.npz").read_bytes()
    start, end = body.index(b"PK\1\2"), body.index(b"PK\5\6")
    entry = body[start : body.index(b"PK\1\2", start + 1)]
    tail = bytearray(body[end:])
    tail[12:16] = (5000 * len(entry)).to_bytes(4, "little")
    (tmp_path / "new" / "many.npz").write_bytes(body[:start] + 5000 * entry + bytes(tail))
    made = 0
    real = zipfile.ZipInfo.__init__

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal made
        made += 1
        real(*args, **kwargs)

    monkeypatch.setattr(zipfile.ZipInfo, "__init__", counted)
    assert numbers_of(opened(tmp_path).take(1, 0)) == [1]
    assert made < 100
    assert "holds 5000 parts" in (tmp_path / "rejected" / "many.npz.reason.txt").read_text()


def test_a_compression_that_numpy_does_not_write_is_rejected(tmp_path: Path) -> None:
    drop(tmp_path, "x.npz", 1)
    with np.load(tmp_path / "new" / "x.npz") as content:
        arrays = {name: content[name] for name in content.files}
    with zipfile.ZipFile(tmp_path / "new" / "x.npz", "w", zipfile.ZIP_LZMA) as packed:
        for name, array in arrays.items():
            with packed.open(f"{name}.npy", "w") as member:
                np.save(member, array)
    assert numbers_of(opened(tmp_path).take(1, 0)) == []
    assert "NumPy does not write" in (tmp_path / "rejected" / "x.npz.reason.txt").read_text()


# The folders' permissions, and the test folder


def test_what_an_inbox_creates_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        opened(tmp_path / "a" / "inbox")
        (tmp_path / "shared" / "new").mkdir(parents=True)
        (tmp_path / "shared" / "new").chmod(0o1777)
        opened(tmp_path / "shared")
    finally:
        os.umask(before)
    for path in ("a", "a/inbox", *(f"a/inbox/{room}" for room in ("new", "taken", "done", "rejected"))):
        assert (tmp_path / path).stat().st_mode & 0o7777 == 0o700, path
    assert (tmp_path / "shared" / "new").stat().st_mode & 0o7777 == 0o1777  # its owner lets others write there
    assert (tmp_path / "shared" / "taken").stat().st_mode & 0o7777 == 0o700


def test_others_cannot_write_where_only_the_client_has_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for room in ("new", "taken", "done", "rejected"):
        (tmp_path / room).mkdir()
        (tmp_path / room).chmod(0o777)
    with caplog.at_level("WARNING", WARNINGS):
        opened(tmp_path)
        opened(tmp_path)
    modes = {room: (tmp_path / room).stat().st_mode & 0o777 for room in ("new", "taken", "done", "rejected")}
    assert modes == {"new": 0o777, "taken": 0o755, "done": 0o755, "rejected": 0o755}
    assert len([record for record in caplog.records if "others could write there" in record.getMessage()]) == 3


def test_rejected_reasons_are_for_its_user_alone(tmp_path: Path) -> None:
    box = opened(tmp_path)
    (tmp_path / "new" / "bad.npz").write_text("hello")
    box.take(1, 0)
    assert (tmp_path / "rejected" / "bad.npz.reason.txt").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_tested_on_is_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drop(tmp_path, "good.npz", 1)
    new = tmp_path / "new"
    os.mkfifo(new / "pipe.npz")
    (new / "link.npz").symlink_to("good.npz")
    for name in ("a/scan.tiff", "unknown/x.png"):
        (new / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (SIZE, SIZE)).save(new / name)
    with caplog.at_level("WARNING"):
        assert len(read_folder(new, CLASSES, FORM)[1]) == 1
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"test = {new}: 4 files cannot be tested on and are left out: scan.tiff: must be")
