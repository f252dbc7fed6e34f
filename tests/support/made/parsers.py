"""Every reader of foreign data, as a function that takes bytes and raises only the reader's own errors.

``fuzz/test_files.py`` (hypothesis) and ``fuzz/coverage_guided.py`` (atheris) call them.
"""

import hashlib
import json
import shutil

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

from fedkace_flwr.algorithms.robust_aggregation import distance
from fedkace_flwr.config import Config
from fedkace_flwr.data import inbox_files as arrivals
from fedkace_flwr.data.images import read_square
from fedkace_flwr.data.readers.idx import read_idx
from fedkace_flwr.data.weights_file import weights_for
from fedkace_flwr.errors import ConfigError, DataError, MessageError, ModelError, PolicyError, RunError, StateError
from fedkace_flwr.experiments.studies.study import load_study
from fedkace_flwr.experiments.studies.yaml_file import parse_setting
from fedkace_flwr.export.loading import LoadedModel
from fedkace_flwr.inference.tensor_file import unpack
from fedkace_flwr.messaging import validation, wire
from fedkace_flwr.messaging.folding import unfolded
from fedkace_flwr.privacy.site_policy import read_policy
from fedkace_flwr.samples import Form
from fedkace_flwr.storage import atomic as durable
from fedkace_flwr.storage import client_state
from fedkace_flwr.storage.checkpoint import Checkpoints
from fedkace_flwr.storage.client_state import Answer, ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.storage.folders import OpenFolder
from support.made.pristine import (
    AGREED,
    CLIENT,
    LIMITS,
    NAMES,
    NETWORK,
    SHAPES,
    SIDE,
    WEIGHTS,
    scratch,
    with_key,
)
from support.made.replies import ask_with
from support.made.stored import CLASSES, empty, read_state

FORM = Form.picture(SIDE)


class Parsers:
    """Reads files of any content from a folder of its own."""

    def __init__(self) -> None:
        self.folder = scratch()
        self._question = ask_with(RecordDict())

    def close(self) -> None:
        self._clear()
        self.folder.rmdir()

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def stored(self, content: bytes) -> None:
        """Read as every kind of stored file."""
        for name in NAMES:
            (self.folder / name).write_bytes(content)
        for reader in (durable.read, durable.run_of):
            try:
                reader(self.folder / NAMES[0], client_state.VERSION)
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

    def encrypted(self, content: bytes) -> None:
        """Read as what follows the checksum of every kind of encrypted file, in a client's folder."""
        folder = self.folder / CLIENT
        folder.mkdir()
        file = b"\x89FEDKACE-SEALED\n" + hashlib.sha256(content).digest() + content
        for name in NAMES:
            (folder / name).write_bytes(file)
        with with_key():
            for action in (
                lambda: durable.read(folder / NAMES[0], client_state.VERSION),
                lambda: ClientStore(folder, empty()).before(3),
                lambda: ClientStore(folder, empty()).answer(2),
            ):
                try:
                    action()
                except StateError as error:
                    _assert_line(error)
        self._clear()

    def archived(self, body: bytes) -> None:
        """Parse without the checksum."""
        try:
            arrays = durable.unpack(body)
        except StateError as error:
            _assert_line(error)
        else:
            assert sum(array.nbytes for array in arrays.values()) <= len(body)

    def archived_arrival(self, content: bytes) -> None:
        """Read as an archive in an inbox."""
        self._arrived("a.npz", None, content)

    def picture(self, content: bytes) -> None:
        """Read as an image in a class's folder of an inbox."""
        self._arrived("a.png", "dog", content)

    def labels(self, content: bytes) -> None:
        """Read as a file of labels in an inbox."""
        (self.folder / "labels.csv").write_bytes(content)
        with OpenFolder.at(self.folder) as folder:
            try:
                rows = arrivals.labels(arrivals.Arrival(folder, "labels.csv", None))
            except DataError as error:
                _assert_line(error)
                return
        assert all(line > 0 and isinstance(name, str) and label == label.strip() for line, name, label in rows)

    def table(self, content: bytes) -> None:
        """Read as a table in an inbox whose samples are rows."""
        self._arrived("a.csv", None, content, Form.array(2))

    def _arrived(self, name: str, class_name: str | None, content: bytes, form: Form = FORM) -> None:
        (self.folder / name).write_bytes(content)
        claimed = None
        with OpenFolder.at(self.folder) as folder:
            arrival = arrivals.Arrival(folder, name, class_name)
            try:
                claimed, _ = arrivals.count(arrival)
            except DataError as error:
                _assert_line(error)
            try:
                images, labels = arrivals.read(arrival, AGREED, form, read_square)
            except DataError as error:
                _assert_line(error)
                return
        assert images.dtype == form.dtype and images.shape == (claimed, *form.shape)
        assert labels.shape == (claimed,) and labels.min() >= 0 and labels.max() < len(AGREED)

    def reply(self, content: RecordDict | Error) -> None:
        """Process as a client's reply, with every step for training and evaluation replies."""
        message = Message(content, reply_to=self._question)
        for shapes in (SHAPES, None):
            try:
                found = wire.read_reply(message, 0, shapes)
                validation.check_metrics(found.metrics, LIMITS)
                if shapes is not None and not found.sat_out:
                    validation.check_examples(found.examples, LIMITS)
                    validation.check_statistics(found.weights, WEIGHTS, LIMITS)
            except MessageError as error:
                assert len(str(error).splitlines()) <= 1 and len(str(error)) < 2000
                continue
            if shapes is not None and not found.sat_out:
                assert wire.shapes_of(found.weights) == SHAPES and found.examples > 0
                assert all(np.isfinite(array).all() for array in found.weights.values())
                assert distance(found.weights, WEIGHTS, SHAPES) >= 0

    def folded(self, content: bytes) -> None:
        """Read as the arrays of a reply as they are sent between machines."""
        name, kind = "fedkace.folded", "fedkace.folded"
        arrays = ArrayRecord({name: Array("uint8", (len(content),), kind, content)})
        told = MetricRecord({wire.EXAMPLES: 5, wire.ACCURACY: 0.5})
        try:
            apart = unfolded(RecordDict({wire.ARRAYS: arrays, wire.METRICS: told}))
        except MessageError as error:
            _assert_line(error)
            return
        assert sum(len(array.data) for array in apart.array_records[wire.ARRAYS].values()) < len(content)
        self.reply(apart)

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

    def policy(self, content: bytes) -> None:
        """Read as a site's policy, and let it decide on a run."""
        path = self.folder / "policy.toml"
        path.write_bytes(content)
        try:
            read_policy(path).check(Config(), Config(), sends_labels=True)
        except PolicyError as error:
            _assert_line(error)

    def weights(self, suffix: str, content: bytes) -> None:
        """Read as a file of weights to start from."""
        path = self.folder / f"weights{suffix}"
        path.write_bytes(content)
        try:
            found = weights_for(NETWORK, path)
            assert set(found) == {"body.0.weight", "body.0.bias"}
        except ConfigError as error:
            _assert_line(error)
        self._clear()

    def idx(self, suffix: str, content: bytes) -> None:
        """Read as an idx file of images, and as one of labels."""
        path = self.folder / f"ubyte{suffix}"
        path.write_bytes(content)
        for dimensions in (1, 3):
            try:
                found = read_idx(path, dimensions)
                assert found.dtype == np.uint8 and found.ndim == dimensions
            except DataError as error:
                _assert_line(error)
        self._clear()

    def model(self, content: bytes) -> None:
        """Read as a model that was taken away, and predict with it."""
        try:
            kept = unpack(content)
            if kept.form.size <= 3 * (4 * SIDE) ** 2:
                found = LoadedModel(kept).predict(np.zeros((1, *kept.form.shape), kept.form.dtype))
                assert found.probabilities.shape == (1, len(kept.class_names))
        except ModelError as error:
            _assert_line(error)

    def run_config(self, content: bytes) -> None:
        """Parse as JSON, as given to the inline engine."""
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
