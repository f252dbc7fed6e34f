"""No content of a file makes its reader do anything but read it or say in one line that it cannot.

The hypothesis profile ``thorough`` tries many inputs; ``coverage_guided.py`` does the same by coverage.
"""

import gzip
import json
import math
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.made.parsers import Parsers
from support.made.pristine import (
    CORPUS,
    NAMES,
    pristine,
    pristine_idx,
    pristine_model,
    pristine_sealed,
    pristine_weights,
    sealed,
)

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, StateError
from fedkace_flwr.storage.atomic import header_of, unpack

BODIES = pristine()
SEALED = pristine_sealed()
WEIGHTS = pristine_weights()
IDX = pristine_idx()
MODEL = pristine_model()
KEYS = sorted(Config().flat())


def fuzzed(test: Any) -> Any:
    return pytest.mark.exhaustive(settings(suppress_health_check=list(HealthCheck))(test))


pytestmark = pytest.mark.timeout(0)


@pytest.fixture(scope="module")
def parsers() -> Iterator[Parsers]:
    made = Parsers()
    yield made
    made.close()


# Stored files


def mutated(content: bytes, draw: st.DrawFn) -> bytes:
    """A few bytes changed, cut out, doubled or replaced by telling ones."""
    body = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(body) - 1)))
        kind = draw(st.integers(0, 4))
        length = draw(st.integers(1, 40))
        if kind == 0 and body:
            body[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            del body[at : at + length]
        elif kind == 2:
            body[at:at] = body[at : at + length]
        elif kind == 3:
            body[at : at + 4] = draw(
                st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", b"PK\1\2", b"PK\5\6"])
            )
        else:
            body[at : at + length] = draw(st.binary(max_size=length))
    return bytes(body)


@st.composite
def changed_files(draw: st.DrawFn) -> bytes:
    body = mutated(BODIES[draw(st.sampled_from(NAMES))], draw)
    return sealed(body) if draw(st.integers(0, 9)) else mutated(sealed(body), draw)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**63, -(2**63), 10**400, 1e308, "", "2", 2, 1])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)
dtypes = st.sampled_from(["?", "<i8", "<f4", "|u1", ">i8", "<f8", "<i4", "<c16", "<U2", "|S3", "<M8[s]", "|V4"])


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    dtype = np.dtype(draw(dtypes))
    size = math.prod(shape) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)).ljust(size, b"\0"), dtype=np.uint8).view(dtype).reshape(shape) if size else np.zeros(shape, dtype)  # fmt: skip


@st.composite
def other_records(draw: st.DrawFn) -> bytes:
    """Whole archives with the right checksum in which fields are missing, of another kind, or too many."""
    with np.load(BytesIO(BODIES[draw(st.sampled_from(NAMES))])) as content:
        columns = {name: content[name] for name in content.files}
    record = json.loads(columns.pop("record").tobytes())
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from([*record, *columns, "new", "weights.new", "extra.new"]))
        gone = draw(st.integers(0, 4)) == 0
        for part, value in ((record, values), (columns, arrays())):
            if name in part or (name not in record and name not in columns):
                part.pop(name, None) if gone else part.__setitem__(name, draw(value))
    text = json.dumps(record).encode()
    if draw(st.integers(0, 9)) == 0:
        text = mutated(text, draw)
    packed = BytesIO()
    np.savez(packed, record=np.frombuffer(text, dtype=np.uint8), **columns)
    return sealed(packed.getvalue())


@fuzzed
@given(changed_files())
def test_changed_stored_files_under_a_right_checksum(parsers: Parsers, content: bytes) -> None:
    parsers.stored(content)


@fuzzed
@given(other_records())
def test_stored_files_with_other_fields(parsers: Parsers, content: bytes) -> None:
    parsers.stored(content)


# Any bytes, and changed ones, for every kind of file


def readers(parsers: Parsers) -> dict[str, tuple[Callable[[bytes], None], list[bytes]]]:
    """Each reader, with files as this package or others write them."""
    return {
        "stored": (parsers.stored, [sealed(body) for body in BODIES.values()]),
        "archive": (parsers.archived, list(BODIES.values())),
        "encrypted": (parsers.encrypted, SEALED),
        "head of an encrypted file": (lambda head: parsers.encrypted(head + SEALED[0][80:]), [SEALED[0][:80]]),
        "model": (parsers.model, [MODEL]),
        **{f"weights{suffix}": (partial(parsers.weights, suffix), [WEIGHTS[suffix]]) for suffix in WEIGHTS},
        **{f"idx{suffix}": (partial(parsers.idx, suffix), IDX[suffix]) for suffix in IDX},
    }


@pytest.mark.parametrize(
    "kind",
    ["stored", "archive", "encrypted", "head of an encrypted file", "model"]
    + [f"weights{suffix}" for suffix in sorted(WEIGHTS)]
    + [f"idx{suffix}" for suffix in sorted(IDX)],
)
@fuzzed
@given(st.data())
def test_any_bytes_and_changed_files(parsers: Parsers, kind: str, data: st.DataObject) -> None:
    read, originals = readers(parsers)[kind]
    changed = st.composite(lambda draw: mutated(draw(st.sampled_from(originals)), draw))()
    any_bytes = st.binary(max_size=300)
    read(data.draw(changed | changed | any_bytes | any_bytes.map(sealed) | any_bytes.map(lambda body: b"\3" + body)))


# Images of a data set


@st.composite
def idx_files(draw: st.DrawFn) -> bytes:
    """A header with lengths small and huge, and some bytes."""
    lengths = draw(st.lists(st.integers(0, 4) | st.sampled_from([28, 2**16, 2**31, 2**32 - 1]), max_size=4))
    head = bytes([0, 0, draw(st.sampled_from([8, 8, 8, 9, 13])), draw(st.sampled_from([len(lengths), 1, 3]))])
    return head + b"".join(length.to_bytes(4, "big") for length in lengths) + draw(st.binary(max_size=80))


@fuzzed
@given(st.sampled_from(sorted(IDX)), st.binary(max_size=100) | idx_files(), st.booleans())
def test_any_bytes_as_an_idx_file(parsers: Parsers, suffix: str, content: bytes, packed: bool) -> None:
    parsers.idx(suffix, gzip.compress(content) if packed else content)


@pytest.mark.parametrize("suffix", sorted(IDX))
def test_an_idx_file_that_promises_much_takes_no_memory_for_it(parsers: Parsers, suffix: str) -> None:
    content = bytes([0, 0, 8, 3]) + b"".join(length.to_bytes(4, "big") for length in (2**20, 32, 32)) + bytes(10_000)
    tracemalloc.start()
    try:
        parsers.idx(suffix, gzip.compress(content) if suffix else content)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


# Models that were taken away


@fuzzed
@given(st.data(), st.integers(1, 3))
def test_changed_descriptions_of_models(parsers: Parsers, data: st.DataObject, count: int) -> None:
    header, start = header_of(MODEL)
    for _ in range(count):
        part = header["__metadata__"] if data.draw(st.booleans()) else header
        value = data.draw(values)
        part[data.draw(st.sampled_from(sorted(part)))] = value if data.draw(st.booleans()) else json.dumps(value)
        if not header["__metadata__"] or not isinstance(header["__metadata__"], dict):
            break
    text = json.dumps(header).encode()
    parsers.model(len(text).to_bytes(8, "little") + text + MODEL[start:])


def _archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return packed.getvalue()


def _npy(header: str, content: bytes = b"") -> bytes:
    text = header.encode().ljust(117, b" ") + b"\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + content


def _header(shape: object, dtype: str = "<f8") -> str:
    return f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}, }}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        _archive({"record.npy": bytes(200_000_000)}, zipfile.ZIP_DEFLATED),
        _archive({"record.npy": _npy(_header((2**40,)))}),
        _archive({"record.npy": _npy(_header((2**62, 4)))}),
        _archive({"record.npy": _npy(_header((2**63, 2**63)))}),
        _archive({"record.npy": _npy(_header((-1, -8)), bytes(64))}),
        _archive({"record.npy": _npy(_header((10**18,), "|S0"))}),
        _archive({"record.npy": _npy(_header((0, 10**30)))}),
        _archive({"record.npy": _npy(_header((1,), "|O"), bytes(8))}),
        _archive({"record.npy": _npy(_header((1,), f"|S{2**31 - 1}"))}),
        _archive({"record.npy": _npy("(" * 9000)}),
        _archive({"record.npy": _npy("[" * 9000 + "]" * 900)}),
        _archive({"record.npy": b"\x93NUMPY\2\0\xff\xff\xff\xff"}),
        _archive({"record.npy": _npy(_header((2,), "|u1"), b"[" * 2)}),
    ],
    ids=["compressed", "tebibytes", "overflow", "large", "negative", "nothing", "empty", "objects", "text", "nested", "lists", "header", "short"],
)  # fmt: skip
def test_what_promises_more_than_it_holds_is_refused_before_memory_is_taken(parsers: Parsers, body: bytes) -> None:
    tracemalloc.start()
    try:
        if b"[[" not in body[-200:]:
            with pytest.raises(StateError):
                unpack(body)
        parsers.stored(sealed(body))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_members_that_share_their_bytes_are_refused() -> None:
    """Many entries of a directory that point to one member: an archive that unfolds to many times its size."""
    body = _archive({"a.npy": _npy(_header((1000,), "|u1"), bytes(1000))})
    start = body.index(b"PK\1\2")
    end = body.index(b"PK\5\6")
    entries = b"".join(body[start:end].replace(b"a.npy", b"%c.npy" % letter) for letter in range(97, 123))
    tail = bytearray(body[end:])
    tail[8:12] = (26).to_bytes(2, "little") * 2
    tail[12:16] = len(entries).to_bytes(4, "little")
    folded = body[:start] + entries + bytes(tail)
    with pytest.raises(StateError, match="promises more than it holds"):
        unpack(folded)


# Studies and run configurations

words = st.sampled_from(
    [
        *KEYS,
        "title",
        "config",
        "grid",
        "scales",
        "paper",
        "base",
        "engine",
        "workers",
        "gpu-fraction",
        "only",
    ]
)
yaml_scalars = scalars | words | st.dates() | st.datetimes() | st.binary(max_size=4)
yaml_values = st.recursive(
    yaml_scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | yaml_scalars, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def study_files(draw: st.DrawFn) -> bytes:
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(
            st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass"))
        )
    if kind == 1:
        return mutated(draw(st.sampled_from(CORPUS)).encode(), draw)
    if kind == 2:
        pieces = st.sampled_from(["{", "}", "[", "]", ": ", "- ", "\n", "  ", "&a ", "*a ", "!!int ", "!!float ", "!!set ", "<<: ", "? ", "| ", "> ", "'", '"', "~", "1e999", "0x" + "f" * 5000, "~x/", "1:2", "2001-01-01", ".nan", "!!timestamp ", "!!binary ", "%YAML 1.1\n", "---\n", "...\n", "\t", "\0", "=", "!!omap ", "!!python/name:os.system ", "!!bool ", "!!null "])  # fmt: skip
        return "".join(draw(st.lists(pieces | words | st.text(max_size=3), max_size=15))).encode(
            "utf-8", "surrogatepass"
        )
    return yaml.safe_dump(draw(st.dictionaries(words, yaml_values, max_size=4)), allow_unicode=True).encode("utf-8", "surrogatepass")  # fmt: skip


@fuzzed
@given(study_files())
def test_any_study_file(parsers: Parsers, content: bytes) -> None:
    parsers.study(content)


@fuzzed
@given(study_files())
def test_any_setting(parsers: Parsers, content: bytes) -> None:
    parsers.setting(content)
    parsers.setting(b"overlap=" + content)


@fuzzed
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=12), values | st.binary(max_size=3), max_size=6))
def test_any_run_config(config: dict[str, Any]) -> None:
    try:
        parsed = Config.parse(config)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert Config.parse(parsed.flat()) == parsed
