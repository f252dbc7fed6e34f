"""Sending a message to each client and collecting the replies, with a deadline.

A grid that cannot be reached for a while is asked again until the deadline; a reply that cannot be unpacked is its
sender's failure alone; a reply to another message than those that are waited for, as one that comes after its
phase is over, is nobody's. Between machines arrays travel folded (:mod:`fedkace_flwr.folding`); who sends and who
reads here need not know.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedkace_flwr import folding
from fedkace_flwr import messages as keys
from fedkace_flwr.errors import MessageError

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
_PAUSE_PER_MESSAGE = 0.02  # where each reply is a request of its own, many are asked for less often
_FIRST_OUTAGE_PAUSE, _LONGEST_OUTAGE_PAUSE = 0.5, 30.0

# What Flower's unpacking of a malformed reply raises; its own errors of protobuf are of no class that is common.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RecursionError)
_UNREADABLE_FROM = "google.protobuf"
_TRANSPORTS = ("httpx", "httpcore", "grpc")
_REFUSALS = range(400, 500)

Result = TypeVar("Result")


@dataclass
class Exchange:
    """What one phase of a round brought.

    Attributes
    ----------
    replies : dict of int to Message
        By client, in the order of client numbers; a client's first reply counts.
    silent : list of int
        Clients that did not answer in time.
    unreadable : dict of int to str
        Clients whose reply could not be unpacked, and what went wrong.
    bytes_down, bytes_up : int
        Records sent and received.
    seconds : float
        From the first message to the last reply.
    """

    replies: dict[int, Message] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    unreadable: dict[int, str] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0

    def after(self, earlier: "Exchange | None") -> "Exchange":
        """The same with the cost of an earlier one of the same phase added, where that was asked again."""
        if earlier is None:
            return self
        return replace(
            self,
            bytes_down=self.bytes_down + earlier.bytes_down,
            bytes_up=self.bytes_up + earlier.bytes_up,
            seconds=self.seconds + earlier.seconds,
        )


def exchange(grid: Grid, sent: Mapping[int, Message], deadline: float) -> Exchange:
    """Send one message per client and wait for the replies, at most ``deadline`` seconds."""
    begun = time.monotonic()
    # Sizes before sending: a grid may drop a message's content once it is on its way.
    result = Exchange(bytes_down=sum(keys.size_in_bytes(message.content) for message in sent.values()))
    if crosses_network(grid):
        _fold(sent.values())
    asked = post(grid, sent, begun + deadline)
    waiting, replies, pause, end = set(asked), {}, _FIRST_PAUSE, time.monotonic() + deadline
    while waiting:
        for number, reply in collect(grid, waiting, end):
            waiting.discard(number)
            pause = _FIRST_PAUSE
            if isinstance(reply, Message):
                try:
                    replies[asked[number]] = _unfolded(reply)
                except MessageError as error:
                    result.unreadable[asked[number]] = str(error)
            else:
                result.unreadable[asked[number]] = f"its reply cannot be read ({type(reply).__name__})"
        left = end - time.monotonic()
        if left <= 0:
            break
        if waiting:
            time.sleep(min(pause, left))
            longest = max(_LONGEST_PAUSE, _PAUSE_PER_MESSAGE * len(waiting))
            pause = min(2 * pause, longest)
    result.replies = dict(sorted(replies.items()))
    result.silent = sorted(set(sent) - set(replies) - set(result.unreadable))
    result.bytes_up = sum(keys.size_in_bytes(reply.content) for reply in replies.values() if reply.has_content())
    result.seconds = time.monotonic() - begun
    return result


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


def _fold(messages: Iterable[Message]) -> None:
    known: dict[int, ArrayRecord] = {}
    for message in messages:
        message.content = folding.marked(folding.folded(message.content, known), keys.CONFIG)


def _unfolded(reply: Message) -> Message:
    if reply.has_content():
        reply.content = folding.unfolded(reply.content)
    return reply


def client_of(message: Message) -> int:
    """The client that a training or evaluation message is meant for."""
    return int(message.content.config_records[keys.CONFIG][keys.CLIENT])  # type: ignore[arg-type]


def by_client(messages: Iterable[Message]) -> dict[int, Message]:
    """Index messages by the client they are meant for."""
    return {client_of(message): message for message in messages}
