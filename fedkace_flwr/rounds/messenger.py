"""Messages of one round to clients and back, with a record of who did not answer."""

import logging
from collections.abc import Iterable, Mapping

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedkace_flwr.errors import RunError
from fedkace_flwr.flower.internals import is_simulation
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.rounds.exchange import by_client, exchange
from fedkace_flwr.rounds.roster import Roster
from fedkace_flwr.rounds.round_report import RoundReport
from fedkace_flwr.sections import RunConfig

logger = logging.getLogger(__name__)

_WORKER_LOST = 0  # Flower's error code when a simulation loses the worker process; no client raised the error
_REFUSED = "the grid did not accept the message to it: its SuperNode has left, or the message is too large"


class Messenger:
    """Exchanges messages with clients, and writes costs and failures to the round's report.

    Parameters
    ----------
    grid : Grid
        Connection to the SuperNodes.
    roster : Roster
        Finds the SuperNode of each client.
    settings : RunConfig
        The run's keys: deadline and probe.
    report : RoundReport
        The round's report.
    """

    def __init__(self, grid: Grid, roster: Roster, settings: RunConfig, report: RoundReport) -> None:
        self.report = report
        self._grid = grid
        self._roster = roster
        self._settings = settings
        self._senders: dict[str, int] = {}

    def nodes(self) -> dict[int, int]:
        """SuperNode of each client that can be reached now."""
        return self._roster.nodes(self._grid)

    def message(self, kind: str, node: int, content: RecordDict) -> Message:
        """A message of this round to a SuperNode; ``kind`` is Flower's message type."""
        group = str(self.report.number)
        return Message(content, dst_node_id=node, message_type=kind, group_id=group, ttl=self._settings.deadline)

    def exchange(
        self, phase: str, questions: Iterable[Message], deadline: float, wanted: Iterable[int]
    ) -> dict[int, Message]:
        """Send messages and collect the replies, error replies included.

        Parameters
        ----------
        phase : str
            Name of the phase in the report.
        questions : iterable of Message
            At most one per client.
        deadline : float
            Longest wait, in seconds.
        wanted : iterable of int
            Clients that the phase is meant to reach; those without a message are recorded as absent.

        Returns
        -------
        dict of int to Message
            By client, in the order of client numbers.

        Raises
        ------
        RunError
            A simulation has lost a worker process.
        """
        sent = by_client(questions)
        probe = 0.0 if is_simulation(self._grid) else self._settings.probe
        found = exchange(self._grid, sent, deadline, probe)
        self.report.exchanges[phase] = found.after(self.report.exchanges.get(phase))
        for client in sorted(set(wanted) - set(sent)):
            self.fail(client, phase, "its SuperNode is not connected", "absent")
        for client in found.refused:
            self.fail(client, phase, _REFUSED, "refused")
        for client in found.silent:
            self.fail(client, phase, f"no reply within {deadline:g} seconds", "silent")
        for client, reason in sorted(found.unreadable.items()):
            self.fail(client, phase, reason, "unreadable")
        for client, reply in found.replies.items():
            if reply.has_error() and reply.error.code == _WORKER_LOST and is_simulation(self._grid):
                raise RunError(
                    f"round {self.report.number}, {phase}: the worker process of client {client} died "
                    f"({keys.root_cause(reply.error.reason)}); run the same command again, or set resume = true, "
                    "to go on from here"
                )
        self._senders = {reply.metadata.reply_to_message_id: client for client, reply in found.replies.items()}
        return found.replies

    def sender(self, reply: Message) -> int:
        """Client that sent a reply of the latest exchange; one SuperNode may host several clients."""
        return self._senders[reply.metadata.reply_to_message_id]

    def ask(self, phase: str, action: str, contents: Mapping[int, RecordDict]) -> dict[int, RecordDict]:
        """Send a method's own messages; content of the replies by client, error replies recorded as failures."""
        nodes = self.nodes()
        questions = [self.message(action, nodes[k], content) for k, content in contents.items() if k in nodes]
        answers = {}
        for client, reply in self.exchange(phase, questions, self._settings.deadline, contents).items():
            if reply.has_error():
                self.fail(client, phase, keys.root_cause(reply.error.reason), "error")
            else:
                answers[client] = reply.content
        return answers

    def fail(self, client: int, phase: str, reason: str, kind: str = "content") -> None:
        """Record that a client's reply is missing or rejected."""
        logger.warning("round %d, %s: client %d left out: %s", self.report.number, phase, client, reason)
        self.report.failures.append({"client": client, "phase": phase, "reason": reason, "kind": kind})
