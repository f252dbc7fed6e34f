"""Pictures that come without a label, and labels that come after them."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.made.inboxes import CLASSES, RUN, SIZE, names_in, numbers_of, opened
from support.made.parsers import Parsers

from fedkace_flwr.config import Config
from fedkace_flwr.data.inbox import waiting
from fedkace_flwr.errors import ConfigError

Make = Callable[..., Config]


def arrive(folder: Path, *numbers: int) -> None:
    """Pictures without labels, ``NUMBER.png``; the first pixel of each is its number."""
    place = folder / "new" / "unlabelled"
    place.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        Image.new("RGB", (SIZE, SIZE), (number, 0, 0)).save(place / f"{number}.png")


def name(number: int) -> str:
    return CLASSES[number % 3]


def label(folder: Path, *numbers: int, file: str = "labels.csv") -> None:
    (folder / "new" / file).write_text("".join(f"{number}.png,{name(number)}\n" for number in numbers))


def reason(folder: Path, file: str = "labels.csv") -> str:
    text = (folder / "rejected" / f"{file}.reason.txt").read_text()
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize("keep", [True, False])
def test_pictures_wait_for_a_file_of_labels_and_are_then_learned_once(tmp_path: Path, keep: bool) -> None:
    arrive(tmp_path, 1, 2, 3)
    box = opened(tmp_path, keep=keep)
    assert len(box.take(1, 0)[1]) == 0
    keys = {picture.name: picture.key for picture in box.unlabelled()}
    label(tmp_path, 1, 3, file="labels-monday.csv")
    assert sorted(numbers_of(box.take(2, 0))) == [1, 3]
    assert box.keys == [keys["3.png"], keys["1.png"]]  # in the order of the folders a, b
    box.learned(2)
    label(tmp_path, 2)
    assert numbers_of(box.take(3, 2)) == [2] and box.keys == [keys["2.png"]]
    box.learned(3)
    assert len(box.take(4, 3)[1]) == 0
    gone = {Path(each).name for each in names_in(tmp_path / "done")}
    assert gone == ({"1.png", "3.png", "labels-monday.csv", "labels.csv"} if keep else set())
    assert names_in(tmp_path / "new") == names_in(tmp_path / "rejected") == []


def test_a_picture_that_is_moved_to_its_class_is_the_one_that_waited(tmp_path: Path) -> None:
    arrive(tmp_path, 4)
    box = opened(tmp_path)
    ((key),) = [picture.key for picture in box.unlabelled()]
    (tmp_path / "new" / "b").mkdir()
    (tmp_path / "new" / "unlabelled" / "4.png").rename(tmp_path / "new" / "b" / "other.png")
    assert numbers_of(box.take(1, 0)) == [4] and box.keys == [key]


@pytest.mark.parametrize(
    "text",
    [
        "1.png,b\n2.png,c\n",
        "\ufeffname,label\r\n1.png,b\r\n\r\n2.png,c",
        'Name,Label\n"1.png","b"\n"2.png", c \n1.png,b\n',
        "2.png,c\n1.png,b",
    ],
)
def test_files_of_labels_in_any_usual_form(tmp_path: Path, text: str) -> None:
    arrive(tmp_path, 1, 2)
    (tmp_path / "new" / "labels.csv").write_bytes(text.encode())
    assert waiting(tmp_path, 10) == (2, [])
    assert sorted(numbers_of(opened(tmp_path).take(1, 0))) == [1, 2]
    assert names_in(tmp_path / "rejected") == []


def test_names_may_be_composed_or_not(tmp_path: Path) -> None:
    arrive(tmp_path, 1)
    (tmp_path / "new" / "unlabelled" / "1.png").rename(tmp_path / "new" / "unlabelled" / "a\u0308.png")
    (tmp_path / "new" / "labels.csv").write_text("\u00e4.png,b\n")
    assert numbers_of(opened(tmp_path).take(1, 0)) == [1]


def test_bad_rows_are_named_and_counted_and_the_others_are_applied(tmp_path: Path) -> None:
    arrive(tmp_path, 1, 2, 3, 4)
    (tmp_path / "secret.png").write_bytes((tmp_path / "new" / "unlabelled" / "1.png").read_bytes())
    rows = ["1.png,b", "../../secret.png,c", "2.png,cow", "3.png,a", "3.png,b", "4.png", "5.png,a", "2.png,unlabelled"]
    (tmp_path / "new" / "labels.csv").write_text("\n".join(rows))
    assert numbers_of(opened(tmp_path).take(1, 0)) == [1]
    assert reason(tmp_path).startswith(
        "labels.csv: 7 of 8 rows cannot be used, the first in line 2, '../../secret.png': no such file"
    )
    assert names_in(tmp_path / "new") == ["unlabelled/2.png", "unlabelled/3.png", "unlabelled/4.png"]
    assert (tmp_path / "rejected" / "labels.csv").read_text() == "\n".join(rows)
    label(tmp_path, 2, 3, 4)
    assert sorted(numbers_of(opened(tmp_path).take(1, 0))) == [1], "a round that is tried again takes nothing new"
    assert sorted(numbers_of(opened(tmp_path).take(2, 1))) == [2, 3, 4]


def test_who_may_drop_files_in_new_may_do_so_in_the_folders_of_classes(tmp_path: Path) -> None:
    arrive(tmp_path, 1)
    (tmp_path / "new").chmod(0o2770)
    label(tmp_path, 1)
    box = opened(tmp_path)
    box.take(1, 0)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").glob("[a-z]")] == [0o2770]


def test_a_file_of_labels_under_another_name_is_told_so(tmp_path: Path) -> None:
    arrive(tmp_path, 1, 2)
    label(tmp_path, 1, file="Labels.csv")
    label(tmp_path, 2, file="my-labels.csv")
    assert numbers_of(opened(tmp_path).take(1, 0)) == [1]
    assert reason(tmp_path, "my-labels.csv").endswith("a file of labels is called labels*.csv\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "in UTF-8"),
        (b"1.png,b\n" * 1_250_001, "too large"),
        (b'1.png,"b\n', "name,label"),
        (b"1.png," + b"b" * 200_000, "name,label"),
        (b"1.png;b\n", "1 of 1 rows"),
        (b"\0\0,\0\n", "1 of 1 rows"),
    ],
)
def test_what_is_no_file_of_labels_is_rejected_and_moves_nothing(tmp_path: Path, content: bytes, words: str) -> None:
    arrive(tmp_path, 1)
    (tmp_path / "new" / "labels.csv").write_bytes(content)
    assert waiting(tmp_path, 10) == (0, [])
    assert len(opened(tmp_path).take(1, 0)[1]) == 0
    assert words in reason(tmp_path)
    assert names_in(tmp_path / "new") == ["unlabelled/1.png"]


@given(st.binary(max_size=60) | st.text('"name,label\r\n\t \0;\u00e9\ufeff', max_size=40).map(str.encode))
def test_any_bytes_are_rows_or_are_rejected_in_one_line(content: bytes) -> None:
    parsers = Parsers()
    try:
        parsers.labels(content)
    finally:
        (parsers.folder / "labels.csv").unlink()
        parsers.close()


def test_links_and_pipes_hold_no_labels_and_are_no_pictures(tmp_path: Path) -> None:
    arrive(tmp_path, 1)
    (tmp_path / "mine.csv").write_text("1.png,b\n")
    (tmp_path / "new" / "labels.csv").symlink_to(tmp_path / "mine.csv")
    os.mkfifo(tmp_path / "new" / "labels-2.csv")
    place = tmp_path / "new" / "unlabelled"
    (place / "link.png").symlink_to(place / "1.png")
    (place / "notes.txt").write_text("hello")
    (place / "folder").mkdir()
    (place / "half.png.part").touch()
    assert len(opened(tmp_path).take(1, 0)[1]) == 0
    assert "plain file" in reason(tmp_path) and "plain file" in reason(tmp_path, "labels-2.csv")
    assert all("must be a picture" in reason(tmp_path, file) for file in ("link.png", "notes.txt", "folder"))
    assert names_in(tmp_path / "new") == ["unlabelled/1.png", "unlabelled/half.png.part"]


def test_a_class_folder_that_cannot_be_used_leaves_the_picture_where_it_is(tmp_path: Path) -> None:
    arrive(tmp_path, 1, 2)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "new" / "b").symlink_to(tmp_path / "elsewhere")
    label(tmp_path, 1, 2)
    assert numbers_of(opened(tmp_path).take(1, 0)) == [2]
    assert "1 of 2 rows" in reason(tmp_path) and "new/b" in reason(tmp_path)
    assert names_in(tmp_path / "new") == ["unlabelled/1.png"] and names_in(tmp_path / "elsewhere") == []


def test_with_open_classes_a_labelled_picture_waits_for_its_class(tmp_path: Path) -> None:
    arrive(tmp_path, 1, 2)
    (tmp_path / "new" / "labels.csv").write_text("1.png,fish\n2.png,c\n")
    assert waiting(tmp_path, 10, CLASSES) == (1, ["fish"])
    box = opened(tmp_path, strangers="wait")
    assert numbers_of(box.take(1, 0)) == [2] and box.new_classes(9) == ["fish"]
    box.learned(1)
    told = opened(tmp_path, strangers="wait", class_names=(*CLASSES, "fish"))
    assert told.take(2, 1)[1].tolist() == [3]
    told.learned(2)
    assert len(told.take(3, 2)[1]) == 0


def test_a_site_that_lets_no_names_leave_says_so_of_the_row(tmp_path: Path) -> None:
    arrive(tmp_path, 1)
    (tmp_path / "new" / "labels.csv").write_text("1.png,fish\n")
    box = opened(tmp_path, strangers="keep secret")
    assert len(box.take(1, 0)[1]) == 0 and "'fish'" in reason(tmp_path)
    assert names_in(tmp_path / "new") == ["unlabelled/1.png"]


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_too_old_or_too_many_is_dropped_the_oldest_first(
    tmp_path: Path, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive(tmp_path, 1, 2, 3, 4)
    box = opened(tmp_path, keep=keep)

    def overdue(most: int, age: float) -> list[str]:
        return [picture.name for picture in box.overdue(most, age)]

    assert overdue(9, 1000.0) == []
    assert overdue(3, 1000.0) == ["1.png"] and overdue(0, 1000.0) == [f"{number}.png" for number in (1, 2, 3, 4)]
    box.drop([box.unlabelled()[0].key])
    label(tmp_path, 2)  # in time
    later = time.time() + 2000
    monkeypatch.setattr(time, "time", lambda: later)
    assert overdue(9, 1000.0) == ["3.png", "4.png"] and overdue(9, 3000.0) == []
    box.drop([picture.key for picture in box.overdue(9, 1000.0)])
    assert numbers_of(box.take(1, 0)) == [2]
    done = [f"unlabelled/{number}.png" for number in (1, 3, 4)]
    assert names_in(tmp_path / "done") == (sorted(["labels.csv", *done]) if keep else [])


def test_a_damaged_picture_is_rejected_when_it_is_to_be_predicted(tmp_path: Path) -> None:
    arrive(tmp_path, 1, 2)
    (tmp_path / "new" / "unlabelled" / "1.png").write_text("hello")
    box = opened(tmp_path)
    places, images = box.read_unlabelled(["1.png", "gone.png", "2.png"])
    assert places == [2] and images[:, 0, 0, 0].tolist() == [2]
    assert "1.png" in reason(tmp_path, "1.png") and box.rejected() == 1


def test_no_class_has_the_name_of_the_folder(tmp_path: Path, small: Make) -> None:
    with pytest.raises(ConfigError, match="'unlabelled'"):
        small(dataset="inbox", class_names="a,unlabelled", image_size=8)
    with pytest.raises(ConfigError, match="'unlabelled'"):
        small(dataset="inbox", classes="open", class_names="a,unlabelled", image_size=8)
    place = tmp_path / "new" / "unlabeled"
    place.mkdir(parents=True)
    Image.new("RGB", (SIZE, SIZE)).save(place / "x.png")
    box = opened(tmp_path, strangers="wait")
    assert box.new_classes(9) == [] and "not 'unlabelled'" in reason(tmp_path, "x.png")


def test_labels_are_counted_without_pytorch(tmp_path: Path) -> None:
    arrive(tmp_path, 1)
    label(tmp_path, 1)
    program = (
        "import sys; from pathlib import Path; from fedkace_flwr.data.inbox import waiting;"
        f"print(waiting(Path({str(tmp_path)!r}), 9)[0], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "False"], done.stderr


def test_another_run_takes_the_pictures_that_wait(tmp_path: Path) -> None:
    arrive(tmp_path, 1, 2)
    label(tmp_path, 1)
    opened(tmp_path).take(1, 0)
    label(tmp_path, 2)
    assert sorted(numbers_of(opened(tmp_path, "other").take(1, 0))) == [1, 2]
    assert RUN not in "".join(names_in(tmp_path / "taken"))
