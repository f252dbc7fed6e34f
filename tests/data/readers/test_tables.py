"""Tables in text and in Parquet's format."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.made.arrays import TABLE, arrays
from support.tools import need_modules

from fedkace_flwr.data.datasets import Dataset, load_dataset
from fedkace_flwr.errors import FedkaceError
from fedkace_flwr.samples import Form
from fedkace_flwr.sections import DataConfig

NAMES = ["pear", "apple", "fig", "10"]
HEAD = ["a", "b", "kind", "c", "d", "e"]


def rows(part: str) -> list[list[Any]]:
    content = arrays(TABLE)
    pairs = zip(content[f"x_{part}"].tolist(), content[f"y_{part}"].tolist(), strict=True)
    return [[*x[:2], NAMES[y], *x[2:]] for x, y in pairs]


def write(path: Path, rows: list[list[Any]], head: list[str] = HEAD) -> None:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([head, *rows])
        return
    need_modules("pyarrow")
    import pyarrow
    import pyarrow.parquet

    columns = dict(zip(head, map(list, zip(*rows, strict=True)), strict=True))
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def loaded(folder: Path, label: str = "?label=kind") -> Dataset:
    return load_dataset(DataConfig(f"arrays{label}", str(folder)))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_numbers_are_features_and_labels_name_the_classes(tmp_path: Path, suffix: str) -> None:
    for part in ("train", "test"):
        write(tmp_path / f"{part}{suffix}", rows(part))
    dataset, content = loaded(tmp_path), arrays(TABLE)
    assert dataset.form == Form.array(5) and dataset.class_names == ("10", "apple", "fig", "pear")
    np.testing.assert_array_equal(dataset.images, np.concatenate([content["x_train"], content["x_test"]]))
    labels = [NAMES[label] for label in (*content["y_train"], *content["y_test"])]
    assert [dataset.class_names[label] for label in dataset.labels] == labels
    assert dataset.train_size == len(content["y_train"])


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize(
    ("part", "cell", "value", "fault"),
    [
        ("test", 4, None, r"test\.\w+: (line 2 .*''|column 'd' holds 1 empty cells).*must"),
        ("train", 0, float("nan"), r"train\.\w+: row 1, column 'a': nan is not finite"),
        ("train", 1, 1e300, r"train\.\w+: row 1, column 'b': 1e\+300 is not finite in float32"),
        ("test", 2, "kiwi", r"test\.\w+: column 'kind' holds 'kiwi', which train\.\w+ does not"),
        ("train", 2, None, r"train\.\w+: row 1 has no label"),
        ("train", 2, "", r"train\.\w+: row 1 has no label"),
    ],
)
def test_what_is_wrong_is_told_by_file_row_and_column(
    tmp_path: Path, suffix: str, part: str, cell: int, value: Any, fault: str
) -> None:
    for each in ("train", "test"):
        content = rows(each)
        if each == part:
            content[0][cell] = value
        write(tmp_path / f"{each}{suffix}", content)
    with pytest.raises(FedkaceError, match=rf"^{tmp_path}/{fault}") as told:
        loaded(tmp_path)
    assert "\n" not in str(told.value)


def test_columns_must_have_names_and_be_the_same_ones(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write(tmp_path / f"{part}.csv", rows(part))
    with pytest.raises(FedkaceError, match=r"train\.csv: has 6 columns, .*a column 'label' of labels .*label=COLUMN"):
        loaded(tmp_path, "")
    with pytest.raises(FedkaceError, match=r"^dataset = 'arrays\?test=x': must be 'arrays' or"):
        loaded(tmp_path, "?test=x")
    write(tmp_path / "test.csv", rows("test"), ["b", "a", *HEAD[2:]])
    with pytest.raises(FedkaceError, match=r"test\.csv: has other columns than train\.csv"):
        loaded(tmp_path)
    write(tmp_path / "test.csv", [["x", *row[1:]] for row in rows("test")])
    with pytest.raises(FedkaceError, match=r"test\.csv: line 2 \(could not convert .*'x'\); must be numbers"):
        loaded(tmp_path)
    write(tmp_path / "test.csv", [row[1:] for row in rows("test")])
    with pytest.raises(FedkaceError, match=r"test\.csv: line 2 has 5 cells; must have 6"):
        loaded(tmp_path)


@pytest.mark.parametrize(("suffix", "index"), [(".csv", ""), (".parquet", "__index_level_0__")])
def test_the_row_index_that_pandas_adds_is_no_feature(tmp_path: Path, suffix: str, index: str) -> None:
    """Of rows sorted by class, it would give the label away."""
    table = [[number, *row] for number, row in enumerate(rows("train"))]
    write(tmp_path / f"train{suffix}", table, [index, *HEAD])
    with pytest.raises(FedkaceError, match=rf"train{suffix}: column '{index}' is the row index .*index=False"):
        loaded(tmp_path)


def test_a_class_may_be_called_none_and_a_number_that_is_missing_is_no_class(tmp_path: Path) -> None:
    write(
        tmp_path / "train.csv", [[*row[:2], "None" if row[2] == "fig" else row[2], *row[3:]] for row in rows("train")]
    )
    assert "None" in loaded(tmp_path).class_names
    (tmp_path / "train.csv").unlink()
    content = [[*row[:2], float(NAMES.index(row[2])), *row[3:]] for row in rows("train")]
    content[3][2] = float("nan")
    write(tmp_path / "train.parquet", content)
    with pytest.raises(FedkaceError, match=r"train\.parquet: row 4 has no label"):
        loaded(tmp_path)


@pytest.mark.parametrize(("name", "others"), [("train.csv", len(rows("test"))), ("fruit.csv", 0)])
def test_the_file_of_a_table_can_be_named_itself(tmp_path: Path, name: str, others: int) -> None:
    write(tmp_path / name, rows("train"))
    write(tmp_path / "test.csv", rows("test"))
    dataset = load_dataset(DataConfig("arrays?label=kind", str(tmp_path / name)))
    assert len(dataset.labels) == len(rows("train")) + others


def test_rows_for_training_alone_are_split(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", rows("train"))
    dataset = loaded(tmp_path)
    counts = [(len(dataset.train_ids(label)), len(dataset.test_ids(label))) for label in range(dataset.num_classes)]
    assert all(test == round(0.2 * (train + test)) for train, test in counts)
    chosen = dataset.images[~dataset.held_out].astype(np.float64)
    np.testing.assert_allclose(dataset.mean, chosen.mean(axis=0), atol=1e-7)
