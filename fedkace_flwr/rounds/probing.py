"""Messages that are lost on their way, or with the process that worked on them.

A SuperNode that is killed and back before the SuperLink has noticed never answers what it had been asked, and Flower
tells nobody. A client that has been silent for a while is therefore asked whether its machine is at work on it. One
that is not, twice in a row, has lost its message or its reply: it is sent the message once more. A client that has
trained answers it from its store, so nothing is learned twice.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedkace_flwr.messaging import records as keys
from fedkace_flwr.rounds.transport import collect, post

logger = logging.getLogger(__name__)

_IDLE = 2  # answers in a row: between a message's arrival and its work a process has to start
_LONGEST = 1800.0  # seconds between two questions to a client that is at work


@dataclass
class _Silence:
    """What is known of a client that has not answered."""

    due: float
    every: float
    question: str = ""
    idle: int = 0


class Probe:
    """Watches over the messages of one exchange.

    Parameters
    ----------
    grid : Grid
        Where the clients are.
    sent : mapping of int to Message
        By client.
    every : float
        Seconds of silence before a client is asked; the next time follows after as many, twice as many each time
        that it is at work.
    now : float
        Monotonic seconds.
    """

    def __init__(self, grid: Grid, sent: Mapping[int, Message], every: float, now: float) -> None:
        self._grid, self._every = grid, every
        # A grid may drop a message's content once it is on its way.
        self._metadata = {client: message.metadata for client, message in sent.items()}
        self._contents = {client: RecordDict(dict(message.content)) for client, message in sent.items()}
        self._silent = {client: _Silence(now + every, every) for client in sent}

    def lost(self, waiting: Iterable[int], now: float, end: float) -> dict[int, Message]:
        """Ask clients whose turn it is; of those that have lost their message, the same message anew.

        Parameters
        ----------
        waiting : iterable of int
            Clients that have not answered.
        now, end : float
            Monotonic seconds, and those at which the exchange ends.
        """
        silent = {client: self._silent[client] for client in waiting}
        asked = {silence.question: client for client, silence in silent.items() if silence.question}
        for number, reply in collect(self._grid, asked, end):
            self._hear(asked[number], silent[asked[number]], reply, now)
        due = [client for client, silence in silent.items() if now >= silence.due]
        for number, client in post(
            self._grid, {client: self._question(client, end - now) for client in due}, end
        ).items():
            silent[client].question = number
            silent[client].due = now + silent[client].every
        found = [client for client, silence in silent.items() if silence.idle >= _IDLE]
        for client in found:
            logger.warning("client %d has lost its message, or its reply; it is asked once more", client)
            self._silent[client] = _Silence(now + self._every, self._every)
        return {client: self._again(client, end - now) for client in found}

    def _hear(self, client: int, silence: _Silence, reply: Message | Exception, now: float) -> None:
        silence.question = ""
        if isinstance(reply, Exception) or reply.has_error():
            silence.idle = 0
            return
        told = reply.content.config_records.get(keys.CONFIG, ConfigRecord())
        if told.get(keys.WORKING) is False:
            silence.idle += 1
            return
        silence.idle = 0
        silence.every = min(2 * silence.every, _LONGEST)
        silence.due = now + silence.every

    def _question(self, client: int, left: float) -> Message:
        told = self._contents[client].config_records[keys.CONFIG]
        content = RecordDict(
            {keys.CONFIG: ConfigRecord({name: told[name] for name in (keys.CLIENT, keys.ROUND) if name in told})}
        )
        return self._message(client, content, f"{MessageType.QUERY}.{keys.WORKING}", left)

    def _again(self, client: int, left: float) -> Message:
        content = RecordDict(dict(self._contents[client]))
        return self._message(client, content, self._metadata[client].message_type, left)

    def _message(self, client: int, content: RecordDict, kind: str, left: float) -> Message:
        to = self._metadata[client]
        return Message(content, dst_node_id=to.dst_node_id, message_type=kind, group_id=to.group_id, ttl=max(left, 1.0))
