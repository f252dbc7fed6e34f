"""Every record key and metric name that crosses the wire, and the checks on what comes back.

Arrays travel as ArrayRecords, numbers as MetricRecords and ConfigRecords; nothing is pickled.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedkace_flwr.errors import MessageError

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
ROUND, CLIENT, RUN = "round", "client", "run"
INBOX, TEST = "inbox", "test"
PARTITION, PARTITIONS = "partition-id", "num-partitions"
EXAMPLES = "num-examples"

SAT_OUT = "sat-out"
ACCURACY = "accuracy"
LOCAL_ACCURACY = "local-accuracy"
GLOBAL_ACCURACY = "global-accuracy"
BUFFER_ACCURACY = "buffer-accuracy"
BUFFER_PROBABILITY = "buffer-probability"
GAP = "gap"
SWITCHED_AT = "switched-at"
SEEN_CLASSES = "seen-classes"
INTERPOLATED = "interpolated"
REPLAY_WEIGHTS = "replay-weights"
REPLAY_SKIPPED = "replay-ratios-skipped"
BUFFER_SIZE = "buffer-size"
BUFFER_CLASSES = "buffer-classes"
CHUNK_CLASSES = "chunk-classes"
CONDITION_NUMBER = "condition-number"
STARTED, FINISHED = "started", "finished"
TRAINING_SECONDS = "training-seconds"
SELECTION_SECONDS = "selection-seconds"
EVALUATION_SECONDS = "evaluation-seconds"

NumpyArray = npt.NDArray[Any]
Weights = Mapping[str, NumpyArray]
Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


def shapes_of(weights: Weights) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Name, shape and dtype of each array, to check replies against."""
    return {name: (array.shape, array.dtype) for name, array in weights.items()}


def array_record(weights: Weights) -> ArrayRecord:
    """Pack named arrays."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in weights.items()})


def unpack(record: ArrayRecord) -> dict[str, NumpyArray]:
    """Undo :func:`array_record`."""
    return {name: array.numpy() for name, array in record.items()}


def instruction(arrays: ArrayRecord, config: Mapping[str, Any], client: int, round_number: int) -> RecordDict:
    """Content of a training or evaluation message to one client."""
    record = ConfigRecord({**config, ROUND: round_number, CLIENT: client})
    return RecordDict({ARRAYS: arrays, CONFIG: record})


def reply_content(weights: Weights | None, examples: int, metrics: Mapping[str, Any]) -> RecordDict:
    """Content of a client's reply; ``weights`` is None after an evaluation."""
    content = RecordDict({METRICS: MetricRecord({EXAMPLES: examples, **metrics})})
    if weights is not None:
        content[ARRAYS] = array_record(weights)
    return content


def size_in_bytes(content: RecordDict) -> int:
    """Bytes of all records of a message: serialised arrays and numbers."""
    return sum(record.count_bytes() for record in content.values())


@dataclass(frozen=True)
class Reply:
    """A checked reply.

    Attributes
    ----------
    client : int
        Who sent it.
    weights : dict of str to array
        Local weights; empty after an evaluation.
    examples : int
        Samples trained or tested on.
    metrics : dict
        Numbers and lists of numbers.
    """

    client: int
    weights: Weights
    examples: int
    metrics: Mapping[str, Any]


def read_reply(message: Message, client: int, shapes: Shapes | None) -> Reply:
    """Check a reply before it may touch anything.

    Parameters
    ----------
    message : Message
        What came back.
    client : int
        Who was asked.
    shapes : mapping, optional
        What the weights must look like; None where none are expected.

    Raises
    ------
    MessageError
        The client reports an error, a record is missing, an array has the wrong name, shape or dtype, or a
        number is not finite.
    """
    if message.has_error():
        raise MessageError(root_cause(message.error.reason))
    content = message.content
    metrics = content.metric_records.get(METRICS)
    if metrics is None or not isinstance(metrics.get(EXAMPLES), int):
        raise MessageError(f"the reply holds no record {METRICS!r} with a whole number {EXAMPLES!r}")
    examples = metrics[EXAMPLES]
    assert isinstance(examples, int)
    weights: Weights = {}
    if shapes is not None:
        if ARRAYS not in content.array_records:
            raise MessageError(f"the reply holds no record {ARRAYS!r}")
        if examples < 1:
            raise MessageError(f"{EXAMPLES} = {examples}: must be at least 1")
        weights = checked_arrays(content.array_records[ARRAYS], shapes)
    for name, value in metrics.items():
        if not np.isfinite(value).all():
            raise MessageError(f"metric {name!r} = {value}: must be finite")
    others = {name: _plain(value) for name, value in metrics.items() if name != EXAMPLES}
    return Reply(client, weights, examples, others)


def checked_arrays(record: ArrayRecord, shapes: Shapes) -> Weights:
    """Read arrays that came from a client.

    Raises
    ------
    MessageError
        Names, shapes or types differ from ``shapes``, the bytes cannot be read, or a value is not finite.
    """
    if set(record) != set(shapes):
        odd = sorted(set(record) ^ set(shapes))
        raise MessageError(f"the reply's arrays differ from the model's in {len(odd)} names, {odd[0]!r} the first")
    weights = {}
    for name, (shape, dtype) in shapes.items():
        try:
            array = np.lib.format.read_array(io.BytesIO(record[name].data), allow_pickle=False)
        except Exception as error:  # the bytes are the client's, and NumPy raises whatever its parsers raise
            raise MessageError(f"array {name!r} cannot be read ({type(error).__name__})") from error
        if array.shape != shape or array.dtype != dtype:
            raise MessageError(f"array {name!r} is {array.dtype} {array.shape}, not {dtype} {shape}")
        if not np.isfinite(array).all():
            raise MessageError(f"array {name!r} holds values that are not finite")
        weights[name] = array
    return weights


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) else value


def root_cause(reason: str | None) -> str:
    """The last line of a client's traceback: the error itself.

    The reason holds a traceback, or what Flower makes of an exception: ``<class 'NAME'>:<'TEXT'>``.
    """
    lines = [line.strip() for line in (reason or "").replace("\\n", "\n").splitlines() if line.strip()]
    if not lines:
        return "the client reported an error without a reason"
    return re.sub(r"^<class '(?:.*\.)?(\w+)'>:<'", r"\1: ", lines[-1]).removesuffix("'>")
