"""Data sets in Hugging Face's format: from a folder, by name, and what is said if they do not fit."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.made.datasets import assert_consistent
from support.tools import need_modules

from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import ConfigError, DataError, MissingDataError
from fedkace_flwr.sections import DataConfig

NAMES = ["ant", "bee", "cat"]


@pytest.fixture(scope="module")
def hf() -> Any:
    need_modules("datasets")
    import datasets

    datasets.disable_progress_bars()
    return datasets


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (12, 10 + i % 3, 3), np.uint8)) for i in range(count)]


def split(hf: Any, count: int, seed: int = 0, **columns: Any) -> Any:
    """Rows with the column ``picture`` and, unless others are given, the column ``kind`` of labels."""
    label = hf.ClassLabel(names=NAMES)
    given = columns or {"kind": ([i % 3 for i in range(count)], label)}
    kinds = {"note": hf.Value("string"), "picture": hf.Image(), **{name: kind for name, (_, kind) in given.items()}}
    values = {name: value for name, (value, _) in given.items()}
    rows = {"note": ["x"] * count, "picture": pictures(count, seed), **values}
    return hf.Dataset.from_dict(rows, features=hf.Features(kinds))


Save = Callable[..., DataConfig]


@pytest.fixture
def save(hf: Any, tmp_path: Path) -> Save:
    """Write splits to a folder, and return the configuration that reads it."""

    def write(**splits: Any) -> DataConfig:
        made = splits or {"train": split(hf, 9), "test": split(hf, 6, seed=1)}
        hf.DatasetDict(made).save_to_disk(tmp_path / "saved")
        return DataConfig("hub", str(tmp_path / "saved"), image_size=8)

    return write


def expected(images: list[Image.Image], size: int) -> np.ndarray:
    return np.stack([Framing.of_files(size).square(image) for image in images])


def test_a_saved_data_set_is_read_by_the_types_of_its_columns(save: Save) -> None:
    dataset = load_dataset(save())
    assert_consistent(dataset)
    assert dataset.class_names == ("ant", "bee", "cat") and dataset.train_size == 9
    np.testing.assert_array_equal(dataset.images[:9], expected(pictures(9), 8))
    np.testing.assert_array_equal(dataset.images[9:], expected(pictures(6, 1), 8))
    np.testing.assert_array_equal(dataset.labels, [i % 3 for i in range(9)] + [i % 3 for i in range(6)])


def test_the_prepared_copy_needs_no_package_until_the_files_change(
    save: Save, hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = save()
    load_dataset(config)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        load_dataset(config)
    hf.DatasetDict({"train": split(hf, 12), "test": split(hf, 3)}).save_to_disk(config.data_dir)
    assert load_dataset(config).train_size == 12


def test_a_missing_package_is_answered_with_the_command(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    config = save()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError) as caught:
        load_dataset(config)
    assert str(caught.value) == "dataset = 'hub': needs the extra `hub`: pip install 'fedkace-flwr[hub]'"


def test_columns_are_chosen_by_name_where_several_fit(hf: Any, save: Save) -> None:
    label, coarse = hf.ClassLabel(names=NAMES), hf.ClassLabel(names=["small", "large"])
    columns: dict[str, Any] = {"fine": ([0, 1, 2, 0, 1, 2], label), "coarse": ([0, 0, 1, 0, 0, 1], coarse)}
    config = save(train=split(hf, 6, **columns), test=split(hf, 6, **columns))
    with pytest.raises(ConfigError, match=r"^dataset, \?label=: .*split train has the columns .*fine \(ClassLabel\)"):
        load_dataset(config)
    assert load_dataset(replace(config, dataset="hub?label=coarse")).class_names == ("small", "large")
    assert load_dataset(replace(config, dataset="hub?label=fine&image=picture")).class_names == tuple(NAMES)
    with pytest.raises(
        ConfigError, match=r"^dataset, \?label=coarze: .* has the columns note \(Value\), picture \(Image\)"
    ):
        load_dataset(replace(config, dataset="hub?label=coarze"))
    with pytest.raises(ConfigError, match=r"^dataset, \?image=note: .*must name one of the kind Image"):
        load_dataset(replace(config, dataset="hub?label=fine&image=note"))


def test_a_column_of_images_is_named_unless_there_is_one(hf: Any, save: Save) -> None:
    two = split(hf, 3, second=(pictures(3), hf.Image()), kind=([0, 1, 2], hf.ClassLabel(names=NAMES)))
    with pytest.raises(ConfigError, match=r"^dataset, \?image=: .*second \(Image\).*; must name one of the kind Image"):
        load_dataset(save(train=two, test=two))
    none = split(hf, 3).remove_columns("picture")
    with pytest.raises(
        ConfigError, match=r"^dataset, \?image=: .*of the kind Image, which cast_column .* makes of files"
    ):
        load_dataset(save(train=none, test=none))


@pytest.mark.parametrize(
    ("kind", "labels", "names"), [("int64", [10, 9, 10, 2], ("2", "9", "10")), ("string", ["b", "a", "b", "c"], ("a", "b", "c"))]
)  # fmt: skip
def test_values_of_a_plain_column_are_the_classes(
    kind: str, labels: list[Any], names: tuple[str, ...], hf: Any, save: Save
) -> None:
    rows = split(hf, 4, word=(labels, hf.Value(kind)))
    config = replace(save(train=rows, test=rows), dataset="hub?label=word")
    dataset = load_dataset(config)
    assert dataset.class_names == names
    assert [dataset.class_names[label] for label in dataset.labels[:4]] == [str(label) for label in labels]


def test_num_classes_is_held_against_the_classes_found(save: Save) -> None:
    config = save()
    assert load_dataset(replace(config, num_classes=2)).class_names == ("ant", "bee")
    with pytest.raises(ConfigError, match=r"^num-classes = 4: data set hub has 3 classes$"):
        load_dataset(replace(config, num_classes=4))


def test_the_split_for_testing_is_the_usual_one_or_that_of_the_key(hf: Any, save: Save) -> None:
    config = save(train=split(hf, 3), extra=split(hf, 9), validation=split(hf, 6))
    assert len(load_dataset(config).labels) == 3 + 6
    assert len(load_dataset(replace(config, dataset="hub?test=extra")).labels) == 3 + 9
    with pytest.raises(
        DataError, match=r"has the splits train, extra, validation; must have train, and .* test \(\?test="
    ):
        load_dataset(replace(config, dataset="hub?test=test"))


def test_one_split_alone_is_split_by_class(hf: Any, save: Save, tmp_path: Path) -> None:
    """Whether it is a single Dataset or the only split of a DatasetDict."""
    split(hf, 12).save_to_disk(tmp_path / "single")
    alone = load_dataset(DataConfig("hub", str(tmp_path / "single"), image_size=8))
    assert_consistent(alone)
    np.testing.assert_array_equal(alone.images, expected(pictures(12), 8))
    assert [len(alone.test_ids(label)) for label in range(3)] == [1, 1, 1]
    config = save(everything=split(hf, 12))
    assert load_dataset(config).split_digest == alone.split_digest
    with pytest.raises(DataError, match=r"has the splits everything; must have train, and .* test \(\?test="):
        load_dataset(replace(config, dataset="hub?test=test"))


def test_hidden_labels_are_refused_by_row(hf: Any, save: Save) -> None:
    hidden = split(hf, 3, kind=([0, -1, 1], hf.ClassLabel(names=NAMES)))
    with pytest.raises(DataError, match=r"split test, row 1: label -1 is none of the 3 classes .* \?test= may name"):
        load_dataset(save(train=split(hf, 3), test=hidden))


def test_other_classes_for_testing_are_refused(hf: Any, save: Save) -> None:
    config = save(
        train=split(hf, 3, word=([1, 2, 3], hf.Value("int64"))), test=split(hf, 1, word=([4], hf.Value("int64")))
    )
    with pytest.raises(DataError, match="split test, row 0: label '4' is none of the 3 classes"):
        load_dataset(replace(config, dataset="hub?label=word"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GIF89a no picture of ours", "is not an image, or its format is not supported"),
        (b"\x89PNG\r\n\x1a\n cut", "is damaged"),
        (None, "it has no image"),
    ],
)
def test_a_bad_picture_is_named_by_split_and_row(content: bytes | None, reason: str, hf: Any, save: Save) -> None:
    good = io.BytesIO()
    pictures(1)[0].save(good, "PNG")
    cells = [{"bytes": good.getvalue(), "path": None}, None if content is None else {"bytes": content, "path": None}]
    kinds = hf.Features({"picture": hf.Image(), "kind": hf.ClassLabel(names=NAMES)})
    rows = hf.Dataset.from_dict({"picture": cells, "kind": [0, 1]}, features=kinds)
    config = save(train=split(hf, 3).select_columns(["picture", "kind"]), test=rows)
    with pytest.raises(DataError, match=rf"split test, row 1: the image in 'picture' cannot be used: .*{reason}"):
        load_dataset(config)


def test_folders_without_a_data_set_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        MissingDataError,
        match=rf"^{tmp_path}: holds no dataset_dict\.json or state\.json; data-dir should .*hub:OWNER/NAME",
    ):
        load_dataset(DataConfig("hub", str(tmp_path)))


@pytest.mark.parametrize(
    "damage",
    ["no json", "other splits", "no features", "arrow cut", "arrow missing"],
)
def test_a_damaged_folder_is_refused_in_one_line(damage: str, save: Save) -> None:
    config = save()
    folder = Path(config.data_dir)
    info, arrow = folder / "train" / "dataset_info.json", next((folder / "train").glob("*.arrow"))
    if damage == "no json":
        (folder / "dataset_dict.json").write_text("{")
    elif damage == "other splits":
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "nowhere"]}))
    elif damage == "no features":
        info.write_text(json.dumps(json.loads(info.read_text()) | {"features": {"picture": {"_type": "No\nsuch"}}}))
    elif damage == "arrow cut":
        arrow.write_bytes(arrow.read_bytes()[:300])
    else:
        arrow.unlink()
    with pytest.raises(DataError, match=f"^{folder}: cannot be opened with the package datasets") as caught:
        load_dataset(config)
    assert len(str(caught.value).splitlines()) == 1


def test_a_data_set_is_loaded_by_its_name(hf: Any, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package takes a folder of Parquet files in the working directory for a name, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "theirs")
    for name, count in (("train", 9), ("test", 6)):
        (tmp_path / "made" / "pictures" / "data").mkdir(parents=True, exist_ok=True)
        split(hf, count).to_parquet(tmp_path / "made" / "pictures" / "data" / f"{name}-0.parquet")
    config = DataConfig("hub:made/pictures")
    with pytest.raises(MissingDataError, match=r"^dataset = 'hub:made/pictures': is not on this machine; a run would"):
        load_dataset(config, download=False)
    dataset = load_dataset(config)
    assert_consistent(dataset)
    assert dataset.image_size == 32
    np.testing.assert_array_equal(dataset.images[:9], expected(pictures(9), 32))
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(load_dataset(config, download=False).labels, dataset.labels)


def test_a_name_that_cannot_be_reached_is_refused_in_one_line(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hf.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "theirs")
    with pytest.raises(DataError, match=r"^dataset = 'hub:nobody/nothing@v1': cannot be opened .*Couldn't reach"):
        load_dataset(DataConfig("hub:nobody/nothing@v1"))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["../up", "/etc", "a/b/c", "a b", "https://x.org/a", ".hidden", "a@", "./a"])
def test_what_is_no_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^dataset = 'hub:.*must be hub:OWNER/NAME"):
        load_dataset(DataConfig(f"hub:{name}"))
