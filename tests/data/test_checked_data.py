"""What a reader gives, of this package or another's, is checked once, before any of it is stored."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.made.datasets import cache_folder

from fedkace_flwr.data.datasets import CACHE, load_dataset
from fedkace_flwr.data.readers import Content, Origin, Source
from fedkace_flwr.data.readers.catalogue import DATASETS
from fedkace_flwr.errors import DataError, FedkaceError
from fedkace_flwr.sections import DataConfig

GOOD = np.random.default_rng(0).integers(0, 256, (6, 3, 8, 8), np.uint8)
LABELS = np.array([0, 1, 0, 1, 0, 1])


def failing() -> Iterator[np.ndarray]:
    yield GOOD[:2]
    raise OSError(2, "No such file or directory", "theirs.bin")


def endless() -> Iterator[np.ndarray]:
    while True:
        yield GOOD


def prepare(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> DataConfig:
    """A data set of another package, with one thing wrong."""
    given = {"class_names": ("a", "b"), "labels": LABELS, "train_size": 4, "blocks": GOOD, **changes}
    fingerprint = given.pop("fingerprint", "1")
    given["blocks"] = iter([given["blocks"]]) if isinstance(given["blocks"], np.ndarray) else given["blocks"]
    source = Source(2, 8, lambda config, size: Origin(fingerprint, lambda: Content(**given)))
    monkeypatch.setitem(DATASETS, "theirs", source)
    monkeypatch.setenv(CACHE, str(folder / "cache"))
    return DataConfig("theirs")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"blocks": GOOD.astype(np.int64)}, r"int64 of shape \(6, 3, 8, 8\); must be uint8 of shape \(n, 3, 8, 8\)"),
        ({"blocks": np.concatenate([GOOD] * 3, axis=1)}, r"shape \(6, 9, 8, 8\); must be .*\(n, 3, 8, 8\)"),
        ({"blocks": iter([GOOD.tolist()])}, r"a list; must be uint8 of shape"),
        ({"blocks": iter([GOOD[:3], GOOD[:3, :, :4, :4]])}, r"shape \(3, 3, 4, 4\); must be"),
        ({"blocks": GOOD[:4]}, r"4 samples for 6 labels"),
        ({"blocks": endless()}, r"more than 6 samples for 6 labels"),
        ({"blocks": failing()}, r"theirs\.bin"),
        ({"labels": LABELS - 1}, r"labels -1 to 0; must be 0 to 1"),
        ({"labels": LABELS.astype(np.float64)}, r"labels are float64 of shape \(6,\); must be int64 of shape \(N,\)"),
        ({"labels": LABELS[:, None]}, r"labels are int64 of shape \(6, 1\)"),
        ({"labels": LABELS[:0]}, r"train_size = 4 of 0 samples"),
        ({"train_size": 0}, r"train_size = 0 of 6 samples; some must be for training"),
        ({"train_size": 7}, r"train_size = 7 of 6 samples"),
        ({"train_size": 4.0}, r"train_size = 4\.0"),
        ({"class_names": ("a", "a")}, r"class names \('a', 'a'\); must be different texts"),
        ({"class_names": "ab"}, r"class names 'ab'"),
        ({"fingerprint": "../up"}, r"fingerprint '\.\./up'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_in_one_line_and_nothing_is_kept(
    changes: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = prepare(monkeypatch, tmp_path, **changes)
    with pytest.raises(DataError, match=f"^dataset = 'theirs': .*{fault}"):
        load_dataset(config)
    assert not [path for path in (tmp_path / "cache").glob("*") if path.is_dir()]


@pytest.mark.parametrize(
    "source",
    [
        Source(2, 8, lambda config, size: 1 / 0),  # type: ignore[arg-type, return-value]
        Source(2, 8, lambda config, size: "no origin"),  # type: ignore[arg-type, return-value]
        Source(2, 8, lambda config, size: Origin("1", lambda: 1 / 0)),  # type: ignore[arg-type, return-value]
        Source(2, 8, lambda config, size: Origin("1", lambda: None)),  # type: ignore[arg-type, return-value]
        Source(2, 8, lambda config, size: Origin("1", lambda: Content(("a", "b"), LABELS, 4, None))),  # type: ignore[arg-type]
    ],
)
def test_code_of_another_package_that_fails_is_told_in_one_line(
    source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(DATASETS, "theirs", source)
    with pytest.raises(FedkaceError, match=r"^dataset = 'theirs': "):
        load_dataset(DataConfig("theirs"))


def test_a_copy_that_an_earlier_version_made_of_unfit_images_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Raw bytes of another type under a header of uint8, or images of another size than was asked for."""
    config = prepare(monkeypatch, tmp_path)
    good = np.array(load_dataset(config).images)
    folder = cache_folder(tmp_path / "cache")
    whole = (folder / "images.npy").read_bytes()
    for images, shape in ((whole + bytes(100), [6, 3, 8, 8]), (None, [6, 3, 4, 4])):
        if images is None:
            np.save(folder / "images.npy", GOOD[:, :, :4, :4])
        else:
            (folder / "images.npy").write_bytes(images)
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps({**meta, "shape": shape}))
        config = prepare(monkeypatch, tmp_path)
        np.testing.assert_array_equal(load_dataset(config).images, good)


def test_the_digest_is_that_of_the_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not of the place; and a copy of an earlier version, which has none, gets the same one."""

    def digest(place: str, **changes: Any) -> str:
        return load_dataset(prepare(monkeypatch, tmp_path / place, **changes)).digest

    first = digest("a")
    assert digest("b", blocks=iter([GOOD[:1], GOOD[1:]])) == first
    others = [
        digest("c", blocks=255 - GOOD),
        digest("d", labels=LABELS[::-1].copy()),
        digest("e", train_size=3),
        digest("f", class_names=("a", "c")),
    ]
    assert len({first, *others}) == 5 and len(first) == 64
    path = cache_folder(tmp_path / "a" / "cache") / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in meta.items() if key != "digest"}))
    assert digest("a") == first and json.loads(path.read_text()) == meta


ARRAYS = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 2, 4)


def not_finite() -> np.ndarray:
    values = ARRAYS.copy()
    values[3, 1, 2] = np.inf
    return values


@pytest.mark.parametrize(
    ("shape", "blocks", "fault"),
    [
        ((2, 4), ARRAYS.astype(np.float64), r"float64 of shape \(2, 2, 4\); must be float32 of shape \(n, 2, 4\)"),
        ((2, 4), ARRAYS[:, :, :3], r"float32 of shape \(2, 2, 3\); must be"),
        ((2, 4), not_finite(), "sample 3 holds a value that is not finite"),
        ((), ARRAYS, r"gives the shape \(\); must be the lengths of an array"),
        ((2, 0), ARRAYS, r"gives the shape \(2, 0\)"),
    ],
    ids=range(5),
)
def test_arrays_of_another_package_are_checked_as_well(
    shape: tuple[int, ...], blocks: np.ndarray, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def source(blocks: np.ndarray, shape: tuple[int, ...], fingerprint: str) -> Source:
        content = Content(("a", "b"), LABELS, 4, iter([blocks[:2], blocks[2:]]))
        return Source(2, 0, lambda config, size: Origin(fingerprint, lambda: content, shape=shape))

    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setitem(DATASETS, "theirs", source(blocks, shape, "1"))
    with pytest.raises(DataError, match=f"^dataset = 'theirs': .*{fault}"):
        load_dataset(DataConfig("theirs"))
    monkeypatch.setitem(DATASETS, "theirs", source(ARRAYS, (2, 4), "2"))
    np.testing.assert_array_equal(load_dataset(DataConfig("theirs")).images, ARRAYS)
