"""Sending a message to each client and collecting the replies, with a deadline."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from fedkace_flwr import messages as keys

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0


@dataclass
class Exchange:
    """What one phase of a round brought.

    Attributes
    ----------
    replies : dict of int to Message
        By client, in the order of client numbers; a client's first reply counts.
    silent : list of int
        Clients that did not answer in time.
    bytes_down, bytes_up : int
        Records sent and received.
    seconds : float
        From the first message to the last reply.
    """

    replies: dict[int, Message] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0


def exchange(grid: Grid, sent: Mapping[int, Message], deadline: float) -> Exchange:
    """Send one message per client and wait for the replies, at most ``deadline`` seconds."""
    begun = time.monotonic()
    # Sizes before sending: a grid may drop a message's content once it is on its way.
    result = Exchange(bytes_down=sum(keys.size_in_bytes(message.content) for message in sent.values()))
    pushed = [str(number) for number in grid.push_messages(list(sent.values())) if number]
    asked = {message.metadata.message_id: client for client, message in sent.items()}
    waiting, replies, pause, end = set(pushed), {}, _FIRST_PAUSE, time.monotonic() + deadline
    while waiting:
        for reply in grid.pull_messages(sorted(waiting)):
            number = reply.metadata.reply_to_message_id
            if number in waiting:
                waiting.discard(number)
                replies[asked[number]] = reply
                pause = _FIRST_PAUSE
        left = end - time.monotonic()
        if left <= 0:
            break
        if waiting:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
    result.replies = dict(sorted(replies.items()))
    result.silent = sorted(set(sent) - set(replies))
    result.bytes_up = sum(keys.size_in_bytes(reply.content) for reply in replies.values() if reply.has_content())
    result.seconds = time.monotonic() - begun
    return result


def client_of(message: Message) -> int:
    """The client that a training or evaluation message is meant for."""
    return int(message.content.config_records[keys.CONFIG][keys.CLIENT])  # type: ignore[arg-type]


def by_client(messages: Iterable[Message]) -> dict[int, Message]:
    """Index messages by the client they are meant for."""
    return {client_of(message): message for message in messages}
