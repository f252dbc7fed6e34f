"""Messages between the server and the clients, over Flower's grid: one to each client, and the replies until a deadline.

Outages of the grid, replies that cannot be unpacked and messages that get lost cost the client concerned at most the
time that they take. Between machines, arrays are folded on the way (:mod:`fedkace_flwr.messaging.folding`), which is
transparent to senders and readers.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, Metadata, RecordDict
from flwr.serverapp import Grid

from fedkace_flwr.errors import MessageError
from fedkace_flwr.flower.internals import is_simulation
from fedkace_flwr.messaging import folding, wire

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
_PAUSE_PER_MESSAGE = 0.02  # over a network each poll of a reply is one request, so many clients are polled less often
_FIRST_OUTAGE_PAUSE, _LONGEST_OUTAGE_PAUSE = 0.5, 30.0

# What Flower raises when it unpacks a malformed reply; protobuf's own errors have no common base class.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RecursionError)
_UNREADABLE_FROM = "google.protobuf"
_TRANSPORTS = ("httpx", "httpcore", "grpc")
_REFUSALS = range(400, 500)

_IDLE = 2  # denials in a row: after a message arrives, a process has to start before work begins
_LONGEST_PROBE = 1800.0  # seconds between two questions to a client that is working

Result = TypeVar("Result")


@dataclass
class Exchange:
    """Result of one exchange.

    Attributes
    ----------
    replies : dict of int to Message
        By client, in the order of client numbers; the first reply of a client counts.
    silent : list of int
        Clients without a reply in time.
    refused : list of int
        Clients whose message the grid did not accept.
    unreadable : dict of int to str
        Clients whose reply could not be unpacked, and why.
    down, up : dict of int to int
        Bytes of all records sent to and received from each client.
    """

    replies: dict[int, Message] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    unreadable: dict[int, str] = field(default_factory=dict)
    down: Counter[int] = field(default_factory=Counter)
    up: Counter[int] = field(default_factory=Counter)


def exchange(
    grid: Grid,
    sent: Mapping[int, Message],
    deadline: float,
    probe: float = 0.0,
    frozen: Callable[[], ArrayRecord] | None = None,
) -> Exchange:
    """Send one message per client and wait for the replies.

    Replies to any other message are ignored, for example one that arrives after its phase is over.

    Parameters
    ----------
    grid : Grid
        Where the clients are.
    sent : mapping of int to Message
        By client.
    deadline : float
        Longest wait, in seconds.
    probe : float
        Seconds of silence after which a client is asked whether its message is lost; 0 for never.
    frozen : callable, optional
        Gives the frozen part of the network. A client that answers that it lacks it is sent its message again, with it.
    """
    begun = time.monotonic()
    # Sizes are taken before sending: a grid may drop a message's content once it is sent.
    sizes = {client: wire.size_in_bytes(message.content) for client, message in sent.items()}
    down = Counter(sizes)
    contents = {client: RecordDict(dict(message.content)) for client, message in sent.items()} if frozen else {}
    if crosses_network(grid):
        _fold(sent.values())
    watch = _Probe(grid, sent, probe, begun) if probe > 0 else None
    asked, refused = post(grid, sent, begun + deadline)
    inbox = _Inbox(asked, contents)
    pause, end = _FIRST_PAUSE, time.monotonic() + deadline
    while inbox.waiting:
        for number, reply in collect(grid, list(inbox.waiting), end):
            inbox.take(number, reply)
            pause = _FIRST_PAUSE
        left = end - time.monotonic()
        if left <= 0:
            break
        if watch and inbox.waiting and (again := watch.lost(inbox.clients(), time.monotonic(), end)):
            inbox.waiting |= post(grid, again, end)[0]
            down.update({client: sizes[client] for client in again})
        if frozen and inbox.lacking:
            part = frozen()
            more = {
                client: _message(
                    sent[client].metadata,
                    RecordDict({**contents[client], wire.FROZEN: part}),
                    sent[client].metadata.message_type,
                    left,
                )
                for client in inbox.lacking
            }
            down.update({client: wire.size_in_bytes(message.content) for client, message in more.items()})
            if crosses_network(grid):
                _fold(more.values())
            inbox.lacking.clear()
            inbox.waiting |= post(grid, more, end)[0]
        if inbox.waiting:
            time.sleep(min(pause, left))
            longest = max(_LONGEST_PAUSE, _PAUSE_PER_MESSAGE * len(inbox.waiting))
            pause = min(2 * pause, longest)
    replies, unreadable = inbox.replies | inbox.errors, inbox.unreadable
    unreadable = {client: reason for client, reason in unreadable.items() if client not in replies}
    return Exchange(
        dict(sorted(replies.items())),
        sorted(set(sent) - set(replies) - set(unreadable) - set(refused)),
        refused,
        unreadable,
        down=down,
        up=inbox.requests
        + Counter({client: wire.size_in_bytes(each.content) for client, each in replies.items() if each.has_content()}),
    )


def client_of(message: Message) -> int:
    """Client to which a training or evaluation message is addressed."""
    return int(message.content.config_records[wire.CONFIG][wire.CLIENT])  # type: ignore[arg-type]


def by_client(messages: Iterable[Message]) -> dict[int, Message]:
    """Index messages by the client to which they are addressed."""
    return {client_of(message): message for message in messages}


class _Inbox:
    """Replies by client, to messages that may have been sent more than once.

    After a good reply, further replies of the client are ignored. An error reply is final only if no other copy of
    the message is pending: a second copy may fail because the client still works on the first. A client may once say that
    it lacks the frozen part.
    """

    def __init__(self, asked: Mapping[str, int], may_lack: Iterable[int]) -> None:
        self.waiting = dict(asked)
        self._may_lack = set(may_lack)
        self.lacking: set[int] = set()
        self.requests: Counter[int] = Counter()
        self.replies: dict[int, Message] = {}
        self.errors: dict[int, Message] = {}
        self.unreadable: dict[int, str] = {}

    def clients(self) -> set[int]:
        """Clients that have not answered yet."""
        return set(self.waiting.values())

    def take(self, number: str, reply: Message | Exception) -> None:
        """Take the reply to a message, or the error raised when unpacking it."""
        if number not in self.waiting:  # another copy of the message has just been answered
            return
        client = self.waiting.pop(number)
        if isinstance(reply, Exception):
            self.unreadable[client] = f"its reply cannot be read ({type(reply).__name__})"
            return
        try:
            if reply.has_content():
                reply.content = folding.unfolded(reply.content)
        except MessageError as error:
            self.unreadable[client] = str(error)
            return
        if reply.has_error():
            self.errors[client] = reply
            return
        if client in self._may_lack and wire.FROZEN in reply.content.config_records.get(wire.CONFIG, ConfigRecord()):
            self._may_lack.discard(client)
            self.lacking.add(client)
            self.requests[client] += wire.size_in_bytes(reply.content)
            return
        self.replies[client] = reply
        self.errors.pop(client, None)
        self.waiting = {other: whose for other, whose in self.waiting.items() if whose != client}


@dataclass
class _Silence:
    """State of a client that has not answered."""

    due: float
    every: float
    question: str = ""
    idle: int = 0


class _Probe:
    """Watches the messages of one exchange, for those that are lost.

    If a SuperNode is killed and restarted before the SuperLink notices, it never answers pending messages, and Flower
    reports no error. A client that has been silent for a while is therefore asked whether it is still working. If it
    denies this twice in a row, its message or its reply is lost, and the message is sent again. A client that had
    already trained answers from its store, so it does not train twice.

    Parameters
    ----------
    grid : Grid
        Where the clients are.
    sent : mapping of int to Message
        By client.
    every : float
        Seconds of silence before a client is asked, and between questions. The interval doubles each time the client
        says that it is working.
    now : float
        Monotonic seconds.
    """

    def __init__(self, grid: Grid, sent: Mapping[int, Message], every: float, now: float) -> None:
        self._grid, self._every = grid, every
        # A grid may drop a message's content once it is sent.
        self._metadata = {client: message.metadata for client, message in sent.items()}
        self._contents = {client: RecordDict(dict(message.content)) for client, message in sent.items()}
        self._silent = {client: _Silence(now + every, every) for client in sent}

    def lost(self, waiting: Iterable[int], now: float, end: float) -> dict[int, Message]:
        """Ask the clients that are due; copies of the messages that are lost.

        Parameters
        ----------
        waiting : iterable of int
            Clients that have not answered.
        now, end : float
            Current time, and end of the exchange, in monotonic seconds.
        """
        silent = {client: self._silent[client] for client in waiting}
        asked = {silence.question: client for client, silence in silent.items() if silence.question}
        for number, reply in collect(self._grid, asked, end):
            self._hear(asked[number], silent[asked[number]], reply, now)
        due = [client for client, silence in silent.items() if now >= silence.due]
        accepted, _ = post(self._grid, {client: self._question(client, end - now) for client in due}, end)
        for number, client in accepted.items():
            silent[client].question = number
            silent[client].due = now + silent[client].every
        found = [client for client, silence in silent.items() if silence.idle >= _IDLE]
        for client in found:
            logger.warning("client %d: its message or its reply is lost; sending the message again", client)
            self._silent[client] = _Silence(now + self._every, self._every)
        return {client: self._again(client, end - now) for client in found}

    def _hear(self, client: int, silence: _Silence, reply: Message | Exception, now: float) -> None:
        silence.question = ""
        if isinstance(reply, Exception) or reply.has_error():
            silence.idle = 0
            return
        told = reply.content.config_records.get(wire.CONFIG, ConfigRecord())
        if told.get(wire.WORKING) is False:
            silence.idle += 1
            return
        silence.idle = 0
        silence.every = min(2 * silence.every, _LONGEST_PROBE)
        silence.due = now + silence.every

    def _question(self, client: int, left: float) -> Message:
        told = self._contents[client].config_records[wire.CONFIG]
        content = RecordDict(
            {wire.CONFIG: ConfigRecord({name: told[name] for name in (wire.CLIENT, wire.ROUND) if name in told})}
        )
        return _message(self._metadata[client], content, f"{MessageType.QUERY}.{wire.WORKING}", left)

    def _again(self, client: int, left: float) -> Message:
        content = RecordDict(dict(self._contents[client]))
        return _message(self._metadata[client], content, self._metadata[client].message_type, left)


def _message(to: Metadata, content: RecordDict, kind: str, left: float) -> Message:
    return Message(content, dst_node_id=to.dst_node_id, message_type=kind, group_id=to.group_id, ttl=max(left, 1.0))


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


def _fold(messages: Iterable[Message]) -> None:
    """Pack the arrays of messages, and ask for packed replies; a model sent to many clients is packed once."""
    known: dict[int, ArrayRecord] = {}
    for message in messages:
        message.content = folding.marked(folding.folded(message.content, known), wire.CONFIG)
