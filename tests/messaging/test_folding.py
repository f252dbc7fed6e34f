"""Arrays on the road: one array of bytes a record, and the same records where they are read."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedkace_flwr import client_app, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.errors import MessageError
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.messaging import folding, wire
from fedkace_flwr.registry import METHODS
from fedkace_flwr.rounds.exchange import crosses_network

Make = Callable[..., Config]
arrays = st.dictionaries(
    st.text(max_size=20),
    hnp.arrays(st.sampled_from([np.float32, np.int64, np.uint8, np.bool_]), hnp.array_shapes(min_dims=0, max_dims=3)),
    max_size=6,
)


class Road(InlineGrid):
    """The inline engine's grid, as if it were Flower's between machines; keeps what passes."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.passed: list[RecordDict] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.passed += [message.content for message in messages]
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        self.passed += [reply.content for reply in replies if reply.has_content()]
        return replies


Road.__module__ = "flwr.road"


def same(one: ArrayRecord, other: ArrayRecord) -> bool:
    return list(one.items()) == list(other.items())


@given(arrays)
def test_what_is_folded_comes_back_as_it_was(named: dict[str, np.ndarray]) -> None:
    record = wire.array_record(named)
    packed = folding.fold(record)
    assert len(packed) == min(1, len(record))
    assert same(folding.unfold(packed), record)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_read_or_refused_in_one_line(noise: bytes, framed: bool) -> None:
    data = len(noise).to_bytes(8, "big") + noise if framed else noise
    record = ArrayRecord({"fedkace.folded": Array("uint8", (len(data),), "fedkace.folded", data)})
    try:
        folding.unfold(record)
    except MessageError as error:
        assert len(str(error).splitlines()) == 1


def forged(head: object, body: bytes = b"") -> ArrayRecord:
    header = json.dumps(head).encode()
    data = len(header).to_bytes(8, "big") + header + body
    return ArrayRecord({"fedkace.folded": Array("uint8", (len(data),), "fedkace.folded", data)})


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("head", "body"),
    [
        ({}, b""),
        ([["w", "float32", "numpy.ndarray", [1], -4]], b""),
        ([["w", "float32", "numpy.ndarray", [-1], 4]], b"1234"),
        ([["w", "float32", "numpy.ndarray", [1], True]], b"1"),
        ([["w", "float32", "numpy.ndarray", [1], 4]], b"123"),
        ([["w", "float32", "numpy.ndarray", [1], 4]], b"12345"),
        ([["w", "float32", "numpy.ndarray", [1], 2], ["w", "float32", "numpy.ndarray", [1], 2]], b"1234"),
        ([["w", "float32", "numpy.ndarray", 1, 4]], b"1234"),
        ([[3, "float32", "numpy.ndarray", [1], 4]], b"1234"),
        ([["w", "float32"]], b""),
        ("[" * 5000, b""),
    ],
)
def test_a_forged_header_is_refused(head: object, body: bytes) -> None:
    with pytest.raises(MessageError, match="folded arrays cannot be read"):
        folding.unfold(forged(head, body))


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8, (2**20 + 1).to_bytes(8, "big") + bytes(2**20 + 1)])
def test_a_header_longer_than_the_bytes_or_than_any_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="header of"):
        folding.unfold(ArrayRecord({"fedkace.folded": Array("uint8", (len(data),), "fedkace.folded", data)}))


def test_a_header_nested_without_end_is_refused() -> None:
    nested = b"[" * 100_000
    data = len(nested).to_bytes(8, "big") + nested
    with pytest.raises(MessageError, match="folded arrays cannot be read"):
        folding.unfold(ArrayRecord({"fedkace.folded": Array("uint8", (len(data),), "fedkace.folded", data)}))


def test_large_records_travel_as_they_are_and_are_left_to_the_check_of_sizes() -> None:
    large = wire.array_record({"a": np.zeros(2**26, np.uint8), "b": np.zeros(1, np.uint8)})
    assert folding.fold(large) is large
    stranger = ArrayRecord({"fedkace.folded": Array("uint8", (2**27,), "fedkace.folded", bytes(2**27))})
    assert folding.unfold(stranger) is stranger


def test_a_record_for_many_is_folded_once_and_other_records_stay() -> None:
    model = wire.array_record({"a": np.arange(3), "b": np.arange(2)})
    known: dict[int, ArrayRecord] = {}
    contents = [RecordDict({"arrays": model, "config": ConfigRecord({"client": k})}) for k in range(2)]
    one, two = (folding.folded(content, known) for content in contents)
    assert one["arrays"] is two["arrays"]
    assert list(one["arrays"]) == ["fedkace.folded"] and two["config"] == ConfigRecord({"client": 1})
    assert contents[0]["arrays"] is model
    assert same(folding.unfolded(one).array_records["arrays"], model)
    numbers = RecordDict({"metrics": MetricRecord({"x": 1.0})})
    assert folding.unfolded(folding.folded(numbers)) == numbers


SENDING = [name for name, method in METHODS.items() if not method.preset and name != "centralized"]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("method", "more"), [*((name, {}) for name in SENDING), ("fedkace", {"secagg": True})])
def test_a_run_whose_messages_are_folded_is_the_same_run(
    small: Make, tmp_path: Path, method: str, more: dict[str, bool]
) -> None:
    """Every method that sends anything: no record of more than one array, and the inline engine's numbers."""
    lines = {}
    for name, kind in (("plain", InlineGrid), ("road", Road)):
        config = small(method=method, run_name=name, rounds=2, **more)
        grid = kind(client_app.app, config.stream.clients, config.flat(), 7)
        assert crosses_network(grid) == (kind is Road)
        server_app.run(grid, config, 7)
        folder = Path(config.run.results_dir) / name
        lines[name] = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        if isinstance(grid, Road):
            records = [record for content in grid.passed for record in content.array_records.values()]
            assert records and all(len(record) <= 1 for record in records)
    for plain, road in zip(lines["plain"], lines["road"], strict=True):
        plain.pop("seconds"), road.pop("seconds")
        # SecAgg+ rounds by chance, differently in each run.
        assert plain["failures"] == road["failures"] == [] and (more or plain == road)
