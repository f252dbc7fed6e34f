"""Send one message to each client and collect the replies until a deadline.

Replies to any other message are ignored, for example one that arrives after its phase is over.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from flwr.app import Message
from flwr.serverapp import Grid

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.rounds.probing import Probe
from fedkace_flwr.rounds.transport import collect, crosses_network, fold, post, unfolded

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
_PAUSE_PER_MESSAGE = 0.02  # over a network each poll of a reply is one request, so many clients are polled less often


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
    bytes_down, bytes_up : int
        Size of all records sent and received.
    seconds : float
        From the first message to the last reply.
    """

    replies: dict[int, Message] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    unreadable: dict[int, str] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0

    def after(self, earlier: "Exchange | None") -> "Exchange":
        """Exchange with the cost of an earlier attempt at the same phase added."""
        if earlier is None:
            return self
        return replace(
            self,
            bytes_down=self.bytes_down + earlier.bytes_down,
            bytes_up=self.bytes_up + earlier.bytes_up,
            seconds=self.seconds + earlier.seconds,
        )


def exchange(grid: Grid, sent: Mapping[int, Message], deadline: float, probe: float = 0.0) -> Exchange:
    """Send one message per client and wait for the replies.

    Parameters
    ----------
    grid : Grid
        Where the clients are.
    sent : mapping of int to Message
        By client.
    deadline : float
        Longest wait, in seconds.
    probe : float
        Seconds of silence after which :class:`fedkace_flwr.rounds.probing.Probe` looks for lost messages; 0 for never.
    """
    begun = time.monotonic()
    # Sizes are taken before sending: a grid may drop a message's content once it is sent.
    sizes = {client: keys.size_in_bytes(message.content) for client, message in sent.items()}
    bytes_down = sum(sizes.values())
    if crosses_network(grid):
        fold(sent.values())
    watch = Probe(grid, sent, probe, begun) if probe > 0 else None
    asked, refused = post(grid, sent, begun + deadline)
    inbox = _Inbox(asked)
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
            bytes_down += sum(sizes[client] for client in again)
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
        bytes_down=bytes_down,
        bytes_up=sum(keys.size_in_bytes(reply.content) for reply in replies.values() if reply.has_content()),
        seconds=time.monotonic() - begun,
    )


class _Inbox:
    """Replies by client, to messages that may have been sent more than once.

    After a good reply, further replies of the client are ignored. An error reply is final only if no other copy of
    the message is pending: a second copy may fail because the client still works on the first.
    """

    def __init__(self, asked: Mapping[str, int]) -> None:
        self.waiting = dict(asked)
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
            reply = unfolded(reply)
        except MessageError as error:
            self.unreadable[client] = str(error)
            return
        if reply.has_error():
            self.errors[client] = reply
            return
        self.replies[client] = reply
        self.errors.pop(client, None)
        self.waiting = {other: whose for other, whose in self.waiting.items() if whose != client}


def client_of(message: Message) -> int:
    """Client to which a training or evaluation message is addressed."""
    return int(message.content.config_records[keys.CONFIG][keys.CLIENT])  # type: ignore[arg-type]


def by_client(messages: Iterable[Message]) -> dict[int, Message]:
    """Index messages by the client to which they are addressed."""
    return {client_of(message): message for message in messages}
