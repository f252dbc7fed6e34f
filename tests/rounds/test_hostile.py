"""Clients that lie or break: the run goes on as if they had said nothing.

A reference run is made in which the hostile clients' replies never come. The honest clients' answers are real ones,
kept by the message that they answer. A hostile run is then served from these: every message to an honest client must
be one of the reference's, bit for bit, or the hostile clients have changed something.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from support.common import SMALL, rounds_of

from experiments.running.inline import InlineGrid
from fedkace_flwr import client_app, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods import fedcbdr as fedcbdr_names
from fedkace_flwr.methods import tfcl as tfcl_names
from fedkace_flwr.results import run_folder
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints

CLIENTS, HOSTILE = 5, {1, 3}
GIGABYTE = 2**30
ROUNDS = 3

Key = tuple[str, int, bytes]
Damage = Callable[[RecordDict], RecordDict | Error | None]


def key_of(message: Message) -> Key:
    """What a message says to whom."""
    content, told = hashlib.sha256(), message.content.config_records[keys.CONFIG]
    for name, record in sorted(message.content.items()):
        content.update(name.encode())
        for part, value in sorted(record.items()):
            content.update(part.encode() + (value.data if isinstance(value, Array) else repr(value).encode()))
    return message.metadata.message_type, int(told[keys.CLIENT]), content.digest()  # type: ignore[arg-type]


def is_inquiry(message: Message) -> bool:
    """Whether the server only asks a SuperNode who it is."""
    return message.metadata.message_type == MessageType.QUERY


@dataclass
class Reference:
    """A run without the hostile clients' replies to messages of some kinds, and every answer that was given."""

    config: Config
    kinds: frozenset[str]
    answers: dict[Key, RecordDict | Error] = field(default_factory=dict)

    def is_hostile(self, message: Message) -> bool:
        kind, client, _ = key_of(message)
        return client in HOSTILE and (not self.kinds or kind in self.kinds)


class RecordingWire(InlineGrid):
    """Keeps all answers and loses those of the hostile."""

    def __init__(self, reference: Reference) -> None:
        super().__init__(client_app.app, CLIENTS, reference.config.flat(), run_id=1)
        self._reference = reference

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            (number,) = super().push_messages([message])
            if not is_inquiry(message):
                reply = self._replies[number]
                kept = reply.error if reply.has_error() else copy.deepcopy(reply.content)
                self._reference.answers[key_of(message)] = kept
                if self._reference.is_hostile(message):
                    del self._replies[number]
                    number = ""  # as a message that was not taken: a client that is silent, without the waiting
            numbers.append(number)
        return numbers


class HostileWire(InlineGrid):
    """Answers as the reference did; what the hostile say is damaged."""

    def __init__(self, reference: Reference, config: Config, damage: Damage) -> None:
        super().__init__(client_app.app, CLIENTS, config.flat(), run_id=1)
        self._reference, self._damage = reference, damage
        self.unheard_of: list[tuple[str, int]] = []
        self.damaged = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return ["" if self._push(message) is None else message.metadata.message_id for message in messages]

    def _push(self, message: Message) -> Message | None:
        (number,) = super().push_messages([message]) if is_inquiry(message) else [None]
        if number is not None:
            return self._replies[number]
        kind, client, _ = key_of(message)
        answer = copy.deepcopy(self._reference.answers.get(key_of(message)))
        if answer is None:
            self.unheard_of.append((kind, client))
            return None
        if self._reference.is_hostile(message) and isinstance(answer, RecordDict):
            self.damaged += 1
            answer = self._damage(answer)
            if answer is None:
                return None
        message.metadata.__dict__["_message_id"] = number = f"{id(message)}-{len(self._replies)}-{kind}"
        self._replies[number] = Message(answer, reply_to=message)
        return self._replies[number]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "draw_accuracy", lambda *args, **kwargs: None)


def configured(folder: Path, name: str, method: str, **changes: Any) -> Config:
    named = {key.replace("_", "-"): value for key, value in changes.items()}
    shape = {"clients": CLIENTS, "rounds": ROUNDS, "capacity": 12, "tfcl-server-epochs": 2}
    return Config.parse({**SMALL, **shape, "method": method, "results-dir": str(folder), "run-name": name, **named})


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """Each reference is made once."""

    @lru_cache
    def make(method: str, *kinds: str) -> Reference:
        folder = tmp_path_factory.mktemp("reference")
        reference = Reference(configured(folder, "reference", method), frozenset(kinds))
        server_app.run(RecordingWire(reference), reference.config, run_id=1)
        return reference

    return make


def folder_of(config: Config) -> Path:
    return Path(config.run.results_dir) / config.run.run_name


def last(config: Config) -> Checkpoint:
    found = Checkpoints(folder_of(config) / "server").newest()
    assert found is not None
    return found


def columns_of_the_honest(config: Config) -> list[dict[str, Any]]:
    """What a run's record says of everything but the hostile clients and the bytes."""
    records = rounds_of(folder_of(config))
    for record in records:
        del record["bytes"], record["failures"]
        for name, value in record.items():
            if isinstance(value, list) and len(value) == CLIENTS:
                record[name] = [value[client] for client in range(CLIENTS) if client not in HOSTILE]
    return records


def assert_nothing_changes(reference: Reference, folder: Path, damage: Damage) -> list[dict[str, Any]]:
    """Run with the damage; the failures of all rounds."""
    config = configured(folder, "hostile", reference.config.method)
    wire = HostileWire(reference, config, damage)
    server_app.run(wire, config, run_id=1)
    assert wire.damaged >= len(HOSTILE) * ROUNDS if not reference.kinds else wire.damaged > 0
    assert wire.unheard_of == []
    mine, other = last(config), last(reference.config)
    assert mine.round == other.round == ROUNDS
    for one, two in ((mine.weights, other.weights), (mine.arrays, other.arrays)):
        assert list(one) == list(two)
        assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    assert columns_of_the_honest(config) == columns_of_the_honest(reference.config)
    return [failure for record in rounds_of(folder_of(config)) for failure in record["failures"]]


# Ways to be hostile


def arrays(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Damage:
    """Other arrays; a message without any is lost."""

    def damage(content: RecordDict) -> RecordDict | None:
        if keys.ARRAYS not in content.array_records:
            return None
        content[keys.ARRAYS] = keys.array_record(change(keys.unpack(content.array_records[keys.ARRAYS])))
        return content

    return damage


def each(change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    """Every floating-point array another."""
    return arrays(lambda held: {n: change(a.copy()) if a.dtype.kind == "f" else a for n, a in held.items()})


def filled(value: float) -> Damage:
    def put(array: np.ndarray) -> np.ndarray:
        array.reshape(-1)[-1:] = value
        return array

    return each(put)


def named(end: str, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    """The arrays of these names another."""
    return arrays(lambda held: {n: change(a) if n.endswith(end) else a for n, a in held.items()})


def rotated(held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = list(held)
    return dict(zip(names, [held[name] for name in (*names[1:], names[0])], strict=True))


def raw(data: Callable[[bytes], bytes]) -> Damage:
    """Every array's bytes others, under the same declaration."""

    def damage(content: RecordDict) -> RecordDict | None:
        if keys.ARRAYS not in content.array_records:
            return None
        old = content.array_records[keys.ARRAYS]
        forged = {n: Array(a.dtype, tuple(a.shape), a.stype, data(a.data)) for n, a in old.items()}
        content[keys.ARRAYS] = ArrayRecord(forged)
        return content

    return damage


def counted(number: int) -> Damage:
    """Another number of samples, of those who have trained on some."""

    def damage(content: RecordDict) -> RecordDict | None:
        if keys.ARRAYS not in content.array_records:
            return None
        content.metric_records[keys.METRICS][keys.EXAMPLES] = number
        return content

    return damage


def told(**metrics: Any) -> Damage:
    def damage(content: RecordDict) -> RecordDict | None:
        if keys.METRICS not in content.metric_records:
            return None
        for name, value in metrics.items():
            content.metric_records[keys.METRICS][name.replace("_", "-")] = value
        return content

    return damage


def sat_out(number: int) -> Damage:
    """A training reply that says it had nothing to train on, and yet holds a model."""

    def damage(content: RecordDict) -> RecordDict | None:
        return told(sat_out=number)(content) if keys.ARRAYS in content.array_records else None

    return damage


def ending_alone(content: RecordDict) -> RecordDict | None:
    if keys.METRICS not in content.metric_records:
        return None
    content.metric_records[keys.METRICS].pop(keys.STARTED, None)
    content.metric_records[keys.METRICS][keys.FINISHED] = 1.0
    return content


def another_stype(content: RecordDict) -> RecordDict | None:
    if keys.ARRAYS not in content.array_records:
        return None
    for array in content.array_records[keys.ARRAYS].values():
        array.stype = "pickle"
    return content


def npy(shape: str, descr: str = "'<f4'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


MODEL_FAULTS: dict[str, tuple[Damage, str]] = {
    "nan": (filled(np.nan), "values"),
    "inf": (filled(np.inf), "values"),
    "minus inf": (filled(-np.inf), "values"),
    "huge": (each(lambda a: np.full_like(a, 1e30)), "norm"),
    "the largest floats": (each(lambda a: np.full_like(a, np.finfo(a.dtype).max)), "norm"),
    "fifty times": (named("weight", lambda a: 50 * a), "norm"),
    "huge statistics": (named("running_mean", lambda a: np.full_like(a, 1e6)), "norm"),
    "huge variances": (named("running_var", lambda a: np.full_like(a, 1e12)), "norm"),
    "negative variances": (named("running_var", lambda a: -np.ones_like(a)), "values"),
    "a counter far ahead": (named("num_batches_tracked", lambda a: np.full_like(a, 2**62)), "values"),
    "a counter below zero": (named("num_batches_tracked", lambda a: np.full_like(a, -1)), "values"),
    "swapped keys": (arrays(rotated), "arrays"),
    "one class more": (named("output.bias", lambda a: np.append(a, a[:1])), "arrays"),
    "one class less": (named("output.weight", lambda a: a[:-1]), "arrays"),
}

FAULTS: dict[str, tuple[Damage, str]] = {
    "shape": (each(lambda a: a.reshape(-1)[:, None]), "arrays"),
    "dtype": (each(lambda a: a.astype(np.float16)), "arrays"),
    "byte order": (each(lambda a: a.astype(a.dtype.newbyteorder())), "arrays"),
    "a name more": (arrays(lambda held: {**held, "surprise": np.zeros(1, np.float32)}), "arrays"),
    "a name less": (arrays(lambda held: dict(list(held.items())[1:])), "arrays"),
    "no arrays": (arrays(lambda held: {}), "arrays"),
    "no samples": (counted(0), "count"),
    "negative samples": (counted(-7), "count"),
    "absurd samples": (counted(10**15), "count"),
    "more samples than fit 64 bits": (counted(2**70), "metrics"),
    "an exception": (lambda content: Error(2, "Traceback\nOSError: disk on fire"), "error"),
    "an error as of a lost process": (lambda content: Error(0, "gone"), "error"),
    "past the deadline": (lambda content: None, "silent"),
    "nothing": (lambda content: RecordDict(), "records"),
    "numbers elsewhere": (lambda content: RecordDict({keys.METRICS: ConfigRecord({keys.EXAMPLES: 1})}), "records"),
    "cut short": (raw(lambda data: data[: len(data) // 2]), "arrays"),
    "no header": (raw(lambda data: b""), "arrays"),
    "a pickle": (raw(lambda data: b"\x80\x04N."), "arrays"),
    "pickled objects": (raw(lambda data: npy("(2,)", "'|O'")), "arrays"),
    "a header of a terabyte": (raw(lambda data: npy("(274877906944,)")), "arrays"),
    "a header without sense": (raw(lambda data: npy("((((" * 10)), "arrays"),
    "more than the array": (raw(lambda data: data + b"more"), "arrays"),
    "another serialisation": (another_stype, "arrays"),
    "sat out with a model": (sat_out(1), "records"),
    "half sat out": (sat_out(7), "records"),
    "a number that is none": (told(gap=float("nan")), "metrics"),
    "accuracy above one": (told(accuracy=1.5), "metrics"),
    "seconds of a list": (told(training_seconds=[1.0, 2.0]), "metrics"),
    "seconds below zero": (told(training_seconds=-1.0), "metrics"),
    "seconds without end": (told(training_seconds=1e308), "metrics"),
    "no class seen": (told(seen_classes=0), "metrics"),
    "a switch that is no round": (told(switched_at=0.5), "metrics"),
    "a histogram too short": (told(buffer_classes=[1, 2]), "metrics"),
    "a list of half a million": (told(replay_weights=[1.0] * 500_000), "size"),
    "an end without a start": (ending_alone, "metrics"),
}

METHODS = ["fedkace", "fedavg", "dcfcl", "fedcbdr"]
MORE_METHODS = ["er", "lkc", "ofcl", "refed"]


def slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("fault", [*MODEL_FAULTS, *FAULTS])
@pytest.mark.parametrize("method", [*METHODS, *slow(MORE_METHODS)])
def test_the_model_is_that_of_the_honest_alone(
    reference_of: Callable[..., Reference], tmp_path: Path, method: str, fault: str
) -> None:
    damage, kind = (MODEL_FAULTS | FAULTS)[fault]
    failures = assert_nothing_changes(reference_of(method), tmp_path, damage)
    trained = [failure for failure in failures if failure["phase"] == "training"]
    assert {failure["client"] for failure in trained} == HOSTILE and len(trained) == len(HOSTILE) * ROUNDS
    assert {failure["kind"] for failure in trained} == {kind}
    assert all(len(failure["reason"]) < 500 and len(failure["reason"].splitlines()) == 1 for failure in failures)


LESSON_FAULTS = {
    name: fault for name, fault in (MODEL_FAULTS | FAULTS).items() if name in {*FAULTS, "nan", "inf", "huge"}
} | {
    "labels out of range": (named(tfcl_names.LABELS, lambda a: a + 1000), "content"),
    "maps beyond all images": (
        named(tfcl_names.FEATURES, lambda a: np.zeros((1, a.shape[1], 64, 64), np.float32)),
        "size",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", LESSON_FAULTS)
def test_what_tfcl_teaches_is_learnt_from_the_honest_alone(
    reference_of: Callable[..., Reference], tmp_path: Path, fault: str
) -> None:
    failures = assert_nothing_changes(reference_of("tfcl"), tmp_path, LESSON_FAULTS[fault][0])
    assert {failure["client"] for failure in failures if failure["phase"] == "training"} == HOSTILE


QUERY_FAULTS = {
    name: fault
    for name, fault in (MODEL_FAULTS | FAULTS).items()
    if name in {"nan", "inf", "shape", "dtype", "a name more", "no arrays", "an exception", "past the deadline"}
    or name in {"nothing", "cut short", "a header of a terabyte", "another serialisation"}
}
FEATURE_FAULTS = {**QUERY_FAULTS, "huge": MODEL_FAULTS["huge"]}
SCORE_FAULTS = {
    **QUERY_FAULTS,
    "above one": (named(fedcbdr_names.SCORES, lambda a: a + 2), "content"),
    "below zero": (named(fedcbdr_names.SCORES, lambda a: a - 2), "content"),
    "labels out of range": (named(fedcbdr_names.LABELS, lambda a: a + 1000), "content"),
}


@pytest.mark.parametrize("fault", FEATURE_FAULTS)
def test_features_of_the_hostile_touch_no_ones_selection(
    reference_of: Callable[..., Reference], tmp_path: Path, fault: str
) -> None:
    reference = reference_of("fedcbdr", fedcbdr_names.FEATURES_QUERY)
    failures = assert_nothing_changes(reference, tmp_path, FEATURE_FAULTS[fault][0])
    assert {failure["client"] for failure in failures if failure["phase"] == fedcbdr_names.FEATURES_QUERY} == HOSTILE


@pytest.mark.parametrize("fault", SCORE_FAULTS)
def test_scores_of_the_hostile_touch_no_ones_selection(
    reference_of: Callable[..., Reference], tmp_path: Path, fault: str
) -> None:
    reference = reference_of("fedcbdr", fedcbdr_names.SCORES_QUERY)
    failures = assert_nothing_changes(reference, tmp_path, SCORE_FAULTS[fault][0])
    assert {failure["client"] for failure in failures if failure["phase"] == fedcbdr_names.SCORES_QUERY} == HOSTILE


METRIC_FAULTS = {
    name: fault
    for name, fault in FAULTS.items()
    if (fault[1] == "metrics" and name != "more samples than fit 64 bits") or fault[1] in ("error", "silent", "records")
}


@pytest.mark.parametrize("fault", [name for name in METRIC_FAULTS if "sat out" not in name])
def test_a_hostile_evaluation_counts_for_nothing(
    reference_of: Callable[..., Reference], tmp_path: Path, fault: str
) -> None:
    reference = reference_of("fedkace", MessageType.EVALUATE)
    failures = assert_nothing_changes(reference, tmp_path, METRIC_FAULTS[fault][0])
    assert {failure["client"] for failure in failures} == HOSTILE
    assert {failure["phase"] for failure in failures} == {"evaluation"}


# Sizes


@pytest.mark.parametrize("place", ["an array of the model", "another record", "a text", "numbers"])
def test_a_message_of_a_gigabyte_is_refused_unread(
    reference_of: Callable[..., Reference], tmp_path: Path, place: str
) -> None:
    """The bytes are zeros that nobody has touched, which take up no memory until somebody does."""
    giant = bytes(GIGABYTE)

    def damage(content: RecordDict) -> RecordDict | None:
        if keys.ARRAYS not in content.array_records:
            return None
        if place == "an array of the model":
            content.array_records[keys.ARRAYS]["output.bias"] = Array("float32", (10,), "numpy.ndarray", giant)
        elif place == "another record":
            content["more"] = ArrayRecord({"x": Array("uint8", (GIGABYTE,), "numpy.ndarray", giant)})
        elif place == "a text":
            content["more"] = ConfigRecord({"x": giant})
        else:
            content["more"] = MetricRecord({str(number): number for number in range(200_000)})
        return content

    # The test's wire copies answers before it damages them, never after.
    before = psutil.Process().memory_info().rss
    failures = assert_nothing_changes(reference_of("er"), tmp_path, damage)
    assert psutil.Process().memory_info().rss - before < GIGABYTE / 4
    trained = [failure for failure in failures if failure["phase"] == "training"]
    assert {failure["kind"] for failure in trained} == {"size"}
    assert all("left unread" in failure["reason"] for failure in trained)


# What a run says of them


def test_failures_are_counted_by_client_and_kind_in_the_summary_and_in_the_last_line_of_the_log(
    reference_of: Callable[..., Reference], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference, lines = reference_of("fedavg"), []
    handler = type(
        "Ear", (server_app.logging.Handler,), {"emit": lambda self, record: lines.append(record.getMessage())}
    )()
    server_app.logger.addHandler(handler)
    try:
        assert_nothing_changes(reference, tmp_path, filled(np.nan))
    finally:
        server_app.logger.removeHandler(handler)
    summary = run_folder.read_json(tmp_path / "hostile" / "summary.json")
    assert summary["failures_by_client"] == {
        str(client): {"silent": ROUNDS, "values": ROUNDS} for client in sorted(HOSTILE)
    }
    assert summary["failures"] == 2 * ROUNDS * len(HOSTILE)
    assert "left out: client 1 (3 silent, 3 values), client 3 (3 silent, 3 values); see" in lines[-1]


@pytest.mark.parametrize("method", ["fedkace", "fedavg"])
def test_without_the_bound_what_is_large_and_finite_gets_through(
    reference_of: Callable[..., Reference], tmp_path: Path, method: str
) -> None:
    """That the bound, and nothing else, keeps it out."""
    reference = reference_of(method)
    config = configured(tmp_path, "unbound", method, norm_bound=0.0)
    wire = HostileWire(reference, config, MODEL_FAULTS["fifty times"][0])
    with pytest.raises(RunError):  # nobody knows an answer to another model than the reference's
        server_app.run(wire, config, run_id=1)
    assert {(MessageType.EVALUATE, client) for client in range(CLIENTS)} <= set(wire.unheard_of)
