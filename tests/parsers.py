"""Everything here that reads what others write, each as a function that takes bytes and lets only its own errors out.

Used by ``test_fuzz.py`` (hypothesis, at a small budget) and ``fuzz/coverage_guided.py`` (atheris).
"""

import hashlib
import io
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from test_store import CLASSES, empty, learned, reply

from experiments.study import load_study, parse_setting
from fedkace_flwr import archive, durable
from fedkace_flwr.checkpoint import Checkpoint, Checkpoints
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, RunError, StateError
from fedkace_flwr.store import Answer, ClientState, ClientStore, read_state

NAMES = ("state-000002.npz", "answer-000002.npz", "checkpoint-000002.npz")


def scratch() -> Path:
    """A folder in memory if there is one: millions of inputs are written."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="fedkace-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))


def pristine() -> dict[str, bytes]:
    """Archives as this package writes them, without their checksums."""
    folder = scratch()
    store = ClientStore(folder, empty())
    for number in (1, 2):
        store.save_trained(learned(number), reply(number))
    weights = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    Checkpoints(folder).save(Checkpoint(2, "1", weights, {"0.x": np.arange(3)}, {"partition": [[0, 1]]}))
    content = {name: (folder / name).read_bytes()[32:] for name in NAMES}
    shutil.rmtree(folder)
    return content


def sealed(body: bytes) -> bytes:
    return hashlib.sha256(body).digest() + body


class Parsers:
    """Reads files of any content from a folder of its own."""

    def __init__(self) -> None:
        self.folder = scratch()

    def close(self) -> None:
        self._clear()
        self.folder.rmdir()

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def stored(self, content: bytes) -> None:
        """As every file that is read, and from outside."""
        for name in NAMES:
            (self.folder / name).write_bytes(content)
        for reader in (durable.read, durable.read_record):
            try:
                reader(self.folder / NAMES[0])
            except StateError as error:
                _assert_line(error)
        try:
            found = read_state(self.folder / NAMES[0])
            assert isinstance(found, ClientState)
        except StateError as error:
            _assert_line(error)
        store = ClientStore(self.folder, empty())
        try:
            answer = store.answer(2)
            assert answer is None or (isinstance(answer, Answer) and answer.examples >= 0)
        except StateError as error:
            _assert_line(error)
        try:
            state = store.before(3)
            assert len(state.seen) == CLASSES and len(state.buffer.content) == len(state.buffer.labels)
            assert torch.is_tensor(state.buffer.class_counts(CLASSES))
        except StateError as error:
            _assert_line(error)
        try:
            checkpoint = Checkpoints(self.folder).newest()
            assert checkpoint is None or checkpoint.round == 2
        except RunError as error:
            _assert_line(error)
        self._clear()

    def archived(self, body: bytes) -> None:
        """The parser below the checksum, alone."""
        try:
            arrays = archive.unpack(io.BytesIO(body), len(body))
        except StateError as error:
            _assert_line(error)
        else:
            assert sum(array.nbytes for array in arrays.values()) <= len(body)

    def study(self, content: bytes) -> None:
        path = self.folder / "study.yaml"
        path.write_bytes(content)
        try:
            load_study(path, {}, self.folder / "results")
        except ConfigError as error:
            _assert_line(error)

    def setting(self, content: bytes) -> None:
        try:
            parse_setting(content.decode("utf-8", "replace"))
        except ConfigError as error:
            _assert_line(error)

    def run_config(self, content: bytes) -> None:
        """JSON, as the inline engine is given it."""
        try:
            values = json.loads(content)
        except (ValueError, RecursionError):
            return
        if isinstance(values, dict):
            try:
                Config.parse(values)
            except ConfigError as error:
                _assert_line(error)


def _assert_line(error: Exception) -> None:
    assert str(error) and len(str(error).splitlines()) == 1, str(error)
