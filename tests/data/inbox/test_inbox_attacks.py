"""Hostile files in an inbox: each costs itself, and neither the others nor the client nor files elsewhere.

Whoever writes to the inbox may also change it while the client works. Here they do so at the one moment that matters,
when the client is about to open a file that it has listed.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.doubles.swaps import Opened, after_listing
from support.made.inboxes import RUN, drop, names_in, numbers_of, opened, picture

from fedkace_flwr.errors import DataError

pytestmark = pytest.mark.timeout(60)  # a client that waits for a pipe waits for ever
WARNINGS = "fedkace_flwr.data.inbox"


# Names


@pytest.mark.matrix
@pytest.mark.parametrize("content", [b"hello", None], ids=["bad", "good"])
@pytest.mark.parametrize(
    "name",
    ["n" * 251 + ".npz", "\u00e9" * 125 + "n.npz", "n" * 255],
    ids=["ascii", "not ascii", "no suffix"],
)
def test_a_name_as_long_as_names_can_be_costs_its_file_alone(name: str, content: bytes | None, tmp_path: Path) -> None:
    drop(tmp_path, "good.npz", 1)
    drop(tmp_path, "x.npz", 2)
    (tmp_path / "new" / "x.npz").rename(tmp_path / "new" / name)
    if content is not None:
        (tmp_path / "new" / name).write_bytes(content)
    box = opened(tmp_path)
    works = content is None and name.endswith(".npz")
    for _ in range(2):
        assert sorted(numbers_of(box.take(1, 0))) == ([1, 2] if works else [1])
    box.learned(1)
    assert numbers_of(box.take(2, 1)) == []
    assert names_in(tmp_path / "new") == []
    reasons = [path for path in (tmp_path / "rejected").iterdir() if path.name.endswith(".reason.txt")]
    assert len(reasons) == (0 if works else 1)
    for reason in reasons:
        assert (tmp_path / "rejected" / reason.name.removesuffix(".reason.txt")).exists()


def test_long_names_that_begin_alike_are_kept_apart(tmp_path: Path) -> None:
    box = opened(tmp_path)
    for end in ("a", "b"):
        for _ in range(2):
            (tmp_path / "new" / ("n" * 250 + end + ".npz")).write_text("hello")
            assert numbers_of(box.take(1, 0)) == []
    assert len(list((tmp_path / "rejected").iterdir())) == 8


def test_many_rejected_files_of_one_name_are_told_apart_without_trying_every_number(tmp_path: Path) -> None:
    looked = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any, **kwargs: Any) -> Any:
            nonlocal looked
            looked += 1
            return real(*args, **kwargs)

        return look

    for number in range(200):
        folder = tmp_path / "new" / f"class {number:03d}"
        folder.mkdir(parents=True)
        (folder / "shot.png").write_text("no picture")
    box = opened(tmp_path, bound=1000)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stat", "lstat"):
            patch.setattr(os, name, counted(getattr(os, name)))
        assert numbers_of(box.take(1, 0)) == []
    assert len(list((tmp_path / "rejected").glob("shot*.png"))) == 200
    assert looked < 10_000  # trying every number takes twice as many


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", ["a\nERROR all is lost.npz", "a\x1b[31m.npz", "\udcff\udcfe.npz", "\u202ezpn.npz", " .npz"]
)
def test_a_name_of_any_letters_is_shown_on_one_printable_line(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drop(tmp_path, "good.npz", 1)
    (tmp_path / "new" / name).write_text("hello")
    with caplog.at_level("WARNING", WARNINGS):
        assert numbers_of(opened(tmp_path).take(1, 0)) == [1]
    (reason,) = (tmp_path / "rejected").glob("*.reason.txt")
    text = reason.read_text()
    assert text.endswith("\n") and text[:-1].isprintable()
    (message,) = [record.getMessage() for record in caplog.records if "rejected" in record.getMessage()]
    assert message.isprintable()


letters = st.binary(min_size=1, max_size=255).map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"_"))
kinds = st.sampled_from(["file", "archive", "link", "pipe", "folder", "class"])


@given(st.dictionaries(letters | letters.map(lambda name: name[-251:] + b".npz"), kinds, max_size=6))
def test_no_name_and_no_kind_of_file_stops_the_others(
    tmp_path_factory: pytest.TempPathFactory, files: dict[bytes, str]
) -> None:
    folder = tmp_path_factory.mktemp("inbox")
    drop(folder, "good.npz", 1)
    content = (folder / "new" / "good.npz").read_bytes()
    for name, kind in files.items():
        path = os.path.join(os.fsencode(folder / "new"), name)  # noqa: PTH118  # of bytes, which pathlib does not take
        if os.path.lexists(path):
            continue
        if kind == "link":
            os.symlink("good.npz", path)  # noqa: PTH211
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind in ("folder", "class"):
            os.mkdir(path)  # noqa: PTH102
        if kind in ("file", "archive", "class"):
            with open(os.path.join(path, name) if kind == "class" else path, "wb") as file:  # noqa: PTH118, PTH123
                file.write(content if kind == "archive" else b"hello")
    box = opened(folder)
    taken = numbers_of(box.take(1, 0))
    assert taken and set(taken) == {1}
    assert numbers_of(opened(folder).take(1, 0)) == taken
    box.learned(1)
    drop(folder, "again.npz", 2)
    assert numbers_of(box.take(2, 1)) == [2]


def test_a_run_cannot_name_a_folder_outside_of_the_inbox(tmp_path: Path) -> None:
    """The name of a run comes from the server."""
    folder = tmp_path / "inbox"
    drop(folder, "1.npz", 1)
    for run in ("../../elsewhere", "/tmp/x", "a/b", "..", "x" * 300, "a\nb"):
        box = opened(folder, run=run)
        assert numbers_of(box.take(1, 0)) == [1]
        assert numbers_of(opened(folder, run=run).take(1, 0)) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["inbox"]


def test_a_folder_of_a_class_that_is_named_like_a_file_does_not_stop_the_round(tmp_path: Path) -> None:
    drop(tmp_path, "a.npz", 1)
    box = opened(tmp_path)
    assert numbers_of(box.take(1, 0)) == [1]
    picture(tmp_path / "new" / "a.npz" / "shot.png")
    drop(tmp_path, "b.npz", 2)
    assert sorted(numbers_of(opened(tmp_path).take(2, 0))) == [1, 2]  # round 1 was given up


# Kinds


def test_whatever_lies_in_an_inbox_a_round_takes_what_is_good(tmp_path: Path) -> None:
    drop(tmp_path, "good.npz", 1)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "theirs.npz").write_text("theirs")
    new = tmp_path / "new"
    (new / "link.npz").symlink_to(outside / "theirs.npz")
    (new / "dangling.npz").symlink_to(outside / "none")
    (new / "loop.npz").symlink_to("loop.npz")
    (new / "folder").symlink_to(outside)
    os.mkfifo(new / "pipe.npz")
    (new / "a" / "inner" / "deep").mkdir(parents=True)
    os.mkfifo(new / "a" / "pipe.png")
    (new / "a" / "link.png").symlink_to(outside / "theirs.npz")
    (new / "empty.npz").mkdir()
    home = Path.cwd()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(new)  # the path of a socket is short
        try:
            listener.bind("socket.npz")
        finally:
            os.chdir(home)
        assert numbers_of(opened(tmp_path).take(1, 0)) == [1]
    assert (outside / "theirs.npz").read_text() == "theirs"
    rejected = {path.name for path in (tmp_path / "rejected").iterdir() if not path.name.endswith(".reason.txt")}
    assert rejected == {
        *("link.npz", "dangling.npz", "loop.npz", "folder", "pipe.npz", "inner", "pipe.png", "link.png", "socket.npz")
    }


@pytest.mark.parametrize(("name", "what"), [("x.npz", "pipe"), ("x.npz", "folder"), ("shot.png", "link")])
def test_a_file_that_is_swapped_before_it_is_opened_is_rejected(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(tmp_path, "good.npz", 1)
    secret = tmp_path / "secret.npz"
    drop(tmp_path, "secret.npz", 7)
    (tmp_path / "new" / "secret.npz").rename(secret)
    path = tmp_path / "new" / "a" / name if name.endswith("png") else tmp_path / "new" / name
    if name.endswith("png"):
        picture(path)
        picture(secret)
    else:
        drop(tmp_path, name, 2)

    def swap() -> None:
        path.unlink()
        {"pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(secret), "folder": path.mkdir}[what]()

    box, attack = opened(tmp_path), Opened(monkeypatch, name, swap)
    assert numbers_of(box.take(1, 0)) == [1]
    assert attack.acted and secret.is_file()
    assert "plain file" in (tmp_path / "rejected" / f"{name}.reason.txt").read_text()


@pytest.mark.parametrize("what", ["pipe", "link"])
def test_a_file_that_is_swapped_after_it_was_taken_is_rejected(what: str, tmp_path: Path) -> None:
    drop(tmp_path, "good.npz", 1)
    drop(tmp_path, "x.npz", 2)
    box = opened(tmp_path)
    assert numbers_of(box.take(1, 0)) == [1, 2]
    path = tmp_path / "taken" / f"{RUN}-000001" / "x.npz"
    path.rename(tmp_path / "x.npz")
    os.mkfifo(path) if what == "pipe" else path.symlink_to(tmp_path / "x.npz")
    assert numbers_of(opened(tmp_path).take(1, 0)) == [1]


def test_a_class_folder_that_is_swapped_for_a_link_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are moved, and not only read: a link must not make the client take others' files away."""
    inbox, precious = tmp_path / "inbox", tmp_path / "precious"
    drop(inbox, "good.npz", 1)
    picture(inbox / "new" / "a" / "shot.png")
    picture(precious / "shot.png")

    def swap() -> None:
        (inbox / "new" / "a").rename(tmp_path / "away")
        (inbox / "new" / "a").symlink_to(precious)

    box, attack = opened(inbox), after_listing(monkeypatch, "a", swap)
    images, labels = box.take(1, 0)
    assert attack
    assert (precious / "shot.png").exists()
    assert len(images) == len(labels) and 1 <= len(labels) <= 2


def test_a_file_that_grows_after_it_was_taken_waits_or_is_rejected(tmp_path: Path) -> None:
    drop(tmp_path, "1.npz", 1)
    drop(tmp_path, "2.npz", 2)
    box = opened(tmp_path, bound=2)
    assert numbers_of(box.take(1, 0)) == [1, 2]
    drop(tmp_path, "3.npz", 3, 4)
    (tmp_path / "new" / "3.npz").replace(tmp_path / "taken" / f"{RUN}-000001" / "2.npz")
    assert numbers_of(box.take(1, 0)) == [1]
    assert names_in(tmp_path / "new") == ["2.npz"]
    box.learned(1)
    assert numbers_of(box.take(2, 1)) == [3, 4]
    drop(tmp_path, "3.npz", 3, 4, 5)
    (tmp_path / "new" / "3.npz").replace(tmp_path / "taken" / f"{RUN}-000002" / "2.npz")
    assert numbers_of(box.take(2, 1)) == []
    assert "inbox-bound = 2" in (tmp_path / "rejected" / "2.npz.reason.txt").read_text()


@pytest.mark.parametrize(
    ("name", "what"),
    [(f"{RUN}-000001", "link"), (f"{RUN}-000001.partial", "file"), (f"{RUN}-000001.learned", "pipe")],
)
def test_what_is_planted_in_the_place_of_a_rounds_folder_is_put_aside(name: str, what: str, tmp_path: Path) -> None:
    inbox, elsewhere = tmp_path / "inbox", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "theirs").write_text("theirs")
    box = opened(inbox)
    planted = inbox / "taken" / name
    {"link": lambda: planted.symlink_to(elsewhere), "file": planted.touch, "pipe": lambda: os.mkfifo(planted)}[what]()
    drop(inbox, "1.npz", 1)
    assert numbers_of(box.take(1, 0)) == [1]
    box.learned(1)
    drop(inbox, "2.npz", 2)
    assert numbers_of(box.take(2, 1)) == [2]
    assert names_in(elsewhere) == ["theirs"]
    assert "in the way" in (inbox / "rejected" / f"{name}.reason.txt").read_text()


@pytest.mark.parametrize("name", ["other-000001", "other-000001.learned", "other-000002.gone"])
def test_links_among_the_taken_folders_are_left_alone(name: str, tmp_path: Path) -> None:
    inbox, elsewhere = tmp_path / "inbox", tmp_path / "elsewhere"
    elsewhere.mkdir()
    drop(elsewhere, "theirs.npz", 7)
    box = opened(inbox)
    (inbox / "taken" / name).symlink_to(elsewhere / "new")
    for number in (1, 2, 3):
        drop(inbox, f"{number}.npz", number)
        assert numbers_of(box.take(number, number - 1)) == [number]
        box.learned(number)
    assert names_in(elsewhere) == ["new/theirs.npz"]


def test_a_reason_is_not_written_through_a_link(tmp_path: Path) -> None:
    inbox, target = tmp_path / "inbox", tmp_path / "target"
    target.write_text("theirs")
    box = opened(inbox)
    (inbox / "rejected" / "bad.npz.reason.txt").symlink_to(target)
    (inbox / "new" / "bad.npz").write_text("hello")
    drop(inbox, "good.npz", 1)
    assert numbers_of(box.take(1, 0)) == [1]
    assert target.read_text() == "theirs"
    assert (inbox / "rejected" / "bad~1.npz.reason.txt").exists()


@pytest.mark.parametrize("room", ["new", "taken", "done", "rejected"])
def test_a_link_in_place_of_one_of_the_four_folders_is_refused_by_name(room: str, tmp_path: Path) -> None:
    inbox, elsewhere = tmp_path / "inbox", tmp_path / "elsewhere"
    box = opened(inbox)
    elsewhere.mkdir()
    (inbox / room).rmdir()
    (inbox / room).symlink_to(elsewhere)
    for action in (lambda: box.take(1, 0), lambda: opened(inbox)):
        with pytest.raises(DataError, match=f"inbox = .*{room}") as caught:
            action()
        assert "\n" not in str(caught.value)


def test_a_file_is_opened_once_for_each_time_that_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two openings, another file could take its place."""
    drop(tmp_path, "x.npz", 1)
    picture(tmp_path / "new" / "a" / "shot.png")
    watched = Opened(monkeypatch)
    assert len(opened(tmp_path).take(1, 0)[1]) == 2
    names = ("x.npz", "shot.png")
    assert [watched.times[name] for name in names] == [2, 2]  # counted in new/, then read where it was taken
    assert [watched.by_path[name] for name in names] == [0, 0]
