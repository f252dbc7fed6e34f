"""Detection of lost messages, and retries.

If a SuperNode is killed and restarted before the SuperLink notices, it never answers pending messages, and Flower
reports no error. A client that has been silent for a while is therefore asked whether it is still working. If it
denies this twice in a row, its message or its reply is lost, and the message is sent again. A client that had already
trained answers from its store, so it does not train twice.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedkace_flwr.messaging import records as keys
from fedkace_flwr.rounds.transport import collect, post

logger = logging.getLogger(__name__)

_IDLE = 2  # denials in a row: after a message arrives, a process has to start before work begins
_LONGEST = 1800.0  # seconds between two questions to a client that is working


@dataclass
class _Silence:
    """State of a client that has not answered."""

    due: float
    every: float
    question: str = ""
    idle: int = 0


class Probe:
    """Watches the messages of one exchange.

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
