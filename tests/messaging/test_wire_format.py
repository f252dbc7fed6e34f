"""What crosses the wire, and the checks on what comes back."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.made.replies import WEIGHTS, ask, ask_with

from fedkace_flwr.clients.fedkace import GAP, REPLAY_WEIGHTS
from fedkace_flwr.errors import MessageError, StateError
from fedkace_flwr.messaging import wire

SHAPES = wire.shapes_of(WEIGHTS)


def refusal(content: RecordDict, shapes: wire.Shapes | None = SHAPES) -> str:
    """The message with which a reply is refused; one line."""
    with pytest.raises(MessageError) as caught:
        wire.read_reply(ask_with(content), 4, shapes)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def changed(**arrays: np.ndarray | None) -> dict[str, np.ndarray]:
    """The weights with arrays put in place (underscores for dots) or, where None, taken away."""
    named = {name.replace("__", "."): array for name, array in arrays.items()}
    return {name: array for name, array in (WEIGHTS | named).items() if array is not None}


# Packing


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        hnp.arrays(
            st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
        ),
        max_size=4,
    )
)
def test_arrays_keep_names_order_shapes_types_and_bits(weights: dict[str, np.ndarray]) -> None:
    again = wire.unpack(wire.array_record(weights))
    assert list(again) == list(weights)
    for name, array in weights.items():
        assert (again[name].shape, again[name].dtype) == (array.shape, array.dtype)
        assert again[name].tobytes() == array.tobytes()
    assert wire.shapes_of(again) == wire.shapes_of(weights)


def test_a_counter_without_dimensions_stays_one() -> None:
    again = wire.unpack(wire.array_record(WEIGHTS))["bn.num_batches_tracked"]
    assert again.shape == ()
    assert again.dtype == np.int64
    assert again.item() == 5


def test_strided_arrays_are_packed_by_value() -> None:
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    for view in (whole.T, whole[:, ::2], whole[::-1]):
        assert np.array_equal(wire.unpack(wire.array_record({"w": view}))["w"], view)


def test_an_instruction_holds_weights_settings_round_and_client() -> None:
    content = wire.instruction(wire.array_record(WEIGHTS), {"lr": 0.5, "name": "x"}, client=3, round_number=9)
    told = content.config_records[wire.CONFIG]
    assert dict(told) == {"lr": 0.5, "name": "x", wire.ROUND: 9, wire.CLIENT: 3}
    assert list(wire.unpack(content.array_records[wire.ARRAYS])) == list(WEIGHTS)


def test_an_instruction_reaches_the_client_as_it_was_sent() -> None:
    got: list[Message] = []

    def answer(message: Message) -> RecordDict:
        got.append(message)
        return wire.reply_content(None, 1, {})

    assert not ask(answer).has_error()
    assert got[0].content.config_records[wire.CONFIG] == ConfigRecord({wire.ROUND: 1, wire.CLIENT: 0})
    assert np.array_equal(wire.unpack(got[0].content.array_records[wire.ARRAYS])["bn.bias"], WEIGHTS["bn.bias"])


# Reading replies


def test_a_good_reply_is_read_as_it_was_written() -> None:
    metrics = {wire.BUFFER_SIZE: 12, REPLAY_WEIGHTS: [0.1, 1 / 3], wire.TRAINING_SECONDS: 0.25}
    reply = wire.read_reply(ask_with(wire.reply_content(WEIGHTS, 50, metrics)), 4, SHAPES)
    assert reply.client == 4
    assert reply.examples == 50
    assert reply.metrics == metrics
    assert type(reply.metrics[REPLAY_WEIGHTS]) is list
    assert list(reply.weights) == list(WEIGHTS)
    for name, array in WEIGHTS.items():
        assert np.array_equal(reply.weights[name], array)
        assert (reply.weights[name].shape, reply.weights[name].dtype) == SHAPES[name]


def test_weights_come_in_the_order_of_the_model_whatever_the_order_of_the_reply() -> None:
    backwards = dict(reversed(WEIGHTS.items()))
    reply = wire.read_reply(ask_with(wire.reply_content(backwards, 1, {})), 0, SHAPES)
    assert list(reply.weights) == list(WEIGHTS)


def test_an_evaluation_needs_no_weights_and_may_have_tested_nothing() -> None:
    reply = wire.read_reply(ask_with(wire.reply_content(None, 0, {wire.ACCURACY: 0.5})), 1, None)
    assert reply.weights == {}
    assert reply.examples == 0
    assert reply.metrics == {wire.ACCURACY: 0.5}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        (changed(bn__bias=None), ["1 names", "'bn.bias'"]),
        (changed(extra=np.zeros(2, np.float32)), ["1 names", "'extra'"]),
        (changed(bn__bias=None, bn__byas=WEIGHTS["bn.bias"]), ["2 names", "'bn.bias'"]),
        ({}, ["3 names"]),
        (changed(bn__bias=np.zeros(3, np.float32)), ["'bn.bias'", "(3,)", "(2,)"]),
        (changed(bn__bias=np.zeros((1, 2), np.float32)), ["'bn.bias'", "(1, 2)"]),
        (changed(bn__num_batches_tracked=np.zeros(1, np.int64)), ["'bn.num_batches_tracked'", "(1,)"]),
        (changed(bn__bias=np.zeros(2, np.float64)), ["'bn.bias'", "float64", "float32"]),
        (changed(bn__num_batches_tracked=np.array(5, np.int32)), ["int32", "int64"]),
        (changed(bn__bias=np.zeros(2, ">f4")), ["'bn.bias'", ">f4"]),
        (changed(bn__bias=np.array([0, np.nan], np.float32)), ["'bn.bias'", "not finite"]),
        (changed(bn__bias=np.array([np.inf, 0], np.float32)), ["'bn.bias'", "not finite"]),
        (changed(conv__weight=np.full((2, 3), -np.inf, np.float32)), ["'conv.weight'", "not finite"]),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused_by_name(weights: dict[str, Any], parts: list[str]) -> None:
    text = refusal(wire.reply_content(weights, 1, {}))
    assert all(part in text for part in parts), text


def _forged(data: bytes) -> Array:
    """An array that says it is like ``bn.bias``."""
    return Array("float32", (2,), "numpy.ndarray", data)


def _npy(array: np.ndarray, **options: Any) -> bytes:
    packed = io.BytesIO()
    np.save(packed, array, **options)
    return packed.getvalue()


def _archive(array: np.ndarray) -> bytes:
    packed = io.BytesIO()
    np.savez(packed, array)
    return packed.getvalue()


def _huge(array: np.ndarray, shape: bytes) -> bytes:
    """An array's bytes with another shape in their header."""
    content = _npy(array)
    forged = content.replace(b"(2,), }" + b" " * len(shape), b"(" + shape + b",), } ", 1)
    assert len(forged) == len(content)
    assert forged != content
    return forged


@pytest.mark.matrix
@pytest.mark.parametrize(
    "array",
    [
        pytest.param(_forged(data=b""), id="nothing"),
        pytest.param(_forged(data=_npy(WEIGHTS["bn.bias"])[:-1]), id="cut short"),
        pytest.param(_forged(data=b"\x80\x04N."), id="a pickle"),
        pytest.param(_forged(data=_npy(np.array([None, None]), allow_pickle=True)), id="pickled objects"),
        pytest.param(_forged(data=_npy(np.zeros(1, np.float32))), id="another shape than declared"),
        pytest.param(_forged(data=_npy(np.zeros(2, np.float64))), id="another type than declared"),
        pytest.param(_forged(data=_archive(WEIGHTS["bn.bias"])), id="an archive of arrays"),
        pytest.param(_forged(data=b"PK\x03\x04"), id="a broken archive"),
        pytest.param(_forged(data=_huge(np.zeros(2, np.float32), b"999999999999999")), id="far too large"),
    ],
)
def test_an_array_whose_bytes_are_not_what_it_says_is_refused_by_name(array: Array) -> None:
    content = wire.reply_content(None, 1, {})
    content[wire.ARRAYS] = ArrayRecord({**wire.array_record(WEIGHTS), "bn.bias": array})
    assert "'bn.bias'" in refusal(content)


@given(st.binary(max_size=40), st.integers(0, 140), st.integers(0, 140))
def test_no_bytes_of_an_array_raise_anything_but_a_refusal(piece: bytes, start: int, stop: int) -> None:
    good = _npy(WEIGHTS["bn.bias"])
    content = wire.reply_content(None, 1, {})
    content[wire.ARRAYS] = ArrayRecord(
        {**wire.array_record(WEIGHTS), "bn.bias": _forged(good[:start] + piece + good[stop:])}
    )
    try:
        reply = wire.read_reply(ask_with(content), 0, SHAPES)
    except MessageError as error:
        assert "'bn.bias'" in str(error)
    else:
        assert reply.weights["bn.bias"].shape == (2,)
        assert np.isfinite(reply.weights["bn.bias"]).all()


@pytest.mark.parametrize("examples", [0, -1])
def test_training_on_nothing_is_refused(examples: int) -> None:
    assert f"num-examples = {examples}" in refusal(wire.reply_content(WEIGHTS, examples, {}))


def test_missing_records_are_refused_by_name() -> None:
    assert "'arrays'" in refusal(wire.reply_content(None, 1, {}))
    assert "'metrics'" in refusal(RecordDict({wire.ARRAYS: wire.array_record(WEIGHTS)}))
    assert "'metrics'" in refusal(RecordDict(), None)
    for record in (MetricRecord({}), MetricRecord({wire.EXAMPLES: 1.5}), MetricRecord({wire.EXAMPLES: [1]})):
        assert "'num-examples'" in refusal(RecordDict({wire.METRICS: record}), None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [0.5, float("nan")]])
def test_metrics_that_are_not_finite_are_refused_by_name(value: Any) -> None:
    """They would end the run where ``rounds.jsonl`` is written."""
    assert "'gap'" in refusal(wire.reply_content(None, 1, {GAP: value}), None)


# Errors of clients


def _deep() -> None:
    raise StateError("client 3: shape (3, 4), got 'abc'")


def _chained() -> None:
    try:
        _deep()
    except StateError as error:
        raise ValueError("set \"a\" to 'b'") from error


def _key() -> None:
    {}["missing"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("fail", "line"),
    [
        (_deep, "fedkace_flwr.errors.StateError: client 3: shape (3, 4), got 'abc'"),
        (_chained, "ValueError: set \"a\" to 'b'"),
        (_key, "KeyError: 'missing'"),
    ],
)
def test_an_exception_in_a_client_is_reported_as_its_own_line(fail: Callable[[], None], line: str) -> None:
    def answer(message: Message) -> RecordDict:
        fail()
        raise AssertionError

    reply = ask(answer)
    assert reply.has_error()
    with pytest.raises(MessageError) as caught:
        wire.read_reply(reply, 0, SHAPES)
    assert str(caught.value) == line


def _as_a_supernode_says(error: Exception) -> str:
    return str(type(error)) + ":<'" + str(error) + "'>"  # as flwr/supernode/runtime/run_clientapp.py does


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (_as_a_supernode_says(StateError("shape (3, 4)")), "StateError: shape (3, 4)"),
        (_as_a_supernode_says(ValueError("say 'a'")), "ValueError: say 'a'"),
        (_as_a_supernode_says(RuntimeError("\nMessage: Traceback\n  File x\nKeyError: 'a'")), "KeyError: 'a'"),
        ("Message Unavailable - the time to live is over.", "Message Unavailable - the time to live is over."),
        ("", "the client reported an error without a reason"),
        ("\n \n", "the client reported an error without a reason"),
    ],
)
def test_the_reasons_that_flower_gives_come_down_to_one_line(reason: str, line: str) -> None:
    question = ask_with(RecordDict())
    with pytest.raises(MessageError) as caught:
        wire.read_reply(Message(Error(2, reason), reply_to=question), 0, None)
    assert str(caught.value) == line


# Sizes


def test_size_grows_by_the_bytes_of_an_added_array() -> None:
    def size(*more: int) -> int:
        weights = WEIGHTS | {f"extra-{index}": np.zeros(n, np.float32) for index, n in enumerate(more)}
        return wire.size_in_bytes(wire.reply_content(weights, 1, {}))

    header = size(0) - size()
    assert 0 < header < 200
    assert size(1000) - size(0) == 4000
    assert size(1000, 2500) - size(1000) == 4 * 2500 + header


def test_size_counts_numbers_and_settings_too() -> None:
    assert wire.size_in_bytes(RecordDict()) == 0
    few, many = (wire.size_in_bytes(wire.reply_content(None, 1, {"m": [0.5] * n})) for n in (1, 11))
    assert many - few == 80
    plain = wire.size_in_bytes(wire.instruction(ArrayRecord(), {}, 0, 1))
    assert wire.size_in_bytes(wire.instruction(ArrayRecord(), {"note": "x" * 50}, 0, 1)) >= plain + 50


def test_sizes_are_flowers_own_and_empty_texts_and_lists_are_counted_too() -> None:
    values: dict[str, Any] = {
        "flag": True,
        "n": 1,
        "x": 2.5,
        "text": "abc",
        "raw": b"abcd",
        "many": [1, 2],
        "some": ["a", "bc"],
    }
    record = ConfigRecord(values)
    assert wire.size_in_bytes(RecordDict({"config": record})) == record.count_bytes()
    empties: tuple[Any, ...] = ("", b"", [])
    for nothing in empties:
        assert wire.size_in_bytes(RecordDict({"config": ConfigRecord({"x": nothing})})) == 0


def test_the_size_of_an_empty_text_is_none() -> None:
    """Flower's own count raises, and a client may send one: in the server that would be the end of the run."""
    content = RecordDict({"more": ConfigRecord({"empty": "", "none": b"", "text": "abc", "bytes": b"ab"})})
    assert wire.size_in_bytes(content) == len("text") + 3 + len("bytes") + 2
