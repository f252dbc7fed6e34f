"""The record keys and metric names used in messages, and the checks on what server and clients send each other.

Arrays travel as ArrayRecords, numbers as MetricRecords and ConfigRecords; nothing is pickled.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedkace_flwr.errors import MessageError
from fedkace_flwr.keys import is_class_name
from fedkace_flwr.npy import HeaderError, read_array, read_content, read_header

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
ROUND, CLIENT, RUN = "round", "client", "run"
INBOX, TEST = "inbox", "test"
FROZEN = "frozen"
WORKING = "working"
VERSION = "version"
WAITING, MOST = "waiting", "most"
UNLABELLED, DROPPED, REJECTED = "unlabelled", "dropped", "rejected"
GATE, ACCEPTED = "gate", "accepted"
UNDONE = "undone-rounds"
CLASS_NAMES, CLASS_ROUNDS, NEW_CLASSES = "class-names", "class-rounds", "new-classes"
PARTITION, PARTITIONS = "partition-id", "num-partitions"
EXAMPLES = "num-examples"

SAT_OUT = "sat-out"
ACCURACY = "accuracy"
LOCAL_ACCURACY = "local-accuracy"
GLOBAL_ACCURACY = "global-accuracy"
ARRIVED_ACCURACY = "arrived-accuracy"
LOCAL_UNMASKED = "local-accuracy-unmasked"
GLOBAL_UNMASKED = "global-accuracy-unmasked"
CLASS_ACCURACY = "class-accuracy"
NEW_CLASS_ACCURACY = "new-class-accuracy"
PREQUENTIAL_ACCURACY, PREQUENTIAL_SAMPLES = "prequential-accuracy", "prequential-samples"
UNTESTED = -1.0  # entry of the accuracies of classes for a class that was not tested
GATE_TESTED, GATE_CANDIDATE, GATE_ACCEPTED = "gate-tested", "gate-candidate", "gate-accepted"
SWITCHED_AT = "switched-at"
SEEN_CLASSES = "seen-classes"
INTERPOLATED = "interpolated"
BUFFER_SIZE = "buffer-size"
BUFFER_CLASSES = "buffer-classes"
STARTED, FINISHED = "started", "finished"
CPU_SECONDS, PEAK_MEMORY = "cpu-seconds", "peak-memory"
TRAINING_SECONDS = "training-seconds"
SELECTION_SECONDS = "selection-seconds"
EVALUATION_SECONDS = "evaluation-seconds"

MOST_CLASSES = 100_000
MOST_NEW_CLASSES = 20  # names of classes in a reply; further ones come with later replies

_SERIALISED = "numpy.ndarray"  # Flower's name for an array in NumPy's own format
_LARGEST_HEADER = 512  # bytes before an array's content; NumPy writes 128 for every array that this package sends
_LARGEST_METRICS = 2**20  # bytes of all numbers and their names; thousands of times more than any method reports
_LARGEST_NUMBER = 2**63
_LONGEST_TEXT = 200
_LONGEST_CAUSE = 1000
_LONGEST_VERSION = 40

NumpyArray = npt.NDArray[Any]
Weights = Mapping[str, NumpyArray]
Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


def shapes_of(weights: Weights) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return the shape and dtype of each array by name, to check replies against."""
    return {name: (array.shape, array.dtype) for name, array in weights.items()}


def array_record(weights: Weights) -> ArrayRecord:
    """Pack named arrays into an ArrayRecord."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in weights.items()})


def unpack(record: ArrayRecord) -> dict[str, NumpyArray]:
    """Undo :func:`array_record`."""
    return {name: read_array(array.data) for name, array in record.items()}


def instruction(arrays: ArrayRecord, config: Mapping[str, Any], client: int, round_number: int) -> RecordDict:
    """Return the content of a training or evaluation message to one client."""
    record = ConfigRecord({**config, ROUND: round_number, CLIENT: client})
    return RecordDict({ARRAYS: arrays, CONFIG: record})


def reply_content(weights: Weights | None, examples: int, metrics: Mapping[str, Any]) -> RecordDict:
    """Return the content of a client's reply; ``weights`` is None after an evaluation."""
    content = RecordDict({METRICS: MetricRecord({EXAMPLES: examples, **metrics})})
    if weights is not None:
        content[ARRAYS] = array_record(weights)
    return content


@dataclass(frozen=True)
class AgreedClasses:
    """The classes that have a number.

    Attributes
    ----------
    names : tuple of str
        In the order of their numbers, from 0.
    rounds : tuple of int
        The round from which each counts; 0 for those that the configuration names.
    """

    names: tuple[str, ...] = ()
    rounds: tuple[int, ...] = ()

    def told(self) -> dict[str, list[str] | list[int]]:
        """The fields that tell a client; :func:`agreed_classes` reads them."""
        return {CLASS_NAMES: list(self.names), CLASS_ROUNDS: list(self.rounds)}

    def names_in(self, number: int) -> tuple[str, ...]:
        """The names of those that count in a round; later ones have higher numbers."""
        return tuple(name for name, begun in zip(self.names, self.rounds, strict=True) if begun <= number)


def agreed_classes(told: Mapping[str, Any], most: int) -> AgreedClasses:
    """Read the agreed classes in a message from the server, or in a checkpoint; there may be ``most`` of them.

    Raises
    ------
    MessageError
        They are missing, too many, no names of classes, or not all different.
    """
    names, rounds = told.get(CLASS_NAMES), told.get(CLASS_ROUNDS)
    if not isinstance(names, list) or not isinstance(rounds, list) or not len(rounds) == len(names) <= most:
        raise MessageError(f"{CLASS_NAMES}: must be at most {most} names, each with its round")
    if not all(isinstance(name, str) and is_class_name(name) for name in names) or len(set(names)) < len(names):
        raise MessageError(f"{CLASS_NAMES} = {shown(names)}: must be different names of classes")
    if not all(type(begun) is int and begun >= 0 for begun in rounds):
        raise MessageError(f"{CLASS_ROUNDS} = {shown(rounds)}: must be whole numbers from 0")
    return AgreedClasses(tuple(names), tuple(rounds))


def undone_rounds(told: Mapping[str, Any]) -> list[int]:
    """Read the undone rounds in a message from the server: the first and the last of each span, one after the other.

    Raises
    ------
    MessageError
        They are no pairs of whole numbers.
    """
    rounds = told.get(UNDONE, [])
    if not isinstance(rounds, list) or len(rounds) % 2 or not all(type(each) is int for each in rounds):
        raise MessageError(f"{UNDONE} = {shown(rounds)}: must be first and last rounds")
    return rounds


def size_in_bytes(content: RecordDict) -> int:
    """Return the size in bytes of all records of a message: serialised arrays and numbers."""
    return sum(_config_bytes(r) if isinstance(r, ConfigRecord) else r.count_bytes() for r in content.values())


def _config_bytes(record: ConfigRecord) -> int:
    """Count as Flower does, except that empty strings and lists count as 0: Flower's count fails on them."""
    size = 0
    for name, value in record.items():
        size += len(name) if value not in ("", b"", []) else 0
        for each in value if isinstance(value, list) else [value]:
            size += 1 if isinstance(each, bool) else 8 if isinstance(each, int | float) else len(each)
    return size


@dataclass(frozen=True)
class Reply:
    """A checked reply.

    Attributes
    ----------
    client : int
        The client that sent it.
    weights : dict of str to array
        Local weights; empty after an evaluation.
    examples : int
        Number of samples trained or tested on.
    metrics : dict
        Numbers and lists of numbers.
    sat_out : bool
        The client had nothing new to train on; such a reply is valid and holds no model.
    """

    client: int
    weights: Weights
    examples: int
    metrics: Mapping[str, Any]
    sat_out: bool = False


def read_reply(message: Message, client: int, shapes: Shapes | None) -> Reply:
    """Check a reply before it can affect anything.

    These checks need no other reply; :mod:`fedkace_flwr.messaging.validation` has those that compare replies. The size
    is checked first, so that nothing is read from a message that is far too large.

    Parameters
    ----------
    message : Message
        The reply.
    client : int
        The client that the message was sent to.
    shapes : mapping, optional
        Expected shape and dtype of each weight; None if no weights are expected.

    Raises
    ------
    MessageError
        The client reports an error, the reply is larger than any valid one, a record is missing, an array has the
        wrong name, shape or dtype, or a number is not finite.
    """
    if message.has_error():
        raise MessageError(root_cause(message.error.reason), "error")
    content = message.content
    check_size(content, shapes or {})
    metrics = content.metric_records.get(METRICS)
    if metrics is None or not isinstance(metrics.get(EXAMPLES), int):
        raise MessageError(f"the reply holds no record {METRICS!r} with a whole number {EXAMPLES!r}", "records")
    numbers = checked_metrics(metrics)
    examples = numbers.pop(EXAMPLES)
    if shapes is not None and numbers.get(SAT_OUT, 0) != 0:
        if numbers[SAT_OUT] != 1 or examples != 0 or ARRAYS in content.array_records:
            raise MessageError(f"{SAT_OUT} = {shown(numbers[SAT_OUT])} contradicts the rest of the reply", "records")
        return Reply(client, {}, 0, numbers, sat_out=True)
    weights: Weights = {}
    if shapes is not None:
        if examples < 1:
            raise MessageError(f"{EXAMPLES} = {examples}: must be at least 1", "count")
        weights = read_arrays(content, shapes)
    elif examples < 0:
        raise MessageError(f"{EXAMPLES} = {examples}: must not be negative", "count")
    return Reply(client, weights, examples, numbers)


def version_in(reply: Message) -> str:
    """Return the version of the app that a reply names; empty if it names none, or none that could be one."""
    told = ConfigRecord() if reply.has_error() else reply.content.config_records.get(CONFIG, ConfigRecord())
    version = told.get(VERSION)
    return version if isinstance(version, str) and len(version) <= _LONGEST_VERSION else ""


def read_arrays(content: RecordDict, shapes: Shapes) -> Weights:
    """Read the arrays of a message that came from a client, or of one that came from the server.

    Parameters
    ----------
    content : RecordDict
        The message's content.
    shapes : mapping
        Name, shape and dtype of each array that it must hold.

    Returns
    -------
    dict of str to array
        In the order of ``shapes``.

    Raises
    ------
    MessageError
        The message is larger than it may be, has no such record, or the arrays differ from ``shapes`` or are not finite.
    """
    check_size(content, shapes)
    if ARRAYS not in content.array_records:
        raise MessageError(f"the message holds no record {ARRAYS!r}", "records")
    return checked_arrays(content.array_records[ARRAYS], shapes)


def declared_length(record: ArrayRecord | None, name: str, axis: int, most: int) -> int:
    """Return the length that an array says it has along an axis, without reading the array.

    Raises
    ------
    MessageError
        There is no such array or axis, or the length is not within 0 and ``most``.
    """
    shape = record[name].shape if record is not None and name in record else ()
    length = shape[axis] if axis < len(shape) else -1
    if not 0 <= length <= most:
        raise MessageError(
            f"array {name!r} is {shown(tuple(shape))}: must have at most {most} along axis {axis}", "arrays"
        )
    return length


def check_size(content: RecordDict, shapes: Shapes) -> None:
    """Check that a message is no larger than its arrays and numbers can be, without reading any of them.

    Raises
    ------
    MessageError
        It is larger.
    """
    size, largest = size_in_bytes(content), _LARGEST_METRICS
    for name, (shape, dtype) in shapes.items():
        largest += len(name) + _LARGEST_HEADER + math.prod(shape) * dtype.itemsize
    if size > largest:
        raise MessageError(
            f"the message has {size} bytes, more than the {largest} that it may need; left unread", "size"
        )


def checked_arrays(record: ArrayRecord, shapes: Shapes) -> Weights:
    """Read arrays that came from another machine.

    An array's own header is compared with the expected one before its content is read, so that a false size in the
    header allocates no memory.

    Raises
    ------
    MessageError
        Names, shapes or types differ from ``shapes``, the bytes cannot be read, or a value is not finite.
    """
    if set(record) != set(shapes):
        odd = sorted(set(record) ^ set(shapes))
        raise MessageError(
            f"the arrays differ from those that are expected in {len(odd)} names, the first is {shown(odd[0])}",
            "arrays",
        )
    weights = {}
    for name, (shape, dtype) in shapes.items():
        if record[name].stype != _SERIALISED:
            raise MessageError(f"array {name!r} cannot be read (serialised as {shown(record[name].stype)})", "arrays")
        array = _checked_array(name, record[name].data, shape, dtype)
        if not np.isfinite(array).all():
            raise MessageError(f"array {name!r} holds values that are not finite", "values")
        weights[name] = array
    return weights


def _checked_array(name: str, data: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NumpyArray:
    stream = io.BytesIO(data)
    try:
        found = read_header(stream, longest=_LARGEST_HEADER, versions=[(1, 0)])
    except HeaderError as error:
        raise MessageError(f"array {name!r} cannot be read ({error})", "arrays") from error
    if found.shape != shape or found.dtype != dtype:
        raise MessageError(
            f"array {name!r} is {shown(found.dtype)} {shown(found.shape)}, not {dtype} {shape}", "arrays"
        )
    if len(data) - stream.tell() != found.size:
        raise MessageError(
            f"array {name!r} cannot be read (the length of its content does not match {shape})", "arrays"
        )
    return read_content(stream, found)


def checked_metrics(record: MetricRecord) -> dict[str, Any]:
    """Read numbers that came from a client.

    The range of each is checked by :func:`fedkace_flwr.messaging.validation.check_metrics`.

    Raises
    ------
    MessageError
        There are too many of them, or one is not finite or does not fit in 64 bits.
    """
    if record.count_bytes() > _LARGEST_METRICS:
        raise MessageError(f"the reply has {record.count_bytes()} bytes of numbers; left unread", "size")
    for name, value in record.items():
        if not all(_finite(number) for number in (value if isinstance(value, list) else [value])):
            raise MessageError(f"metric {shown(name)} = {shown(value)}: must be finite", "metrics")
    return {name: _plain(value) for name, value in record.items()}


def _finite(number: float) -> bool:
    return abs(number) < _LARGEST_NUMBER if isinstance(number, int) else math.isfinite(number)


def shown(value: object) -> str:
    """Return a value that another machine sent, for one line of a log: escaped, and truncated if it is long."""
    return shortened(str(value) if isinstance(value, np.dtype | tuple | list | int | float) else repr(value))


def shortened(text: str) -> str:
    """Truncate a text if it is long."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) else value


def root_cause(reason: str | None) -> str:
    """Return the last line of a client's traceback: the error itself.

    The reason holds a traceback, or Flower's rendering of an exception: ``<class 'NAME'>:<'TEXT'>``.
    """
    lines = [line.strip() for line in (reason or "").replace("\\n", "\n").splitlines() if line.strip()]
    if not lines:
        return "the client reported an error without a reason"
    cause = re.sub(r"^<class '(?:.*\.)?(\w+)'>:<'", r"\1: ", lines[-1][:_LONGEST_CAUSE]).removesuffix("'>")
    return "".join(letter if letter.isprintable() else "?" for letter in cause)
