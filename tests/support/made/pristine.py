"""Files and messages as this package writes them, from which fuzzers start."""

import base64
import gzip
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

from fedkace_flwr.config import Config
from fedkace_flwr.data.images import Framing
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.inference.kept_models import KeptModels
from fedkace_flwr.inference.tensor_file import pack
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.folding import fold
from fedkace_flwr.messaging.metrics import Limits
from fedkace_flwr.networks.catalogue import seeded
from fedkace_flwr.networks.network import Blueprint, Network
from fedkace_flwr.storage import encryption
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints
from fedkace_flwr.storage.client_store import ClientStore
from support.made.datasets import idx
from support.made.stored import empty, learned, reply

NAMES = ("state-000002.npz", "answer-000002.npz", "checkpoint-000002.npz")
WEIGHTS: dict[str, np.ndarray] = {
    "conv.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bn.running_mean": np.array([0.25, 4.0], np.float32),
    "bn.running_var": np.array([0.5, 2.0], np.float32),
    "bn.num_batches_tracked": np.array(5, np.int64),
    "output.bias": np.array([0.5, -0.5, 0.0], np.float32),
}
SHAPES = wire.shapes_of(WEIGHTS)
LIMITS = Limits.of(Config(), SHAPES)
SECRET = bytes(range(32))
CLIENT = "client-000"
AGREED = ("cat", "dog", "sea lion")
SIDE = 4

CORPUS = [
    "title: x\nconfig: {dataset: digits, rounds: 2}\ngrid: {overlap: [0, 1], seed: [0, 1]}\n",
    "grid:\n  data:\n    a: {width: 16}\n    b: {width: 64}\nscales:\n  smoke: {config: {rounds: 2}, grid: {seed: [0]}}\n",
    "base: study.yaml\nconfig: {}\n",
    "engine: inline\nworkers: 2\ngpu-fraction: .25\npaper: table1\n",
]


def scratch() -> Path:
    """Return a folder in memory if possible, because millions of inputs are written."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="fedkace-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))


def pristine() -> dict[str, bytes]:
    """Return archives as this package writes them, without checksums."""
    folder = scratch()
    store = ClientStore(folder, empty())
    for number in (1, 2):
        store.save_trained(learned(number), reply(number))
    weights = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    Checkpoints(folder).save(Checkpoint(2, "1", weights, {"0.x": np.arange(3)}, {"partition": [[0, 1]]}))
    content = {name: (folder / name).read_bytes()[32:] for name in NAMES}
    shutil.rmtree(folder)
    return content


@contextmanager
def with_key() -> Iterator[None]:
    """Set a key in the environment."""
    os.environ[encryption.VARIABLE] = base64.b64encode(SECRET).decode()
    try:
        yield
    finally:
        del os.environ[encryption.VARIABLE]


def pristine_sealed() -> list[bytes]:
    """Return encrypted files as this package writes them, without mark and checksum."""
    root = scratch()
    folder = root / CLIENT
    with with_key():
        store = ClientStore(folder, empty())
        for number in (1, 2):
            store.save_trained(learned(number), reply(number))
    content = [(folder / name).read_bytes()[48:] for name in ("state-000002.npz", "answer-000002.npz")]
    shutil.rmtree(root)
    return content


def dropped() -> dict[str, bytes]:
    """Return files as a device puts them into an inbox: images, and archives of all layouts and kinds of labels."""
    files = {}
    for name, shape, labels in (
        ("last", (2, SIDE, SIDE, 3), np.array([0, 2])),
        ("first", (2, 3, SIDE, SIDE), np.array(["dog", "sea lion"])),
        ("grey", (1, SIDE, SIDE), np.array([1], np.uint8)),
    ):
        packed = io.BytesIO()
        np.savez(packed, images=np.full(shape, 7, np.uint8), labels=labels)
        files[name] = packed.getvalue()
    for kind in ("PNG", "JPEG", "BMP", "WEBP"):
        packed = io.BytesIO()
        Image.new("RGB", (SIDE + 3, SIDE + 1), (9, 80, 200)).save(packed, kind)
        files[kind.lower()] = packed.getvalue()
    return files


def folded_weights() -> bytes:
    """Return a model's arrays as they are sent between machines."""
    (array,) = fold(wire.array_record(WEIGHTS)).values()
    return array.data


def pristine_idx() -> dict[str, list[bytes]]:
    """Return idx files of images and of labels by their suffix."""
    plain = [idx(np.arange(24).reshape(2, 3, 4)), idx(np.arange(5))]
    return {"": plain, ".gz": [gzip.compress(content) for content in plain]}


def sealed(body: bytes) -> bytes:
    return hashlib.sha256(body).digest() + body


class _OneLayer(Network):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1))
        self.output = torch.nn.Linear(2, 2)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.body(x))


NETWORK = _OneLayer()


def pristine_weights() -> dict[str, bytes]:
    """Return files of weights by their suffix."""
    weights, file = NETWORK.state_dict(), io.BytesIO()
    torch.save(weights, file)
    return {".pth": file.getvalue(), ".safetensors": save(weights)}


def pristine_model() -> bytes:
    """Return the file of a small model that was taken away."""
    net = seeded("cnn", Blueprint(2, 4, 1), 0)
    kept = KeptModels(
        {"global": as_arrays(net.state_dict())},
        {"global": (0, 1)},
        method="fedkace",
        run="",
        round=3,
        trained=3,
        switched_at=None,
        seen=(0, 1),
        class_names=("cat", "dog"),
        framing=Framing.of_arrays(4),
        mean=(0.5,) * 3,
        std=(0.2,) * 3,
        network="cnn",
        width=1,
        stem="auto",
        precision="float32",
    )
    return pack(kept)
