"""Inboxes whose samples are tables or series: what is accepted, what is refused and why, and runs over them."""

import io
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.common import rounds_of
from support.made.arrays import NETWORK, SERIES, TABLE, write_arrays
from support.made.inboxes import CLASSES, names_in, opened

from fedkace_flwr.config import Config
from fedkace_flwr.data import inbox_files as arrivals
from fedkace_flwr.data.images import read_square
from fedkace_flwr.data.inbox import waiting
from fedkace_flwr.data.inbox_files import Arrival
from fedkace_flwr.errors import ConfigError, DataError
from fedkace_flwr.experiments.feed import feed
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.messaging import wire
from fedkace_flwr.samples import Form
from fedkace_flwr.storage.folders import OpenFolder

Make = Callable[..., Config]

ROW, WAVE = Form.array(2), Form.array(2, 3)
LABELS = np.array([0, 2])
ROWS = np.arange(4, dtype=np.float32).reshape(2, 2)


def write(path: Path, content: str | bytes | np.ndarray | dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        np.savez(path, **content)
    elif isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, form: Form = ROW, class_name: str | None = None) -> arrivals.Arrived:
    with OpenFolder.at(path.parent) as folder:
        arrival = Arrival(folder, path.name, class_name)
        found = arrivals.read(arrival, CLASSES, form, read_square)
        assert arrivals.count(arrival)[0] == len(found[1])
    return found


@pytest.mark.parametrize("form", [ROW, WAVE], ids=["table", "series"])
@pytest.mark.parametrize("labels", [LABELS, np.array(["a", "c"])], ids=["numbers", "names"])
def test_an_archive_holds_x_and_y(form: Form, labels: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(2, *form.shape)).astype(np.float32)
    samples, found = read(write(tmp_path / "a.npz", {"x": x, "y": labels}), form)
    assert samples.dtype == np.float32 and np.array_equal(samples, x) and found.tolist() == [0, 2]


def test_a_table_names_its_classes_in_the_column_label(tmp_path: Path) -> None:
    samples, labels = read(write(tmp_path / "a.csv", "x,label,z\n0,a,1\n2.0,c,3e0\n"))
    assert samples.dtype == np.float32 and np.array_equal(samples, ROWS) and labels.tolist() == [0, 2]


def test_an_array_lies_in_the_folder_of_its_class(tmp_path: Path) -> None:
    samples, labels = read(write(tmp_path / "a.npy", ROWS[1]), ROW, "b")
    assert np.array_equal(samples, ROWS[1:]) and labels.tolist() == [1]


BAD: dict[str, tuple[str, Any, str | None, str]] = {
    "float64": ("a.npz", {"x": ROWS.astype(float), "y": LABELS}, None, "is float64 of shape (2, 2); must be float32"),
    "another shape": ("a.npz", {"x": ROWS[:, :1], "y": LABELS}, None, "(2, 1); must be float32 of shape (2, 2)"),
    "not finite": ("a.npz", {"x": ROWS * np.float32("inf"), "y": LABELS}, None, "not finite"),
    "pictures": ("a.npz", {"images": ROWS, "labels": LABELS}, None, "no array 'x'"),
    "label": ("a.npz", {"x": ROWS, "y": LABELS + 1}, None, "label 3 is not one of the 3 agreed classes"),
    "columns": ("a.csv", "x,label\n1,a\n", None, "(1, 1); must be float32 of shape (1, 2)"),
    "no label": ("a.csv", "x,z\n1,2\n", None, "a column 'label'"),
    "class": ("a.csv", "x,z,label\n1,2,cow\n", None, "class 'cow' is not one of the 3"),
    "text": ("a.csv", "x,z,label\n1,two,a\n", None, "line 2 (could not convert string to float: 'two')"),
    "cells": ("a.csv", "x,z,label\n1,a\n", None, "line 2 has 2 cells; must have 3"),
    "nan": ("a.csv", "x,z,label\n1,nan,a\n", None, "column 'z': nan is not finite"),
    "empty": ("a.csv", "", None, "a column 'label'"),
    "a long line": ("a.csv", "x" * 2**20, None, "a line of 1048576 characters"),
    "an open quote": ("a.csv", 'x,z,label\n1,"2\n3",a\n', None, "a cell that goes over several lines"),
    "no text": ("a.csv", b"\xff\xfe\x00", None, "a.csv: damaged, or not"),
    "too many rows": ("a.csv", "x,z,label\n" + "1,2,a\n" * 100_001, None, "holds more than 100000 rows"),
    "parquet": ("a.parquet", b"PAR1", None, "must be an .npz with x and y, a table (.csv)"),
    "a shape": ("a.npy", ROWS, "b", "(2, 2); must be float32 of shape (2,)"),
    "objects": ("a.npy", np.array([None, 1]), "b", "damaged, or not an .npz"),
    "a picture": ("a.png", b"", "b", "must be an .npz with x and y"),
    "a table of one class": ("a.csv", "x,z\n1,2\n", "b", "must be an .npz with x and y"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", BAD)
def test_what_was_not_agreed_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    name, content, class_name, words = BAD[case]
    path = write(tmp_path / name, content)
    with OpenFolder.at(tmp_path) as folder, pytest.raises(DataError, match=rf"^{re.escape(name)}: ") as caught:
        arrivals.read(Arrival(folder, path.name, class_name), CLASSES, ROW, read_square)
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_each_kind_of_file_is_for_its_kind_of_samples_alone(tmp_path: Path) -> None:
    write(tmp_path / "new" / "a" / "1.npy", ROWS[0])
    write(tmp_path / "new" / "2.npz", {"x": ROWS, "y": LABELS})
    write(tmp_path / "new" / "3.csv", "x,z,label\n1,2,a\n")
    assert len(opened(tmp_path).take(1, 0)[1]) == 0  # of pictures
    assert len([each for each in names_in(tmp_path / "rejected") if each.endswith(".reason.txt")]) == 3


def test_arrays_wait_for_their_labels_and_are_then_learned_once(tmp_path: Path) -> None:
    for number in (0, 1):
        write(tmp_path / "new" / "unlabelled" / f"{number}.npy", ROWS[number])
    write(tmp_path / "new" / "unlabelled" / "table.csv", "x,z\n1,2\n")
    write(tmp_path / "new" / "unlabelled" / "wrong.npy", ROWS)
    box = opened(tmp_path, form=ROW)
    assert len(box.take(1, 0)[1]) == 0
    places, samples = box.read_unlabelled(["0.npy", "wrong.npy", "1.npy"])
    assert places == [0, 2] and np.array_equal(samples, ROWS)
    assert {"table.csv", "wrong.npy"} <= {*names_in(tmp_path / "rejected")}
    write(tmp_path / "new" / "labels.csv", "name,label\n1.npy,b\n")
    assert waiting(tmp_path, 10) == (1, [])
    samples, labels = box.take(2, 0)
    assert np.array_equal(samples, ROWS[1:]) and labels.tolist() == [1]
    box.learned(2)
    assert len(box.take(3, 2)[1]) == 0


def packed() -> list[tuple[str, str | None, bytes]]:
    archive, array = io.BytesIO(), io.BytesIO()
    np.savez(archive, x=ROWS, y=LABELS)
    np.save(array, ROWS[0])
    table = b'x,"z",label\n0,1,a\n2,3,c\n'
    return [("a.npz", None, archive.getvalue()), ("a.npy", "b", array.getvalue()), ("a.csv", None, table)]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(packed()), st.lists(st.tuples(st.integers(0, 600), st.binary(max_size=8), st.integers(0, 9))))
def test_no_bytes_do_anything_but_load_or_be_refused(
    tmp_path: Path, start: tuple[str, str | None, bytes], changes: list[tuple[int, bytes, int]]
) -> None:
    name, class_name, content = start
    for place, put, cut in changes:
        content = content[:place] + put + content[place + cut :]
    write(tmp_path / name, content)
    with OpenFolder.at(tmp_path) as folder:
        arrival = Arrival(folder, name, class_name)
        for parse in (lambda: arrivals.read(arrival, CLASSES, ROW, read_square), lambda: arrivals.count(arrival)):
            try:
                parse()
            except DataError as refused:
                assert "\n" not in str(refused)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TABLE, SERIES], ids=["table", "series"])
def test_a_run_over_inboxes_is_the_run_over_the_stream(shape: tuple[int, ...], small: Make, tmp_path: Path) -> None:
    shared = {"network": NETWORK[shape], "window": 2, "overlap": 1, "width": 8}
    stream = small(
        run_name="stream", dataset="arrays", data_dir=str(write_arrays(tmp_path / "arrays", shape)), **shared
    )
    run_inline(stream)
    said = list[str]()
    feed(stream, tmp_path / "data", tell=said.append)
    keys = {name.replace("-", "_"): value for name, value in tomllib.loads("\n".join(said[-3:])).items()}
    assert keys["class_names"] == "0, 1, 2, 3"
    run_inline(
        small(run_name="inbox", dataset="inbox", inbox_bound=16, **keys, **shared),
        node_config=lambda client: {
            wire.INBOX: str(tmp_path / "data" / f"client-{client}"),
            wire.TEST: str(tmp_path / "data" / f"client-{client}" / "test"),
        },
    )
    lines, wanted = rounds_of(tmp_path / "inbox"), rounds_of(tmp_path / "stream")
    for line in (*lines, *wanted):
        del line["bytes"]  # a device also says how many samples wait
    assert lines == wanted and len(lines) == 3


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"inbox-shape": "3, x"}, "inbox-shape = '3, x': must be whole numbers"),
        ({"inbox-shape": "0"}, "inbox-shape = '0': must be whole numbers above 0"),
        ({"inbox-shape": "9999, 9999"}, "inbox-shape = '9999, 9999': .*at most 16777216"),
        ({"inbox-shape": "3", "inbox-statistics": "0/1, 0/1"}, "inbox-statistics = '0/1, 0/1': .*must be 3 of"),
        ({"inbox-shape": "3", "inbox-statistics": "0/0"}, "inbox-statistics = '0/0': .*STD above 0"),
        ({"image-size": 8, "inbox-statistics": "0/1"}, "inbox-statistics = '0/1': .*inbox-shape"),
        ({}, "image-size = 0: .*inbox-shape"),
    ],
)
def test_what_is_agreed_is_checked(keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=f"^{fault}"):
        Config.parse({"dataset": "inbox", "class-names": "a, b", **keys})
