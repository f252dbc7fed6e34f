"""What a hub may send to a device, and what it cannot do to it: real messages to the ClientApp on a node of its own."""

import logging
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from support.common import rounds_of
from support.doubles.faults import FaultyGrid
from support.made.stored import read_state
from support.systems.contract import run_over

from fedkace_flwr import apps, client_app, queries
from fedkace_flwr.clients import fedcbdr as cbdr
from fedkace_flwr.clients import tfcl
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.experiments.feed import feed
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.inference.model_files import load_newest
from fedkace_flwr.messaging import folding, wire
from fedkace_flwr.storage.__main__ import main as storage
from fedkace_flwr.storage.earlier_runs import MOST_RUNS

Make = Callable[..., Config]
Arrays = dict[str, Any]

RUN = "1" * 20
TRAIN, EVALUATE = MessageType.TRAIN, MessageType.EVALUATE


class Device:
    """Client 0 of a node with folders of its own, and a hub that sends it whatever a test says."""

    def __init__(self, folder: Path, config: Config, **node: str) -> None:
        self.config = config
        self.folder = folder / "device" / "cam"
        self.weights = as_arrays(Experiment(config).initial_weights())
        self._node = {"state-dir": str(folder / "device"), "client-name": "cam", **node}

    def send(
        self, kind: str, number: int, content: RecordDict | Arrays | None = None, *, run: object = RUN, **changes: Any
    ) -> Message:
        """Send a message of a round, by default with a good model; ``changes`` are keys of the run."""
        if not isinstance(content, RecordDict):
            content = RecordDict({wire.ARRAYS: wire.array_record(self.weights if content is None else content)})
        content[wire.CONFIG] = ConfigRecord({wire.RUN: run, wire.ROUND: number, wire.CLIENT: 0})  # type: ignore[dict-item]
        asked = {**self.config.flat(), **{name.replace("_", "-"): value for name, value in changes.items()}}
        grid = InlineGrid(client_app.app, 3, asked, 1, lambda _: self._node)
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=2, message_type=kind)])
        return reply

    def done(self, *numbers: int, **options: Any) -> None:
        """Train and evaluate rounds as an honest hub asks for it."""
        for number in numbers:
            for kind in (TRAIN, EVALUATE):
                reply = self.send(kind, number, **options)
                assert not reply.has_error(), reply.error.reason

    def refusal(self, *arguments: Any, **options: Any) -> str:
        """The reason for which a message is refused: one line, also in the log; nothing on the disk changes."""
        before = self.held()
        with said() as lines:
            reply = self.send(*arguments, **options)
        assert reply.has_error()
        reason = wire.root_cause(reply.error.reason)
        assert len(lines) == 1 and lines[0].isprintable() and len(lines[0]) < 1000
        assert self.held() == before
        return reason

    def held(self) -> dict[str, bytes]:
        """Every file of the device."""
        found = (path for path in self.folder.parent.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in found if path.name != ".lock"}

    def predicts(self) -> int:
        """The round of the model that predicts, after a prediction."""
        answer = load_newest(self.folder).answer(np.zeros((3, 8, 8), np.uint8), 1)
        assert 0 < answer["classes"][0]["probability"] <= 1
        round_number: int = answer["round"]
        return round_number


@contextmanager
def said() -> Iterator[list[str]]:
    """Collect what the client logs."""
    lines: list[str] = []
    handler = type("Ear", (logging.Handler,), {"emit": lambda self, record: lines.append(record.getMessage())})()
    queries.logger.addHandler(handler)
    try:
        yield lines
    finally:
        queries.logger.removeHandler(handler)


@pytest.fixture
def device(small: Make, tmp_path: Path) -> Device:
    return Device(tmp_path, small())


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Arrays], Arrays]:
    return lambda model: {**model, name: change(model[name].copy())}


def filled(value: float) -> Callable[[Any], Any]:
    def put(array: Any) -> Any:
        array.reshape(-1)[-1:] = value
        return array

    return put


MODELS: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "not a number": (changed("output.bias", filled(np.nan)), "'output.bias'"),
    "infinite": (changed("output.weight", filled(-np.inf)), "'output.weight'"),
    "one array less": (lambda model: {n: a for n, a in model.items() if n != "output.bias"}, "'output.bias'"),
    "one array more": (lambda model: {**model, "more": np.zeros(3, np.float32)}, "'more'"),
    "no array": (lambda model: {}, "names"),
    "another shape": (changed("output.weight", lambda array: array.T), "'output.weight'"),
    "another type": (changed("output.bias", lambda array: array.astype(np.float64)), "float64"),
    "complex": (changed("output.bias", lambda array: array.astype(np.complex64)), "complex64"),
    "another byte order": (changed("output.bias", lambda array: array.astype(">f4")), ">f4"),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", [TRAIN, EVALUATE])
@pytest.mark.parametrize("fault", MODELS)
def test_a_model_that_does_not_fit_is_refused_and_the_device_goes_on_with_its_own(
    device: Device, kind: str, fault: str
) -> None:
    device.done(1)
    damage, words = MODELS[fault]
    reason = device.refusal(kind, 1 + (kind == TRAIN), damage(device.weights))
    assert reason.startswith("MessageError") and words in reason
    assert device.predicts() == 1
    device.done(2)
    assert device.predicts() == 2


@pytest.mark.parametrize("kind", [TRAIN, EVALUATE])
def test_a_message_without_a_model_is_refused(device: Device, kind: str) -> None:
    assert repr(wire.ARRAYS) in device.refusal(kind, 1, RecordDict())


def test_a_folded_model_is_checked_like_any_other(device: Device) -> None:
    for damage, words in MODELS.values():
        content = RecordDict({wire.ARRAYS: folding.fold(wire.array_record(damage(device.weights)))})
        content = folding.marked(content, wire.CONFIG)
        marked = content.config_records[wire.CONFIG]
        marked.update({wire.RUN: RUN, wire.ROUND: 1, wire.CLIENT: 0})
        grid = InlineGrid(client_app.app, 3, device.config.flat(), 1)
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=2, message_type=TRAIN)])
        assert words in wire.root_cause(reply.error.reason)


@pytest.mark.parametrize("name", ["more", "output.bias"])
def test_a_model_of_a_gigabyte_is_refused_unread(device: Device, name: str) -> None:
    """The bytes are zeros that nobody has touched, which take up no memory until somebody does."""
    device.done(1)
    record = wire.array_record(device.weights)
    record[name] = Array("float32", (2**28,), "numpy.ndarray", bytes(2**30))
    before = psutil.Process().memory_info().rss
    reply = device.send(EVALUATE, 2, RecordDict({wire.ARRAYS: record}))
    assert psutil.Process().memory_info().rss - before < 2**28
    assert "left unread" in wire.root_cause(reply.error.reason)


# Finite models that predict nothing


HOPELESS: dict[str, Callable[[str, Any], Any]] = {
    "weights that overflow": lambda name, array: array * np.float32(1e30) if array.dtype == np.float32 else array,
    "negative variances": lambda name, array: -np.ones_like(array) if name.endswith("running_var") else array,
}


@pytest.mark.parametrize("fault", HOPELESS)
def test_a_model_that_predicts_nothing_is_not_kept_by_a_device_without_test_images(
    small: Make, tmp_path: Path, fault: str
) -> None:
    feed(small(), tmp_path / "data")
    names = ",".join("0123456789")
    config = small(method="fedavg", dataset="inbox", class_names=names, image_size=8, normalise=False)
    device = Device(tmp_path, config, inbox=str(tmp_path / "data" / "client-0"))
    device.done(1)
    model = {name: HOPELESS[fault](name, array) for name, array in device.weights.items()}
    assert "round 2" in device.refusal(EVALUATE, 2, model)
    assert device.predicts() == 1


# Messages of the methods' own


def test_fedcbdrs_own_messages_are_checked_like_models(small: Make, tmp_path: Path) -> None:
    device = Device(tmp_path, small(method="fedcbdr", capacity=10))
    assert not device.send(TRAIN, 1).has_error()
    for damage, words in MODELS.values():
        assert words in device.refusal(cbdr.FEATURES_QUERY, 1, damage(device.weights))
    pool = 16
    rows = {
        "not finite": np.full((pool, 4), np.nan),
        "other rows": np.zeros((pool + 1, 4)),
        "more columns than features": np.zeros((pool, 33)),
        "single precision": np.zeros((pool, 4), np.float32),
        "a list": np.zeros(pool),
    }
    for fault, array in rows.items():
        assert cbdr.ROWS in device.refusal(cbdr.SCORES_QUERY, 1, {cbdr.ROWS: array}), fault
    assert not device.send(cbdr.SCORES_QUERY, 1, {cbdr.ROWS: np.eye(pool, 4)}).has_error()

    for positions in (np.zeros(10), np.arange(17), np.zeros((2, 5), np.int64)):
        content = RecordDict({wire.ARRAYS: wire.array_record(device.weights)})
        content[cbdr.SELECTION] = wire.array_record({cbdr.POSITIONS: positions})
        assert cbdr.POSITIONS in device.refusal(EVALUATE, 1, content)
    content[cbdr.SELECTION] = wire.array_record({cbdr.POSITIONS: np.arange(10)})
    assert not device.send(EVALUATE, 1, content).has_error()
    state = read_state(device.folder / "state-000001.npz")
    assert len(state.buffer) == 10


def test_tfcls_logits_are_refused_unread_where_they_are_too_many(small: Make, tmp_path: Path) -> None:
    device = Device(tmp_path, small(method="tfcl"))
    assert not device.send(tfcl.HEAD_ACTION, 1, {}).has_error()
    record = ArrayRecord({tfcl.LOGITS: Array("float32", (2**28,), "numpy.ndarray", bytes(2**30))})
    assert "left unread" in device.refusal(tfcl.TAIL_ACTION, 1, RecordDict({wire.ARRAYS: record}))
    assert "names" in device.refusal(EVALUATE, 1, device.weights)  # there is no global model


# What the server makes of it


def test_a_refused_model_is_a_failure_of_its_client_in_the_record(small: Make) -> None:
    config = small(quorum=0.5)

    def damage(message: Message) -> None:
        told = message.content.config_records[wire.CONFIG]
        if told.get(wire.ROUND) == 2 and told[wire.CLIENT] == 1:
            model = wire.unpack(message.content.array_records[wire.ARRAYS])
            message.content[wire.ARRAYS] = wire.array_record(MODELS["not a number"][0](model))

    class Hub(FaultyGrid):
        def push_messages(self, messages: Any) -> Any:
            sent = list(messages)
            for message in sent:
                damage(message)
            return super().push_messages(sent)

    records = rounds_of(run_over(Hub(config), config))
    assert [record["failures"] for record in (records[0], records[2])] == [[], []]
    assert [(each["client"], each["phase"], each["kind"]) for each in records[1]["failures"]] == [
        (1, "training", "error"),
        (1, "evaluation", "error"),
    ]
    assert all("'output.bias'" in each["reason"] for each in records[1]["failures"])


# Texts and numbers


@pytest.mark.parametrize("run", ["x" * 65, "a\x1b[31mb", "two\nlines", "../up", 7])
def test_an_absurd_name_of_a_run_is_refused_and_shown_as_text(device: Device, run: object) -> None:
    assert "at most 64 letters and digits" in device.refusal(TRAIN, 1, run=run)


@pytest.mark.parametrize("number", [0, -1, 4, 2**62])
def test_a_server_cannot_go_on_after_the_rounds_that_it_named(device: Device, number: int) -> None:
    for kind in (TRAIN, EVALUATE):
        assert f"round = {number}" in device.refusal(kind, number)


def test_what_a_run_says_is_one_printable_line_in_the_log(device: Device) -> None:
    assert "a\\x1b[31mb" in device.refusal(TRAIN, 1, dataset="folder", data_dir="a\x1b[31mb")


@pytest.mark.parametrize(
    "key", ["rounds", "clients", "width", "epochs", "capacity", "inbox-bound", "threads", "samples-per-class"]
)
@pytest.mark.parametrize("stream", ["windows", "blurred"])
def test_no_number_of_a_run_takes_a_devices_memory(device: Device, key: str, stream: str) -> None:
    reason = device.refusal(TRAIN, 1, **{key: 10**12, "stream": stream})
    assert f"{key} = 1000000000000" in reason and ("<= " in reason or "at most" in reason)


# A device's memory


def test_another_number_of_clients_or_another_path_moves_no_state(device: Device, tmp_path: Path) -> None:
    device.done(1)
    told = {"clients": 1000, "state_dir": str(tmp_path / "other"), "results_dir": str(tmp_path / "else")}
    device.done(2, **told, run_name="other")
    state = read_state(device.folder / "state-000002.npz")
    assert state.follows == 1 and len(state.buffer) == 18
    assert [path.name for path in device.folder.parent.iterdir()] == ["cam"]


def test_a_run_with_other_keys_does_not_set_its_state_aside(device: Device) -> None:
    device.done(1)
    weights = as_arrays(Experiment(Config.parse({**device.config.flat(), "num-classes": 8})).initial_weights())
    assert "10 classes, not 8" in device.refusal(TRAIN, 2, weights, num_classes=8)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("apart", [False, True], ids=["in the state's folder", "in a folder of their own"])
def test_new_runs_of_a_hub_cost_a_device_nothing_that_cannot_be_taken_back(
    small: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], apart: bool
) -> None:
    (tmp_path / "models").mkdir()
    device = Device(tmp_path, small(), **({"models-dir": str(tmp_path / "models")} if apart else {}))
    models = tmp_path / "models" / "cam" if apart else device.folder
    device.done(1, 2)
    learned = {path.name: path.read_bytes() for folder in (device.folder, models) for path in folder.glob("*.npz")}
    for number in range(MOST_RUNS):
        device.done(2, run=f"new{number}")  # of the same round, so that the files have the same names
    reason = device.refusal(TRAIN, 1, run="another")
    assert f"python -m fedkace_flwr.storage earlier {device.folder}" in reason
    device.done(3, run="new0")  # those that the device knows go on

    assert storage(["earlier", str(device.folder)]) == 0 and RUN in capsys.readouterr().out
    for folder in {device.folder, models}:
        assert storage(["earlier", str(folder), "--take-back", RUN]) == 0
    found = {path.name: path.read_bytes() for folder in (device.folder, models) for path in folder.glob("*.npz")}
    assert found == learned
    assert load_newest(models).kept.run == RUN
    device.done(3)
    assert read_state(device.folder / "state-000003.npz").follows == 2


def test_a_state_that_is_not_there_cannot_be_taken_back(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    device.done(1)
    assert storage(["earlier", str(device.folder), "--take-back", "no\x1b"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'no\\x1b'" in line
    assert storage(["earlier", str(device.folder.parent)]) == 2 and "STATE/NAME" in capsys.readouterr().err


# A disk that fills


def test_a_disk_that_fills_while_models_are_kept_costs_no_model(device: Device) -> None:
    device.done(1)
    assert not device.send(TRAIN, 2).has_error()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # the system refuses to write more
    try:
        reason = device.refusal(EVALUATE, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert reason.startswith("StateError") and str(device.folder) in reason
    assert device.predicts() == 1
    assert not device.send(EVALUATE, 2).has_error()
    assert device.predicts() == 2


def test_a_policy_that_the_environment_names_is_read_before_the_server_is_told_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDKACE_POLICY", str(tmp_path / "none.toml"))
    ask = Message(
        RecordDict({wire.CONFIG: ConfigRecord({wire.MOST: 5})}),
        dst_node_id=1,
        message_type=f"{MessageType.QUERY}.{wire.WAITING}",
    )
    reply = apps.client(ask, Context(1, 1, {wire.INBOX: str(tmp_path)}, RecordDict(), {}))
    assert reply.has_error() and "none.toml" in str(reply.error.reason)


def test_a_process_for_one_message_looks_for_no_garbage_among_modules() -> None:
    """Neither at the import of PyTorch nor at its end, which cost a third of a device's processor time; later it does."""
    code = "import gc; from fedkace_flwr import apps; apps._app_for('train', False); print(gc.isenabled(), gc.get_freeze_count() > 10**5)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
