"""Calls of Flower's grid that survive outages.

While the grid cannot be reached, calls are retried until a deadline. A reply that cannot be unpacked is a failure of
its sender only. Between machines, arrays are packed on the way (:mod:`fedkace_flwr.messaging.packing`), which is
transparent to senders and readers.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedkace_flwr.flower.internals import is_simulation
from fedkace_flwr.messaging import packing as folding
from fedkace_flwr.messaging import records as keys

logger = logging.getLogger(__name__)

_FIRST_OUTAGE_PAUSE, _LONGEST_OUTAGE_PAUSE = 0.5, 30.0

# What Flower raises when it unpacks a malformed reply; protobuf's own errors have no common base class.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RecursionError)
_UNREADABLE_FROM = "google.protobuf"
_TRANSPORTS = ("httpx", "httpcore", "grpc")
_REFUSALS = range(400, 500)

Result = TypeVar("Result")


def post(grid: Grid, sent: Mapping[int, Message], end: float) -> tuple[dict[str, int], list[int]]:
    """Send messages; ids of those that the grid accepts, with their clients, and the clients of those that it refuses.

    After an outage the grid may already have accepted some of them, and it does not accept them twice. Then none counts
    as refused.
    """
    messages = list(sent.values())
    attempts = 0

    def push() -> list[str]:
        nonlocal attempts
        attempts += 1
        return [str(number) for number in grid.push_messages(messages) if number]

    taken = insist(push, end)
    numbers = {message.metadata.message_id: client for client, message in sent.items()}
    if taken is not None and attempts == 1:
        accepted = {number: numbers[number] for number in taken}
        return accepted, sorted(set(sent) - set(accepted.values()))
    return {number: client for number, client in numbers.items() if number}, []


def collect(grid: Grid, waiting: Iterable[str], end: float) -> Iterator[tuple[str, Message | Exception]]:
    """Replies that have arrived for the given message ids, each once.

    Over a network each reply is fetched separately: one that cannot be unpacked would otherwise lose those fetched with
    it. Such a reply is given as the exception that it raised.
    """
    numbers = sorted(waiting)
    batches = [numbers] if is_simulation(grid) else [[number] for number in numbers]
    missing = set(numbers)
    for batch in batches:
        try:
            replies = insist(lambda batch=batch: list(grid.pull_messages(batch)), end)  # type: ignore[misc]
        except Exception as error:
            if len(batch) > 1 or not _is_unreadable(error):
                raise
            missing.discard(batch[0])
            yield batch[0], error
            continue
        for reply in replies or []:
            number = reply.metadata.reply_to_message_id
            if number in missing:
                missing.discard(number)
                yield number, reply


def insist(call: Callable[[], Result], end: float) -> Result | None:
    """Call, and retry while the grid cannot be reached; None if it stays so until ``end`` (monotonic seconds).

    Raises
    ------
    Exception
        Anything that the call raises other than an outage.
    """
    pause = _FIRST_OUTAGE_PAUSE
    while True:
        try:
            return call()
        except Exception as error:
            if not is_outage(error):
                raise
            left = end - time.monotonic()
            if left <= 0:
                logger.warning("the SuperLink was out of reach until the deadline: %s", error)
                return None
            logger.warning("the SuperLink is out of reach (%s); trying again", error)
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_OUTAGE_PAUSE)


def is_outage(error: Exception) -> bool:
    """Whether a grid's exception means that it cannot be reached, rather than that it refuses a request."""
    response = getattr(error, "response", None)
    if getattr(response, "status_code", None) in _REFUSALS:
        return False
    return isinstance(error, OSError) or any(
        kind.__module__.partition(".")[0] in _TRANSPORTS for kind in type(error).__mro__
    )


def _is_unreadable(error: Exception) -> bool:
    return isinstance(error, _UNREADABLE) or type(error).__module__.startswith(_UNREADABLE_FROM)


def crosses_network(grid: Grid) -> bool:
    """Whether messages go to other machines: one of Flower's grids, but not the simulation's."""
    return type(grid).__module__.partition(".")[0] == "flwr" and not is_simulation(grid)


def fold(messages: Iterable[Message]) -> None:
    """Pack the arrays of messages, and ask for packed replies; a model sent to many clients is packed once."""
    known: dict[int, ArrayRecord] = {}
    for message in messages:
        message.content = folding.marked(folding.folded(message.content, known), keys.CONFIG)


def unfolded(reply: Message) -> Message:
    """The reply with its arrays unpacked.

    Raises
    ------
    MessageError
        They cannot be unpacked.
    """
    if reply.has_content():
        reply.content = folding.unfolded(reply.content)
    return reply
