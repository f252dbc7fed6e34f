"""Flower's grid, by which messages go and come, made to last.

A grid that cannot be reached for a while is asked again until a deadline, and a reply that cannot be unpacked is its
sender's failure alone. Between machines arrays travel folded (:mod:`fedkace_flwr.messaging.packing`); who sends and who reads
need not know.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedkace_flwr.messaging import packing as folding
from fedkace_flwr.messaging import records as keys

logger = logging.getLogger(__name__)

_FIRST_OUTAGE_PAUSE, _LONGEST_OUTAGE_PAUSE = 0.5, 30.0

# What Flower's unpacking of a malformed reply raises; its own errors of protobuf are of no class that is common.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RecursionError)
_UNREADABLE_FROM = "google.protobuf"
_TRANSPORTS = ("httpx", "httpcore", "grpc")
_REFUSALS = range(400, 500)

Result = TypeVar("Result")


def post(grid: Grid, sent: Mapping[int, Message], end: float) -> dict[str, int]:
    """Send messages; the numbers of those that the grid has taken, with whom they are for.

    A grid that was out of reach may have taken some of them before, and then takes them no second time.
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
        return {number: numbers[number] for number in taken}
    return {number: client for number, client in numbers.items() if number}


def collect(grid: Grid, waiting: Iterable[str], end: float) -> Iterator[tuple[str, Message | Exception]]:
    """What has come in of the replies that are waited for, each once.

    Over a network each is fetched by itself: of several that are fetched at once, one that cannot be unpacked
    would take the others with it. An exception stands for such a reply.
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
    """Call, and again while the grid cannot be reached; None if that lasts beyond ``end`` (monotonic seconds).

    Raises
    ------
    Exception
        Whatever the call raises that is not an outage.
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
    """Whether an exception of a grid says that it cannot be reached, and not that it refuses what it was asked."""
    response = getattr(error, "response", None)
    if getattr(response, "status_code", None) in _REFUSALS:
        return False
    return isinstance(error, OSError) or any(
        kind.__module__.partition(".")[0] in _TRANSPORTS for kind in type(error).__mro__
    )


def _is_unreadable(error: Exception) -> bool:
    return isinstance(error, _UNREADABLE) or type(error).__module__.startswith(_UNREADABLE_FROM)


def is_simulation(grid: Grid) -> bool:
    """Whether the clients are workers of this machine's simulation: then messages cross no network."""
    return type(grid).__name__ == "InMemoryGrid"


def crosses_network(grid: Grid) -> bool:
    """Whether messages go to other machines: by a grid of Flower's that is not its simulation's."""
    return type(grid).__module__.partition(".")[0] == "flwr" and not is_simulation(grid)


def fold(messages: Iterable[Message]) -> None:
    """Fold what messages hold, and ask for replies that are folded; a model for many is folded once."""
    known: dict[int, ArrayRecord] = {}
    for message in messages:
        message.content = folding.marked(folding.folded(message.content, known), keys.CONFIG)


def unfolded(reply: Message) -> Message:
    """The reply with its arrays unfolded.

    Raises
    ------
    MessageError
        They cannot be.
    """
    if reply.has_content():
        reply.content = folding.unfolded(reply.content)
    return reply
