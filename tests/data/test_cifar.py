"""CIFAR-100: read, downloaded, and refused when damaged."""

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
def cifar_config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return DataConfig("cifar100", str(DATA_DIR), str(tmp_path_factory.mktemp("cifar-cache")))


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
    assert load_dataset(replace(cifar_config, num_classes=20)).num_classes == 20


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
        load_dataset(DataConfig("cifar100", str(tmp_path / "data"), str(tmp_path / "cache")))
    assert sorted((tmp_path / "data").iterdir()) == before


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have torchvision download a tiny archive of CIFAR-100's layout, from this machine."""
    inside = tmp_path / "offer" / "cifar-100-python"
    inside.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, rows in (("train", 200), ("test", 100)):
        entry = {"data": rng.integers(0, 256, (rows, 3072), np.uint8), "fine_labels": [i % 100 for i in range(rows)]}
        (inside / name).write_bytes(pickle.dumps(entry))
    (inside / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"c{i:02d}" for i in range(100)]}))
    archive = tmp_path / "offer" / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(inside, inside.name)
    md5 = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in (*inside.iterdir(), archive)}

    cifar100 = import_torchvision().datasets.CIFAR100
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=archive.parent))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(cifar100, "url", f"http://127.0.0.1:{server.server_port}/{archive.name}")
    monkeypatch.setattr(cifar100, "tgz_md5", md5[archive.name])
    monkeypatch.setattr(cifar100, "train_list", [["train", md5["train"]]])
    monkeypatch.setattr(cifar100, "test_list", [["test", md5["test"]]])
    monkeypatch.setattr(cifar100, "meta", cifar100.meta | {"md5": md5["meta"]})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("offered")
def test_absent_cifar_files_are_downloaded(tmp_path: Path) -> None:
    config = DataConfig("cifar100", str(tmp_path / "data"), str(tmp_path / "cache"))
    dataset = load_dataset(config)
    assert_consistent(dataset)
    assert dataset.images.shape == (300, 3, 32, 32) and dataset.class_names[7] == "c07"
    left = [path.name for path in (tmp_path / "data").iterdir() if not path.name.endswith(".lock")]
    assert left == ["cifar-100-python"]


def test_failed_download_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar100 = import_torchvision().datasets.CIFAR100
    monkeypatch.setattr(cifar100, "url", (tmp_path / "not-there.tar.gz").as_uri())
    config = DataConfig("cifar100", str(tmp_path / "data"), str(tmp_path / "cache"))
    with pytest.raises(DataError, match=f"^{tmp_path}/data/cifar-100-python: .*could not be downloaded"):
        load_dataset(config)
    assert not (tmp_path / "data" / "cifar-100-python").exists()


def test_download_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="could not be downloaded"):
        load_dataset(DataConfig("cifar100", str(tmp_path / "file" / "data"), str(tmp_path / "cache")))
