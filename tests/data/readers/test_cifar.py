"""CIFAR-10 and CIFAR-100: read, downloaded, and refused when damaged."""

import hashlib
import pickle
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from support.made.datasets import (
    DATA_DIR,
    assert_consistent,
    needs,
)

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.errors import DataError
from fedkace_flwr.sections import DataConfig


@pytest.fixture(scope="module")
def cifar_config() -> DataConfig:
    return DataConfig("cifar100", str(DATA_DIR))


@pytest.mark.slow
@needs("cifar-100-python")
def test_real_cifar100(cifar_config: DataConfig) -> None:
    dataset = load_dataset(cifar_config)
    assert dataset.images.shape == (60_000, 3, 32, 32) and dataset.train_size == 50_000
    assert dataset.class_names[0] == "apple" and dataset.class_names[99] == "worm"
    assert {(len(dataset.train_ids(c)), len(dataset.test_ids(c))) for c in range(100)} == {(500, 100)}
    np.testing.assert_allclose(dataset.mean, (0.5071, 0.4865, 0.4409), atol=1e-4)  # as commonly published
    np.testing.assert_allclose(dataset.std, (0.2673, 0.2564, 0.2762), atol=1e-4)
    with (DATA_DIR / "cifar-100-python" / "test").open("rb") as file:
        raw = pickle.load(file, encoding="latin1")
    np.testing.assert_array_equal(dataset.images[50_000:].reshape(10_000, -1), raw["data"])
    np.testing.assert_array_equal(dataset.labels[50_000:], raw["fine_labels"])
    part = load_dataset(replace(cifar_config, num_classes=20, first_class=60))
    assert part.class_names == dataset.class_names[60:80]
    for label in range(20):
        np.testing.assert_array_equal(part.train_ids(label), dataset.train_ids(60 + label))
        np.testing.assert_array_equal(part.test_ids(label), dataset.test_ids(60 + label))


@needs("cifar-100-python")
@pytest.mark.parametrize("damage", ["train cut", "train garbled", "meta missing"])
def test_damaged_cifar_files_are_reported(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar-100-python"
    folder.mkdir(parents=True)
    for name in ("train", "test", "meta"):
        (folder / name).symlink_to(DATA_DIR / "cifar-100-python" / name)
    if damage == "meta missing":
        (folder / "meta").unlink()
    else:
        content = bytearray((folder / "train").read_bytes()[:1_000_000])
        content[5000] ^= 255
        (folder / "train").unlink()
        (folder / "train").write_bytes(content if damage == "train garbled" else content[:400_000])
    before = sorted((tmp_path / "data").iterdir())
    with pytest.raises(DataError, match=f"^{folder}: .*train, test and meta"):
        load_dataset(DataConfig("cifar100", str(tmp_path / "data")))
    assert sorted((tmp_path / "data").iterdir()) == before


BATCHES = {
    "cifar10": (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    "cifar100": ("train", "test"),
}
FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


def imitate(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a tiny data set in the official layout, and have torchvision take its checksums for the official ones."""
    inside, classes = folder / FOLDERS[name], {"cifar10": 10, "cifar100": 100}[name]
    inside.mkdir(parents=True)
    rng = np.random.default_rng(0)
    labels = "labels" if name == "cifar10" else "fine_labels"
    for batch in BATCHES[name]:
        rows = 2 * classes if batch == "train" else classes
        entry = {"data": rng.integers(0, 256, (rows, 3072), np.uint8), labels: [i % classes for i in range(rows)]}
        (inside / batch).write_bytes(pickle.dumps(entry))
    theirs = getattr(import_torchvision().datasets, name.upper())
    (inside / theirs.meta["filename"]).write_bytes(
        pickle.dumps({theirs.meta["key"]: [f"c{i:02d}" for i in range(classes)]})
    )
    md5 = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in inside.iterdir()}
    *train, test = BATCHES[name]
    monkeypatch.setattr(theirs, "train_list", [[batch, md5[batch]] for batch in train])
    monkeypatch.setattr(theirs, "test_list", [[test, md5[test]]])
    monkeypatch.setattr(theirs, "meta", theirs.meta | {"md5": md5[theirs.meta["filename"]]})
    return inside


@pytest.fixture(params=sorted(FOLDERS))
def offered(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have torchvision download a tiny archive of a data set's layout, from this machine; the data set's name."""
    name = request.param
    inside = imitate(name, tmp_path / "offer", monkeypatch)
    archive = tmp_path / "offer" / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(inside, inside.name)
    theirs = getattr(import_torchvision().datasets, name.upper())
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=archive.parent))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(theirs, "url", f"http://127.0.0.1:{server.server_port}/{archive.name}")
    monkeypatch.setattr(theirs, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield name
    server.shutdown()
    server.server_close()


def test_absent_cifar_files_are_downloaded(offered: str, tmp_path: Path) -> None:
    config = DataConfig(offered, str(tmp_path / "data"))
    dataset = load_dataset(config)
    assert_consistent(dataset)
    rows, classes = {"cifar10": (60, 10), "cifar100": (300, 100)}[offered]
    assert dataset.images.shape == (rows, 3, 32, 32)
    assert dataset.class_names == tuple(f"c{i:02d}" for i in range(classes))
    left = [path.name for path in (tmp_path / "data").iterdir() if not path.name.endswith(".lock")]
    assert left == [FOLDERS[offered]]


def test_cifar10_takes_its_five_batches_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = imitate("cifar10", tmp_path / "data", monkeypatch)
    dataset = load_dataset(DataConfig("cifar10", str(tmp_path / "data")))
    assert_consistent(dataset)
    raw = [pickle.loads((inside / batch).read_bytes()) for batch in BATCHES["cifar10"]]
    assert dataset.train_size == 50 and dataset.num_classes == 10
    np.testing.assert_array_equal(dataset.images.reshape(60, 3072), np.concatenate([batch["data"] for batch in raw]))
    np.testing.assert_array_equal(dataset.labels, np.concatenate([batch["labels"] for batch in raw]))


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_other_cifar10_files_than_the_official_ones_are_not_unpickled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = imitate("cifar10", tmp_path / "data", monkeypatch)
    (inside / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(DataError, match=rf"^{inside}: .*data_batch_5, test_batch and batches\.meta, but one"):
        load_dataset(DataConfig("cifar10", str(tmp_path / "data")))
    assert not (tmp_path / "sprung").exists()


def test_a_missing_cifar10_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = imitate("cifar10", tmp_path / "data", monkeypatch)
    (inside / "data_batch_4").unlink()
    with pytest.raises(DataError, match=rf"^{inside}: should hold the official CIFAR-10 files.*{inside}/data_batch_4"):
        load_dataset(DataConfig("cifar10", str(tmp_path / "data")))


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_failed_download_names_the_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = getattr(import_torchvision().datasets, name.upper())
    monkeypatch.setattr(theirs, "url", (tmp_path / "not-there.tar.gz").as_uri())
    config = DataConfig(name, str(tmp_path / "data"))
    with pytest.raises(DataError, match=f"^{tmp_path}/data/{FOLDERS[name]}: .*could not be downloaded"):
        load_dataset(config)
    assert not (tmp_path / "data" / FOLDERS[name]).exists()


def test_download_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="could not be downloaded"):
        load_dataset(DataConfig("cifar100", str(tmp_path / "file" / "data")))
