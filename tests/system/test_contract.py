"""What every registered method owes: one test file over all of them, so that a new one is covered at once."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message, MessageType, RecordDict
from support.common import SMALL, rounds_of
from support.keys import KEYS

from experiments.running.inline import InlineGrid, run_inline
from fedkace_flwr import client_app, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods import fedcbdr as fedcbdr_names
from fedkace_flwr.methods.fedcbdr import FedcbdrKeys
from fedkace_flwr.registry import METHODS
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.checkpoint import Checkpoints
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.training.distillation import lower_half

Make = Callable[..., Config]
SHAPE = {"rounds": 3, "epochs": 2, "capacity": 12, "centralized_every": 2, "tfcl_server_epochs": 2}

# Presets of another method run the same code; `make quick` leaves them out.
EVERY_METHOD = [
    pytest.param(name, marks=[pytest.mark.slow] if METHODS[name].preset else []) for name in sorted(METHODS)
]
every_method = pytest.mark.parametrize("method", EVERY_METHOD)

# Keys that begin with a method's name are its own; of those with a choice, every value that is not the default.
OWN_CHOICES = [
    pytest.param({"method": name.split("-")[0], name.replace("-", "_"): value}, id=f"{name}={value}")
    for name, (default, key) in KEYS.items()
    if name.split("-")[0] in METHODS
    for value in (key.choices or ((True, False) if isinstance(default, bool) else ()))
    if value != default
]
CHOICE_SHAPE = {**SHAPE, "overlap": 2}  # the second round's classes are the first one's, the third one's are new


def every_choice(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.slow(pytest.mark.parametrize("choice", OWN_CHOICES)(test))


@dataclass(frozen=True)
class Crossing:
    """A message to a client and what came back, with the labels that the client holds: of each set of samples."""

    kind: str
    round: int
    client: int
    down: RecordDict
    up: RecordDict | None
    labels: Mapping[str, np.ndarray]

    def arrays(self) -> Iterator[np.ndarray]:
        for content in (self.down, self.up or RecordDict()):
            for record in content.array_records.values():
                yield from keys.unpack(record).values()

    def numbers(self) -> Iterator[tuple[str, Any]]:
        for record in (self.up or RecordDict()).metric_records.values():
            yield from record.items()


class Wire(InlineGrid):
    """An inline grid that lets a test meddle with each exchange."""

    def __init__(self, config: Config, meddle: Callable[[Message, Message], Message | None] | None = None) -> None:
        super().__init__(client_app.app, config.stream.clients, config.flat(), run_id=1)
        self._meddle = meddle

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            (number,) = super().push_messages([message])
            numbers.append(number)
            if self._meddle is not None:
                changed = self._meddle(message, self._replies[number])
                if changed is None:
                    del self._replies[number]
                else:
                    self._replies[number] = changed
        return numbers


class TappedWire(Wire):
    """Keeps all that crosses it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, self._keep)
        self._experiment = Experiment(config)
        self._states = Path(config.run.results_dir) / config.run.run_name / "clients"
        self.crossings: list[Crossing] = []

    def _keep(self, message: Message, reply: Message) -> Message:
        if message.metadata.message_type != MessageType.QUERY:
            number, client = place(message)
            up = reply.content if reply.has_content() else None
            held = {name: samples.labels.numpy() for name, samples in self._held(number, client).items()}
            self.crossings.append(Crossing(message.metadata.message_type, number, client, message.content, up, held))
        return reply

    def _held(self, number: int, client: int) -> dict[str, Samples]:
        nothing = torch.zeros(self._experiment.num_classes, dtype=torch.bool)
        empty = ClientState(seen=nothing, buffer=Samples.none(), run=f"{1:020d}")
        store = ClientStore(self._states / f"client-{client:03d}", empty)
        before, after = (store.before(number + later).buffer for later in (0, 1))
        chunk = self._experiment.chunk(client, number)
        return {"chunk": chunk, "old buffer": before, "new buffer": after, "pool": before.followed_by(chunk)}


def place(message: Message) -> tuple[int, int]:
    told = message.content.config_records[keys.CONFIG]
    return int(told.get(keys.ROUND, 0)), int(told[keys.CLIENT])


def run_over(grid: Wire, config: Config) -> Path:
    server_app.run(grid, config, run_id=1)
    return Path(config.run.results_dir) / config.run.run_name


@dataclass(frozen=True)
class Watched:
    """A run that is over: its configuration, its folder, and all that crossed the wire."""

    config: Config
    folder: Path
    crossings: list[Crossing]


@pytest.fixture(scope="module", params=EVERY_METHOD)
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """One run of each method, for the tests that only look."""
    shape = {name.replace("_", "-"): value for name, value in SHAPE.items()}
    root = str(tmp_path_factory.mktemp("watched"))
    return watch(Config.parse({**SMALL, **shape, "method": request.param, "results-dir": root, "run-name": "run"}))


def watch(config: Config) -> Watched:
    grid = TappedWire(config)
    return Watched(config, run_over(grid, config), grid.crossings)


def rounds_of_run(config: Config) -> list[dict[str, Any]]:
    run_inline(config)
    return rounds_of(Path(config.run.results_dir) / config.run.run_name)


@every_method
def test_three_rounds_twice_give_the_same_numbers(small: Make, method: str) -> None:
    for name in ("first", "again"):
        run_inline(small(method=method, run_name=name, **SHAPE))
    root = Path(small().run.results_dir)
    first = rounds_of(root / "first")
    assert first == rounds_of(root / "again")
    assert [record["round"] for record in first] == [1, 2, 3]
    assert all(0 <= value <= 1 for record in first for value in record["client_accuracy"])
    assert all(record["failures"] == [] for record in first)
    assert all(size is None or size <= 12 for record in first for size in record["buffer_size"])


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("fedcbdr", "fedcbdr_temperatures", "published-code"),
        ("fedcbdr", "fedcbdr_scores", "published-code"),
        ("fedcbdr", "fedcbdr_replacement", True),
        ("ofcl", "ofcl_merge", "half"),
        ("ofcl", "ofcl_aggregation", "class-mean"),
        ("refed", "refed_start", "local"),
        ("refed", "refed_start", "persistent"),
        ("refed", "refed_anchor", "previous"),
    ],
)
@pytest.mark.slow
def test_every_reading_repeats_and_differs_from_the_default(small: Make, method: str, key: str, value: object) -> None:
    root = Path(small().run.results_dir)
    for name, changes in (("usual", {}), ("first", {key: value}), ("again", {key: value})):
        run_inline(small(method=method, run_name=name, **SHAPE, **changes))
    first = rounds_of(root / "first")
    assert first == rounds_of(root / "again") != rounds_of(root / "usual")
    assert all(record["failures"] == [] and record["accuracy"] is not None for record in first)
    assert all(size <= 12 for record in first for size in record["buffer_size"])


@every_method
def test_every_method_computes_in_bf16(small: Make, method: str) -> None:
    records = rounds_of_run(small(method=method, precision="bf16", **SHAPE))
    assert all(record["failures"] == [] and record["accuracy"] is not None for record in records)


@every_method
def test_a_client_that_drops_out_for_a_round_comes_back(small: Make, method: str) -> None:
    assert_a_client_drops_out_and_comes_back(small(method=method, deadline=0.05, **SHAPE))


def assert_a_client_drops_out_and_comes_back(config: Config) -> None:
    def lose(message: Message, reply: Message) -> Message | None:
        return None if place(message) == (2, 1) else reply

    records = rounds_of(run_over(Wire(config, lose), config))
    assert records[1]["failures"] and {failure["client"] for failure in records[1]["failures"]} == {1}
    assert records[0]["failures"] == records[2]["failures"] == []
    assert records[1]["client_accuracy"][1] is None and records[2]["client_accuracy"][1] is not None


@every_method
def test_a_reply_with_nan_is_left_out_and_the_others_go_on(small: Make, method: str) -> None:
    config = small(method=method, **SHAPE)
    damaged: list[str] = []

    def spoil(message: Message, reply: Message) -> Message:
        if place(message) == (2, 1) and reply.has_content():
            for record in reply.content.array_records.values():
                for name, array in record.items():
                    values = array.numpy()
                    if values.dtype.kind == "f" and values.size:
                        record[name] = Array(np.full_like(values, np.nan))
                        damaged.append(name)
        return reply

    records = rounds_of(run_over(Wire(config, spoil), config))
    named = {failure["client"] for record in records for failure in record["failures"]}
    assert named == ({1} if damaged else set())
    assert all(record["client_accuracy"][client] is not None for record in records for client in (0, 2))


@every_method
def test_a_repeated_message_is_answered_alike(small: Make, method: str) -> None:
    """Each message is delivered a second time; were anything learnt twice, the run would come out different."""
    once, twice = small(method=method, run_name="once", **SHAPE), small(method=method, run_name="twice", **SHAPE)

    class Echo(Wire):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            numbers = list(super().push_messages(messages))
            for message in messages:
                self._answer(message)
            return numbers

    run_over(Wire(once), once)
    run_over(Echo(twice), twice)
    root = Path(once.run.results_dir)
    assert rounds_of(root / "once") == rounds_of(root / "twice")


@every_method
def test_a_run_cut_off_again_and_again_ends_as_one_that_was_not(small: Make, method: str) -> None:
    """The server dies in one phase of a round or another; each time another one takes up the run."""
    assert_a_run_in_pieces_ends_alike(small, method=method, **SHAPE)


def assert_a_run_in_pieces_ends_alike(small: Make, **changes: Any) -> None:
    run_inline(small(run_name="whole", **changes))
    pieces = small(run_name="pieces", resume=True, **changes)
    folder, cuts = Path(pieces.run.results_dir) / "pieces", 0
    while not (folder / "summary.json").exists():
        left = 4 + 3 * cuts

        def cut(message: Message, reply: Message) -> Message:
            nonlocal left
            left -= 1
            if left < 0 and place(message)[0] > 0:
                raise SystemExit("cut off")
            return reply

        with contextlib.suppress(SystemExit):
            run_over(Wire(pieces, cut), pieces)
        cuts += 1
    assert cuts > 2
    assert rounds_of(folder) == rounds_of(folder.with_name("whole"))
    assert_same_weights(Checkpoints(folder / "server"), Checkpoints(folder.with_name("whole") / "server"))


def assert_same_weights(one: Checkpoints, other: Checkpoints) -> None:
    first, second = one.newest(), other.newest()
    assert first is not None and second is not None and first.round == second.round == SHAPE["rounds"]
    for mine, theirs in ((first.weights, second.weights), (first.arrays, second.arrays)):
        assert list(mine) == list(theirs)
        assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)


def test_no_pixel_crosses_the_wire(watched: Watched) -> None:
    dataset = Experiment(watched.config).dataset
    rows = {bytes(image.tobytes()) for image in np.asarray(dataset.images)}
    shape = dataset.images.shape[1:]
    for array in (array for crossing in watched.crossings for array in crossing.arrays()):
        assert array.dtype != np.uint8 or array.size < int(np.prod(shape)), array.shape
        if array.ndim == 4 and array.shape[1:] == shape:
            scaled = np.clip(np.rint(array * 255 if array.max() <= 1 else array), 0, 255).astype(np.uint8)
            assert not any(bytes(row.tobytes()) in rows for row in scaled)


def test_labels_cross_the_wire_where_the_method_says_so_and_nowhere_else(watched: Watched) -> None:
    """In whatever order, of whatever type, in arrays and in lists of numbers, of whatever samples a client holds."""
    found = set()
    for crossing in watched.crossings:
        columns = {name: np.sort(labels) for name, labels in crossing.labels.items() if len(labels)}
        lists = [np.array(value) for _, value in crossing.numbers() if isinstance(value, list)]
        for array in [*crossing.arrays(), *lists]:
            ordered = np.sort(array, axis=None)
            found |= {(crossing.kind, name) for name, labels in columns.items() if np.array_equal(ordered, labels)}
    assert bool(found) == METHODS[watched.config.method].sends_labels, sorted(found)


@every_method
def test_without_report_classes_no_histogram_leaves_a_client(small: Make, method: str) -> None:
    run = watch(small(method=method, report_classes=False, **{**SHAPE, "rounds": 2}))
    classes = Experiment(run.config).num_classes
    for crossing in run.crossings:
        lists = {name: np.array(value) for name, value in crossing.numbers() if isinstance(value, list)}
        assert keys.BUFFER_CLASSES not in lists
        for labels in crossing.labels.values():
            counts = np.sort(np.bincount(labels, minlength=classes))
            for array in [*crossing.arrays(), *lists.values()]:
                assert not counts.any() or not np.array_equal(np.sort(array, axis=None), counts)
    assert all(record["buffer_classes"] == [None] * 3 for record in rounds_of(run.folder))
    assert_bytes_are_as_the_methods_page_says(run)


def test_bytes_are_as_the_methods_page_says(watched: Watched) -> None:
    assert_bytes_are_as_the_methods_page_says(watched)


@every_choice
def test_every_choice_of_a_methods_own_runs_with_the_pages_bytes(small: Make, choice: dict[str, Any]) -> None:
    roomy = {**CHOICE_SHAPE, "capacity": 20}  # everything fits in the first round and in no other
    assert_bytes_are_as_the_methods_page_says(watch(small(**choice, **roomy)))


@every_choice
def test_under_every_choice_a_client_that_drops_out_comes_back(small: Make, choice: dict[str, Any]) -> None:
    assert_a_client_drops_out_and_comes_back(small(deadline=0.05, **choice, **CHOICE_SHAPE))


@every_choice
def test_under_every_choice_a_run_in_pieces_ends_as_one(small: Make, choice: dict[str, Any]) -> None:
    assert_a_run_in_pieces_ends_alike(small, **choice, **CHOICE_SHAPE)


def assert_bytes_are_as_the_methods_page_says(run: Watched) -> None:
    """Each round's bytes, in the record, are the registry's formulas, which the page shows, summed over the clients."""
    traffic = METHODS[run.config.method].traffic
    config, experiment, records = run.config, Experiment(run.config), rounds_of(run.folder)
    longest = max(experiment.num_classes, config.training.epochs)
    image = torch.zeros(1, *experiment.dataset.images.shape[1:])
    with torch.inference_mode():
        maps = lower_half(experiment.network(experiment.initial_weights()).eval())(image)
    constant = {
        "c": len("run") + 20 + len("round") + 8 + len("client") + 8,
        "S": sum(128 + len(name) + value.nbytes for name, value in experiment.initial_weights().items()),
        "C": experiment.num_classes,
        "F": 8 * config.model.width,
        "A": maps.numel(),
        "M": config.buffer.capacity,
        "balanced": int(config.of(FedcbdrKeys).fedcbdr_balanced),
    }
    held = [0] * config.stream.clients
    for record in records:
        assert record["failures"] == []
        expected = {"down": 0, "up": 0}
        for client in range(config.stream.clients):
            own = [c for c in run.crossings if (c.round, c.client) == (record["round"], client)]
            numbers = [told for crossing in own for told in crossing.numbers()]
            assert all(len(value) <= longest for _, value in numbers if isinstance(value, list)), "arrays go as arrays"
            n = len(experiment.chunk(client, record["round"]))
            symbols = constant | {
                "n": n,
                "m": held[client] + n,
                "k": record["buffer_size"][client],
                "r": max((rank_of(crossing.down) for crossing in own), default=0),
                "R": sum(len(name) + 8 * np.size(value) for name, value in numbers),
            }
            expected["down"] += eval(traffic.down, {"__builtins__": {}}, symbols)
            expected["up"] += eval(traffic.up, {"__builtins__": {}}, symbols)
        assert record["bytes"] == expected
        held = [size or 0 for size in record["buffer_size"]]


def rank_of(content: RecordDict) -> int:
    record = content.array_records.get(keys.ARRAYS, {})
    return record[fedcbdr_names.ROWS].shape[1] if fedcbdr_names.ROWS in record else 0


def test_the_methods_own_messages_are_the_registered_ones(watched: Watched) -> None:
    own = {crossing.kind for crossing in watched.crossings} - {MessageType.TRAIN, MessageType.EVALUATE}
    assert own == set(METHODS[watched.config.method].actions)


def test_only_declared_state_is_on_disk(watched: Watched) -> None:
    files = {path.name for path in watched.folder.glob("clients/client-*/*")}
    files.discard(".lock")
    assert files and all(name.startswith(("state-", "answer-")) and name.endswith(".npz") for name in files)
    top = {path.name for path in watched.folder.iterdir()}
    assert top == {
        *("config.json", "environment.json", "rounds.jsonl", "summary.json", "accuracy.png"),
        *("clients", "server", ".lock"),
    }
