"""An inbox: what it takes, when, and what becomes of the files."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.made.inboxes import RUN, drop, names_in, numbers_of, opened

from fedkace_flwr.errors import DataError


def test_a_round_takes_what_has_arrived_and_the_next_what_came_since(tmp_path: Path) -> None:
    drop(tmp_path, "2.npz", 3, 4)
    drop(tmp_path, "1.npz", 1, 2)
    box = opened(tmp_path)
    assert numbers_of(box.take(1, 0)) == [1, 2, 3, 4]
    drop(tmp_path, "3.npz", 5)
    assert numbers_of(box.take(1, 0)) == [1, 2, 3, 4]  # a round that is tried again learns the same
    box.learned(1)
    assert numbers_of(box.take(2, 1)) == [5]
    assert names_in(tmp_path / "new") == []


def test_learned_files_go_to_done_once_the_next_round_is_on_disk(tmp_path: Path) -> None:
    box = opened(tmp_path)
    for number in (1, 2, 3):
        drop(tmp_path, "x.npz", number)  # always the same name
        box.take(number, number - 1)
        box.learned(number)
    assert names_in(tmp_path / "done") == [f"{RUN}-000001/x.npz"]
    box.take(4, 3)
    assert names_in(tmp_path / "done") == [f"{RUN}-000001/x.npz", f"{RUN}-000002/x.npz"]
    assert names_in(tmp_path / "taken") == [f"{RUN}-000003.learned/x.npz"]


def test_learned_files_may_be_deleted(tmp_path: Path) -> None:
    box = opened(tmp_path, keep=False)
    for number in (1, 2):
        drop(tmp_path, "x.npz", number)
        box.take(number, number - 1)
        box.learned(number)
    box.take(3, 2)
    assert names_in(tmp_path) == [f"taken/{RUN}-000002.learned/x.npz"]


def test_a_bound_leaves_the_rest_for_later_and_splits_no_file(tmp_path: Path) -> None:
    drop(tmp_path, "1.npz", 1, 2)
    drop(tmp_path, "2.npz", 3, 4)
    drop(tmp_path, "3.npz", 5, 6, 7)
    drop(tmp_path, "4.npz", *range(10, 15))
    box = opened(tmp_path, bound=4)
    taken = []
    for number in (1, 2, 3):
        taken.append(numbers_of(box.take(number, number - 1)))
        box.learned(number)
    assert taken == [[1, 2, 3, 4], [5, 6, 7], []]
    assert (
        "holds 5 samples; must be at most inbox-bound = 4" in (tmp_path / "rejected" / "4.npz.reason.txt").read_text()
    )


def test_pictures_lie_in_their_classes_folders(tmp_path: Path) -> None:
    for name, value in (("b", 90), ("a", 30)):
        (tmp_path / "new" / name).mkdir(parents=True)
        Image.new("RGB", (5, 5), (value, 0, 0)).save(tmp_path / "new" / name / "shot.png")
    images, labels = opened(tmp_path).take(1, 0)
    assert images[:, 0, 0, 0].tolist() == [30, 90] and labels.tolist() == [0, 1]
    assert names_in(tmp_path / "taken") == [f"{RUN}-000001/a/shot.png", f"{RUN}-000001/b/shot.png"]


def test_what_will_not_do_is_put_aside_with_its_reason_and_the_rest_is_learned(tmp_path: Path) -> None:
    drop(tmp_path, "good.npz", 1)
    (tmp_path / "new" / "text.npz").write_text("hello")
    (tmp_path / "new" / "notes.txt").write_text("hello")
    (tmp_path / "new" / "cow").mkdir()
    Image.new("RGB", (5, 5)).save(tmp_path / "new" / "cow" / "text.npz.png")
    np.savez(tmp_path / "new" / "label.npz", images=np.zeros((1, 2, 2), np.uint8), labels=np.array([3]))
    (tmp_path / "new" / "link.npz").symlink_to(tmp_path / "new" / "good.npz")
    os.mkfifo(tmp_path / "new" / "pipe.npz")
    assert numbers_of(opened(tmp_path).take(1, 0)) == [1]
    reasons = {path.name: path.read_text() for path in (tmp_path / "rejected").glob("*.reason.txt")}
    assert set(reasons) == {
        f"{name}.reason.txt" for name in ("text.npz", "notes.txt", "text.npz.png", "label.npz", "link.npz", "pipe.npz")
    }
    assert "label 3 is not one of the 3 agreed" in reasons["label.npz.reason.txt"]
    assert "class 'cow'" in reasons["text.npz.png.reason.txt"]
    assert "plain file" in reasons["pipe.npz.reason.txt"]
    assert all(text.count("\n") == 1 for text in reasons.values())


def test_rejected_files_of_one_name_do_not_replace_each_other(tmp_path: Path) -> None:
    box = opened(tmp_path)
    for number in (1, 2):
        (tmp_path / "new" / "a.npz").write_text(str(number))
        box.take(number, 0)
    kept = sorted(path.name for path in (tmp_path / "rejected").iterdir())
    assert kept == ["a.npz", "a.npz.reason.txt", "a~1.npz", "a~1.npz.reason.txt"]


def test_a_round_that_was_given_up_leaves_its_files_to_the_next(tmp_path: Path) -> None:
    drop(tmp_path, "1.npz", 1)
    opened(tmp_path).take(1, 0)  # the machine goes down here; the server goes on
    drop(tmp_path, "1.npz", 2)
    box = opened(tmp_path)
    assert sorted(numbers_of(box.take(2, 0))) == [1, 2]
    box.learned(2)
    assert numbers_of(box.take(3, 2)) == []


def test_a_client_whose_newest_state_is_lost_learns_that_rounds_files_again(tmp_path: Path) -> None:
    box = opened(tmp_path)
    for number in (1, 2):
        drop(tmp_path, f"{number}.npz", number)
        box.take(number, number - 1)
        box.learned(number)
    assert numbers_of(box.take(2, 1)) == [2]  # the same round again
    assert numbers_of(opened(tmp_path).take(3, 1)) == [2]  # or the next one, from the state of round 1


def test_another_run_takes_over_what_was_not_learned(tmp_path: Path) -> None:
    box = opened(tmp_path)
    drop(tmp_path, "1.npz", 1)
    box.take(1, 0)
    box.learned(1)
    drop(tmp_path, "2.npz", 2)
    box.take(2, 1)
    assert numbers_of(opened(tmp_path, "other").take(1, 0)) == [2]
    assert names_in(tmp_path / "done") == [f"{RUN}-000001/1.npz"]


def test_an_inbox_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"inbox = .*file: cannot be used"):
        opened(tmp_path / "file")
