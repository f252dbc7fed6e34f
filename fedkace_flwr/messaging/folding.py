"""Packing the arrays of a record into a single array for transport.

Flower sends each array of a record as a separate object, which costs one request and several transactions of the
SuperLink's database per array in each direction. A ResNet-18 has 122 arrays. Between machines, the arrays of a record
are therefore folded into one array of bytes: a JSON header with the name, type, shape and length of each array,
followed by their contents in the same order. This module interprets only the lengths; unfolded arrays are checked
like any others.
"""

import json
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedkace_flwr.errors import MessageError

FOLDED = "folded"
"""Key in a message's configuration: its arrays are folded, and the reply must fold its own."""

_NAME, _KIND = "fedkace.folded", "fedkace.folded"
_LARGEST = (
    64 * 2**20
)  # bytes; folding larger records saves little, and the limit bounds what an untrusted message can claim
_LARGEST_HEADER = 2**20
_PREFIX = 8


def fold(record: ArrayRecord) -> ArrayRecord:
    """Fold the arrays of a record into one; return records of fewer than two arrays or more than 64 MiB unchanged."""
    if len(record) < 2 or sum(len(array.data) for array in record.values()) > _LARGEST:
        return record
    head = [[name, each.dtype, each.stype, list(each.shape), len(each.data)] for name, each in record.items()]
    header = json.dumps(head, separators=(",", ":")).encode()
    if len(header) > _LARGEST_HEADER:
        return record
    data = b"".join([len(header).to_bytes(_PREFIX, "big"), header, *(array.data for array in record.values())])
    return ArrayRecord({_NAME: Array("uint8", (len(data),), _KIND, data)})


def unfold(record: ArrayRecord) -> ArrayRecord:
    """Undo :func:`fold`; return a record unchanged if it is not folded, or larger than :func:`fold` can produce.

    Raises
    ------
    MessageError
        The bytes are not in the format that :func:`fold` writes.
    """
    array = record.get(_NAME)
    if array is None or array.stype != _KIND or len(record) > 1 or len(array.data) > _LARGEST + 2 * _LARGEST_HEADER:
        return record
    data = memoryview(array.data)
    length = int.from_bytes(data[:_PREFIX], "big")
    if len(data) < _PREFIX or length > min(_LARGEST_HEADER, len(data) - _PREFIX):
        raise MessageError(f"folded arrays cannot be read (header of {length} bytes)", "arrays")
    try:
        head = json.loads(bytes(data[_PREFIX : _PREFIX + length]))
    except (ValueError, RecursionError) as error:
        raise MessageError(f"folded arrays cannot be read ({type(error).__name__})", "arrays") from error
    if not isinstance(head, list) or not all(_is_entry(entry) for entry in head):
        raise MessageError("folded arrays cannot be read (unknown header format)", "arrays")
    start = _PREFIX + length
    if start + sum(entry[4] for entry in head) != len(data) or len({entry[0] for entry in head}) != len(head):
        raise MessageError("folded arrays cannot be read (inconsistent lengths or duplicate names)", "arrays")
    arrays: dict[str, Array] = {}
    for name, dtype, stype, shape, size in head:
        arrays[name] = Array(dtype, tuple(shape), stype, bytes(data[start : start + size]))
        start += size
    return ArrayRecord(arrays)


def folded(content: RecordDict, known: dict[int, ArrayRecord] | None = None) -> RecordDict:
    """Return a message's records with their arrays folded.

    Parameters
    ----------
    content : RecordDict
        The message's records; not modified.
    known : dict of int to ArrayRecord, optional
        Records folded so far, by the identity of the original, so that a model sent to many clients is folded once.
    """
    known = {} if known is None else known
    result = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            if id(record) not in known:
                known[id(record)] = fold(record)
            record = known[id(record)]
        result[name] = record
    return result


def unfolded(content: RecordDict) -> RecordDict:
    """Return a message's records with their arrays unfolded: the inverse of :func:`folded`.

    Raises
    ------
    MessageError
        As for :func:`unfold`.
    """
    parts: dict[str, Any] = {
        name: unfold(record) if isinstance(record, ArrayRecord) else record for name, record in content.items()
    }
    return RecordDict(parts)


def marked(content: RecordDict, config: str) -> RecordDict:
    """Return the same records, with the configuration record named ``config`` marking the arrays as folded."""
    result = RecordDict(dict(content))
    result[config] = ConfigRecord({**content.config_records.get(config, {}), FOLDED: True})
    return result


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 5:
        return False
    *texts, shape, size = entry
    whole = isinstance(shape, list) and all(type(side) is int and side >= 0 for side in [*shape, size])
    return whole and all(isinstance(text, str) for text in texts)
