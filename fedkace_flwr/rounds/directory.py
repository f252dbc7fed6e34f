"""Assignment of clients to SuperNodes by what these say of themselves: in simulations, and where nodes have no keys.

A SuperNode's id is random in each run; its partition number is stable. Client k is hosted by partition k mod N, so
with fewer SuperNodes than clients each hosts several, unless they have inboxes.

No SuperNode can block the others. One that gives no valid answer hosts no client and is asked again later. If two
name the same partition, the first keeps it while it is connected. N is the number of partitions that most of them
report.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedkace_flwr.messaging import wire
from fedkace_flwr.rounds.exchange import collect, insist, post

logger = logging.getLogger(__name__)

_PAUSE = 0.5
_FIRST_LOOK, _LONGEST_LOOK = 0.02, 0.5
_PATIENCE = 15.0  # seconds that a phase waits for answers of new SuperNodes
_ASK_AGAIN = 60.0  # seconds after which a SuperNode without a valid answer is asked again


@dataclass
class _Inquiry:
    """A question to a SuperNode whose partition is not known yet."""

    number: str
    at: float
    fresh: bool = True
    reason: str = ""


class ClientDirectory:
    """Finds and remembers the SuperNodes of a run.

    Parameters
    ----------
    clients : int
        Number of clients K.
    join_deadline : float
        Seconds to wait for SuperNodes at the start.
    alone : bool
        Whether a SuperNode hosts at most one client.
    quiet : bool
        Whether nobody needs the answers: nodes without a valid one are neither named nor asked again.

    Attributes
    ----------
    partitions : dict of int to (int, int)
        The partition of each SuperNode that has named one, and how many it says that there are.
    """

    def __init__(self, clients: int, join_deadline: float, *, alone: bool = False, quiet: bool = False) -> None:
        self._clients = clients
        self._deadline = join_deadline
        self._alone, self._quiet = alone, quiet
        self._found: frozenset[int] = frozenset()
        self.partitions: dict[int, tuple[int, int]] = {}  # in the order of their answers
        self._inquiries: dict[int, _Inquiry] = {}
        self._named: set[tuple[int, str]] = set()

    def look(self, grid: Grid, patience: float) -> frozenset[int]:
        """The SuperNodes that are connected; new ones are asked, and their answers waited for up to ``patience`` seconds."""
        found = insist(lambda: frozenset(grid.get_node_ids()), time.monotonic() + self._deadline)
        if found is not None:
            self._found = found
            self.partitions = {node: known for node, known in self.partitions.items() if node in found}
            self._inquiries = {node: asked for node, asked in self._inquiries.items() if node in found}
            self._ask(grid, sorted(found - set(self.partitions)))
        self._listen(grid, min(patience, self._deadline))
        return self._found

    def nodes(self, grid: Grid, patience: float = _PATIENCE) -> dict[int, int]:
        """Node of each client that can be reached; as in :meth:`look`, later answers count from the next call on."""
        self.look(grid, patience)
        hosts, total = self._hosts()
        hosted = range(min(self._clients, total) if self._alone else self._clients)
        if self._alone and 0 < total < self._clients:
            self._name(
                0,
                f"{wire.PARTITIONS} = {total}: an inbox belongs to one client, clients = {self._clients} need as many SuperNodes",
            )
        return {client: hosts[client % total] for client in hosted if total and client % total in hosts}

    def reasons(self) -> list[str]:
        """Why SuperNodes host no client, if they have answered at all."""
        return [asked.reason for _, asked in sorted(self._inquiries.items()) if asked.reason]

    def _hosts(self) -> tuple[dict[int, int], int]:
        """Node of each partition, and N."""
        votes = Counter(partitions for _, partitions in self.partitions.values())
        total = votes.most_common(1)[0][0] if votes else 0
        hosts: dict[int, int] = {}
        for node, (partition, partitions) in self.partitions.items():
            if partitions != total:
                self._name(node, f"says {wire.PARTITIONS} = {partitions}, most say {total}")
            elif partition in hosts:
                holder = hosts[partition]
                self._name(node, f"names {wire.PARTITION} = {partition}, which SuperNode {holder} has")
            else:
                hosts[partition] = node
        return hosts, total

    def _ask(self, grid: Grid, unknown: list[int]) -> None:
        """Ask nodes that have no pending question."""
        now = time.monotonic()
        due = [node for node in unknown if node not in self._inquiries or self._is_void(self._inquiries[node], now)]

        def question(node: int) -> Message:
            content = RecordDict({wire.CONFIG: ConfigRecord({wire.CLIENT: node})})
            return Message(content, dst_node_id=node, message_type=MessageType.QUERY, ttl=self._deadline)

        if not due:
            return
        accepted, _ = post(grid, {node: question(node) for node in due}, now + self._deadline)
        for number, node in accepted.items():
            before = self._inquiries.get(node)
            self._inquiries[node] = _Inquiry(number, now, before is None, before.reason if before else "")

    def _is_void(self, asked: _Inquiry, now: float) -> bool:
        """Whether a node may be asked again: its answer was invalid, or the question has expired."""
        if self._quiet and not asked.number:
            return False
        return now - asked.at >= (max(_ASK_AGAIN, self._deadline) if asked.number else _ASK_AGAIN)

    def _listen(self, grid: Grid, patience: float) -> None:
        """Collect answers; wait for nodes that were asked for the first time."""
        end, pause = time.monotonic() + patience, _FIRST_LOOK
        while waiting := {asked.number: node for node, asked in self._inquiries.items() if asked.number}:
            for number, reply in sorted(collect(grid, waiting, end), key=lambda found: waiting[found[0]]):
                self._take(waiting[number], reply)
            left = end - time.monotonic()
            if left <= 0 or not any(asked.fresh and asked.number for asked in self._inquiries.values()):
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_LOOK)
        for asked in self._inquiries.values():
            asked.fresh = False

    def _take(self, node: int, reply: Message | Exception) -> None:
        place = _place(reply)
        if not isinstance(place, str):
            self.partitions[node] = place
            del self._inquiries[node]
            return
        self._inquiries[node].number, self._inquiries[node].reason = "", place
        if not self._quiet:
            self._name(node, f"could not name its partition: {place}")

    def _name(self, node: int, text: str) -> None:
        """Log a problem of a node once."""
        if (node, text) not in self._named:
            self._named.add((node, text))
            logger.warning("SuperNode %d hosts no client: it %s", node, text)


def _place(reply: Message | Exception) -> tuple[int, int] | str:
    """Partition that a SuperNode names, and the number of partitions; or why it names none."""
    if isinstance(reply, Exception):
        return f"its reply cannot be read ({type(reply).__name__})"
    if reply.has_error():
        return wire.root_cause(reply.error.reason)
    answer = reply.content.config_records.get(wire.CONFIG, ConfigRecord())
    partition, partitions = answer.get(wire.PARTITION), answer.get(wire.PARTITIONS)
    if type(partition) is int and type(partitions) is int and 0 <= partition < partitions:
        return partition, partitions
    return (
        f"{wire.PARTITION} = {wire.shown(partition)}, {wire.PARTITIONS} = {wire.shown(partitions)}: start the SuperNode "
        f"with --node-config '{wire.PARTITION}=K {wire.PARTITIONS}=N', whole numbers, 0 <= K < N"
    )
