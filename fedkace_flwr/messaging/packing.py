"""Many arrays as one, for the road.

Flower sends each array of a record as an object of its own: one request and several transactions of the SuperLink's
database for each, on its way up and again on its way down. A ResNet-18 has 122 arrays. Between machines they therefore
travel as one array of bytes a record: a header, which is JSON with name, type, shape and length of each, and what they
hold one after the other. Nothing in it is interpreted here but the lengths; what is taken out is checked as if it had
come by itself.
"""

import json
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedkace_flwr.errors import MessageError

FOLDED = "folded"
"""Key of a message's configuration: its arrays are folded, and those of the reply shall be."""

_NAME, _KIND = "fedkace.folded", "fedkace.folded"
_LARGEST = 64 * 2**20  # bytes; beyond, an array more or less is no matter, and a stranger's message stays as it is
_LARGEST_HEADER = 2**20
_PREFIX = 8


def fold(record: ArrayRecord) -> ArrayRecord:
    """Arrays as one; a record of fewer than two, or of more than 64 MiB, as it is."""
    if len(record) < 2 or sum(len(array.data) for array in record.values()) > _LARGEST:
        return record
    head = [[name, each.dtype, each.stype, list(each.shape), len(each.data)] for name, each in record.items()]
    header = json.dumps(head, separators=(",", ":")).encode()
    if len(header) > _LARGEST_HEADER:
        return record
    data = b"".join([len(header).to_bytes(_PREFIX, "big"), header, *(array.data for array in record.values())])
    return ArrayRecord({_NAME: Array("uint8", (len(data),), _KIND, data)})


def unfold(record: ArrayRecord) -> ArrayRecord:
    """Undo :func:`fold`; a record that is not folded, or larger than that makes any, as it is.

    Raises
    ------
    MessageError
        The bytes are not what :func:`fold` writes.
    """
    array = record.get(_NAME)
    if array is None or array.stype != _KIND or len(record) > 1 or len(array.data) > _LARGEST + 2 * _LARGEST_HEADER:
        return record
    data = memoryview(array.data)
    length = int.from_bytes(data[:_PREFIX], "big")
    if len(data) < _PREFIX or length > min(_LARGEST_HEADER, len(data) - _PREFIX):
        raise MessageError(f"folded arrays cannot be read (a header of {length} bytes)", "arrays")
    try:
        head = json.loads(bytes(data[_PREFIX : _PREFIX + length]))
    except (ValueError, RecursionError) as error:
        raise MessageError(f"folded arrays cannot be read ({type(error).__name__})", "arrays") from error
    if not isinstance(head, list) or not all(_is_entry(entry) for entry in head):
        raise MessageError("folded arrays cannot be read (their header is another's)", "arrays")
    start = _PREFIX + length
    if start + sum(entry[4] for entry in head) != len(data) or len({entry[0] for entry in head}) != len(head):
        raise MessageError("folded arrays cannot be read (lengths or names do not fit)", "arrays")
    arrays: dict[str, Array] = {}
    for name, dtype, stype, shape, size in head:
        arrays[name] = Array(dtype, tuple(shape), stype, bytes(data[start : start + size]))
        start += size
    return ArrayRecord(arrays)


def folded(content: RecordDict, known: dict[int, ArrayRecord] | None = None) -> RecordDict:
    """A message's records with their arrays folded.

    Parameters
    ----------
    content : RecordDict
        Left as it is.
    known : dict of int to ArrayRecord, optional
        What was folded before, by the record's identity: a model that goes to many clients is folded once.
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
    """Undo :func:`folded`.

    Raises
    ------
    MessageError
        As :func:`unfold`.
    """
    parts: dict[str, Any] = {
        name: unfold(record) if isinstance(record, ArrayRecord) else record for name, record in content.items()
    }
    return RecordDict(parts)


def marked(content: RecordDict, config: str) -> RecordDict:
    """The same records, the configuration record of that name saying that the arrays are folded."""
    result = RecordDict(dict(content))
    result[config] = ConfigRecord({**content.config_records.get(config, {}), FOLDED: True})
    return result


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 5:
        return False
    *texts, shape, size = entry
    whole = isinstance(shape, list) and all(type(side) is int and side >= 0 for side in [*shape, size])
    return whole and all(isinstance(text, str) for text in texts)
