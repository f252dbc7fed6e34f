"""Client states to store, their files, and how to compare them."""

import base64
import hashlib
import io
import json
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkace_flwr.samples import Form, Samples
from fedkace_flwr.storage import atomic
from fedkace_flwr.storage.client_state import VERSION, Answer, ClientState
from fedkace_flwr.storage.client_store import ClientStore

CLASSES = 5
_DIGEST = 32


def new_key() -> str:
    """Return a key as it is written into the environment."""
    return base64.b64encode(secrets.token_bytes(32)).decode()


def empty(classes: int = CLASSES, pixels_of: tuple[int, int, int] | None = None) -> ClientState:
    return ClientState(
        seen=torch.zeros(classes, dtype=torch.bool),
        buffer=Samples.none(Form(np.dtype(np.uint8), pixels_of) if pixels_of else None),
    )


def learned(round_number: int, pixels: bool = False, size: int = 4) -> ClientState:
    """Return a state with all fields set, different in each round."""
    generator = torch.Generator().manual_seed(round_number)
    content = (
        torch.randint(0, 256, (size, 3, 4, 4), dtype=torch.uint8, generator=generator)
        if pixels
        else torch.randint(0, 10**12, (size,), generator=generator)
    )
    labels = torch.randint(0, CLASSES, (size,), generator=generator)
    return ClientState(
        seen=torch.arange(CLASSES) < min(round_number, CLASSES),
        buffer=Samples(content, labels, torch.randint(1, round_number + 1, (size,), generator=generator)),
        round=round_number,
        global_since=round_number,
        local_accuracy=0.1 + round_number / 7,
        local_class_accuracy=[round_number / 7, -1.0],
        evaluated=round_number,
        evaluation={"accuracy": 2 / 3, "num-examples": 9, "list": [1, 2.5]},
        extra={
            "anchor.weight": torch.randn(2, 3, generator=generator),
            "steps": torch.tensor(round_number),
            "mask": torch.tensor([True, False]),
            "numbers": torch.tensor([0.1 * round_number, 1 / 3, -0.0], dtype=torch.float64),
        },
    )


def reply(round_number: int) -> Answer:
    generator = np.random.default_rng(round_number)
    arrays: dict[str, np.ndarray] = {
        "z.weight": generator.standard_normal((3, 2)).astype(np.float32),
        "a.bias": np.array([np.nan, -0.0, np.inf, 1e-45], dtype=np.float32),
        "a.steps": np.array(round_number, dtype=np.int64),
        "nothing": np.empty((0, 3), dtype=np.float64),
    }
    return Answer(arrays, 10 + round_number, {"buffer-size": 3, "weights": [0.1, 1 / 3], "seconds": 1e-17})


def train(store: ClientStore, *rounds: int) -> None:
    for number in rounds:
        store.save_trained(learned(number), reply(number))


def of_run(run: str, number: int = 0, client: int | None = 3) -> ClientState:
    return replace(learned(number) if number else empty(), run=run, client=client)


def trained(folder: Path, run: str, *rounds: int, client: int | None = 3) -> None:
    """Store rounds of a run, each with a new store object."""
    for number in rounds:
        ClientStore(folder, of_run(run, client=client)).save_trained(of_run(run, number, client), reply(number))


def sealed(body: bytes) -> bytes:
    """Return a file's content with a correct checksum."""
    return hashlib.sha256(body).digest() + body


def is_sealed(path: Path) -> bool:
    """Whether a file is encrypted, by its first bytes."""
    return path.read_bytes().startswith(b"\x89FEDKACE-SEALED\n")


def body_of(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a file's arrays and record without this project's code."""
    content = path.read_bytes()
    assert hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]
    with np.load(io.BytesIO(content[_DIGEST:]), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    return arrays, json.loads(arrays.pop("record").tobytes())


def put(path: Path, arrays: dict[str, np.ndarray], record: dict[str, Any]) -> None:
    """Write a file with a correct checksum, without this project's code."""
    packed = io.BytesIO()
    members: dict[str, Any] = {"record": np.frombuffer(json.dumps(record).encode(), dtype=np.uint8), **arrays}
    np.savez(packed, **members)
    path.write_bytes(sealed(packed.getvalue()))


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray], dict[str, Any]], None]) -> None:
    """Change a file's content."""
    arrays, record = body_of(path)
    change(arrays, record)
    put(path, arrays, record)


def names(folder: Path) -> list[str]:
    """Return the files in a folder, except the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def same_tensor(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


def assert_same(state: ClientState, other: ClientState) -> None:
    plain = ("round", "global_since", "local_accuracy", "local_class_accuracy", "evaluated", "evaluation")
    assert {name: getattr(state, name) for name in plain} == {name: getattr(other, name) for name in plain}
    assert same_tensor(state.seen, other.seen)
    for column in ("content", "labels", "rounds"):
        assert same_tensor(getattr(state.buffer, column), getattr(other.buffer, column)), column
    assert set(state.extra) == set(other.extra)
    assert all(same_tensor(state.extra[name], other.extra[name]) for name in state.extra)


def assert_bit_identical(answer: Answer | None, other: Answer) -> None:
    assert answer is not None
    assert list(answer.arrays) == list(other.arrays)  # in the model's order
    for name, array in other.arrays.items():
        got = answer.arrays[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), name
    assert (answer.examples, answer.metrics) == (other.examples, other.metrics)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the store's warnings, wherever its log goes."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.levelno == logging.WARNING
            lines.append(record.getMessage())

    ear, logger = Ear(), logging.getLogger("fedkace_flwr.storage.client_store")
    logger.addHandler(ear)
    try:
        yield lines
    finally:
        logger.removeHandler(ear)


def read_state(path: Path) -> ClientState:
    """Read a stored state and leave the file alone."""
    state: ClientState | None = atomic.read(path, VERSION, ClientState.from_record)
    assert state is not None, path
    return state
