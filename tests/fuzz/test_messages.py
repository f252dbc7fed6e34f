"""Whatever a client sends, reading it ends in a reply that fits or in a MessageError, and in nothing else.

An example is a record of arbitrary content, or the seed from which MUTANTS mutants of a good array's bytes are made.
The hypothesis profile ``thorough`` tries many more examples.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.made.parsers import Parsers
from support.made.pristine import LIMITS, SHAPES, WEIGHTS, folded_weights
from support.made.replies import ask_with

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import validation, wire

pytestmark = pytest.mark.exhaustive

MUTANTS = 50
budget = settings(suppress_health_check=list(HealthCheck))

GOOD = {name: array.data for name, array in wire.array_record(WEIGHTS).items()}
FOLDED = folded_weights()
KNOWN = sorted(value for name, value in vars(wire).items() if name.isupper() and isinstance(value, str))


@pytest.fixture(scope="module")
def parsers() -> Iterator[Parsers]:
    made = Parsers()
    yield made
    made.close()


names = st.sampled_from([*SHAPES, *KNOWN]) | st.text(max_size=20)
numbers = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**63, 1e308, float("nan")])
lists = st.lists(st.integers(), max_size=8) | st.lists(st.floats(), max_size=8)
metric_records = st.dictionaries(names, numbers | lists, max_size=8).map(MetricRecord)
settings_told = st.text() | st.binary() | st.integers() | st.booleans()
config_records = st.dictionaries(names, settings_told, max_size=4).map(lambda told: ConfigRecord(dict(told)))
stypes = st.sampled_from(["numpy.ndarray", "numpy.ndarray", "torch.Tensor", ""]) | st.text(max_size=5)
contents = st.sampled_from(sorted(GOOD.values())) | st.binary(max_size=300)
an_array = st.builds(
    Array,
    st.sampled_from(["float32", "object"]) | st.text(max_size=8),
    st.lists(st.integers(), max_size=4).map(tuple),
    stypes,
    contents,
)
good_arrays = st.just(wire.array_record(WEIGHTS))
array_records = good_arrays | st.dictionaries(names, an_array, max_size=6).map(ArrayRecord)
mixed_arrays = st.dictionaries(st.sampled_from(list(SHAPES)), an_array).map(
    lambda odd: ArrayRecord({**wire.array_record(WEIGHTS), **odd})
)
record_names = st.sampled_from([wire.ARRAYS, wire.METRICS, wire.CONFIG]) | st.text(max_size=5)
records = st.dictionaries(record_names, array_records | mixed_arrays | metric_records | config_records, max_size=4).map(
    RecordDict
)
likely = st.builds(
    lambda arrays, metrics, examples: RecordDict(
        {wire.ARRAYS: arrays, wire.METRICS: MetricRecord({**metrics, wire.EXAMPLES: examples})}
    ),
    good_arrays | mixed_arrays,
    metric_records,
    st.integers(-2, 60) | st.integers(),
)
errors = st.builds(Error, st.integers(0, 9), st.text() | st.binary().map(lambda text: text.decode("latin-1")))


@budget
@given(records | likely | errors)
def test_no_content_of_a_reply_raises_anything_but_a_refusal(parsers: Parsers, content: RecordDict | Error) -> None:
    parsers.reply(content)


TOKENS = [
    *(b"'descr'", b"'fortran_order'", b"'shape'", b"True", b"False", b"None", b"(", b")", b"[", b"{", b"}", b"-", b","),
    *(b"'<f4'", b"'|O'", b"'<i8'", b"'>f4'", b"[('a', '<f4')]", b"9" * 20, b"0", b"1e9", b"\x00", b"\xff" * 4, b"\n"),
    *(
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x02\x00",
        b"\x93NUMPY\x03\x00",
        b"PK\x03\x04",
        b"\x80\x04N.",
        b"L",
        b"\xc3\xa9",
    ),
]


def mutant(data: bytes, draws: np.random.Generator) -> bytes:
    """Bytes with one to five pieces changed, taken out, put in, doubled or cut off; mostly in the header."""
    for _ in range(int(draws.integers(1, 6))):
        end = len(data) if draws.random() < 0.3 else min(len(data), 80)
        start = int(draws.integers(0, end + 1))
        length = int(draws.integers(0, 12))
        piece = TOKENS[int(draws.integers(len(TOKENS)))] if draws.random() < 0.6 else draws.bytes(length)
        before, after = data[:start], data[start:]
        data = [
            before + piece + after[len(piece) :],
            before + piece + after,
            before + after[length:],
            before + after[:length] * 3 + after[length:],
            before,
        ][int(draws.choice(5, p=[0.4, 0.3, 0.15, 0.1, 0.05]))]
    return data


@budget
@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 2**64 - 1))
def test_no_bytes_of_an_array_raise_anything_but_a_refusal(name: str, seed: int) -> None:
    draws, array = np.random.default_rng(seed), wire.array_record(WEIGHTS)[name]
    shapes = {name: SHAPES[name]}
    for _ in range(MUTANTS):
        record = ArrayRecord()
        record[name] = Array(array.dtype, tuple(array.shape), array.stype, mutant(array.data, draws))
        try:
            read_back: Any = wire.checked_arrays(record, shapes)[name]
        except MessageError as error:
            assert repr(name) in str(error) and len(str(error).splitlines()) == 1
        else:
            assert (read_back.shape, read_back.dtype) == SHAPES[name] and np.isfinite(read_back).all()


@budget
@given(st.integers(0, 2**64 - 1))
def test_no_folded_arrays_raise_anything_but_a_refusal(parsers: Parsers, seed: int) -> None:
    draws = np.random.default_rng(seed)
    for _ in range(MUTANTS):
        parsers.folded(mutant(FOLDED, draws))


def test_a_good_reply_gets_through_all_of_it() -> None:
    """Else the tests above would show nothing."""
    question = ask_with(RecordDict())
    content = wire.reply_content(WEIGHTS, 5, {wire.ACCURACY: 0.5})
    reply = wire.read_reply(Message(content, reply_to=question), 0, SHAPES)
    validation.check_metrics(reply.metrics, LIMITS)
    validation.check_statistics(reply.weights, WEIGHTS, LIMITS)
    assert question.metadata.message_type == MessageType.TRAIN
