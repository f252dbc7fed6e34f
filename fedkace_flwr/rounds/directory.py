"""Assignment of clients to SuperNodes.

A SuperNode's id is random in each run; its partition number is stable. Client k is hosted by partition k mod N, so
with fewer SuperNodes than clients each hosts several.

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

from fedkace_flwr.errors import RunError
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
    """

    def __init__(self, clients: int, join_deadline: float) -> None:
        self._clients = clients
        self._deadline = join_deadline
        self._partitions: dict[int, tuple[int, int]] = {}  # in the order of their answers
        self._inquiries: dict[int, _Inquiry] = {}
        self._named: set[tuple[int, str]] = set()

    def nodes(self, grid: Grid, patience: float = _PATIENCE) -> dict[int, int]:
        """Node of each client that can be reached; nodes that are new are asked for their partition.

        The call waits up to ``patience`` seconds for answers of new nodes. Later answers count from the next call on.
        """
        found = insist(lambda: set(grid.get_node_ids()), time.monotonic() + self._deadline)
        if found is not None:
            self._partitions = {node: known for node, known in self._partitions.items() if node in found}
            self._inquiries = {node: asked for node, asked in self._inquiries.items() if node in found}
            self._ask(grid, sorted(found - set(self._partitions)))
        self._listen(grid, min(patience, self._deadline))
        hosts, total = self._hosts()
        return {client: hosts[client % total] for client in range(self._clients) if total and client % total in hosts}

    def wait(self, grid: Grid) -> dict[int, int]:
        """Wait until every client can be reached.

        Raises
        ------
        RunError
            No SuperNode joined in time, or none could name its partition.
        """
        nodes = self.gather(grid, self._clients)
        if not nodes:
            reasons = [asked.reason for _, asked in sorted(self._inquiries.items()) if asked.reason]
            if reasons:
                raise RunError(
                    f"none of {len(reasons)} SuperNodes could name its partition within join-deadline = "
                    f"{self._deadline:g} seconds: {reasons[0]}"
                )
            raise RunError(f"no SuperNode joined within join-deadline = {self._deadline:g} seconds")
        hosts = len(set(nodes.values()))
        if len(nodes) < self._clients:
            logger.warning("%d of %d clients can be reached; starting without the others", len(nodes), self._clients)
        elif hosts < self._clients:
            logger.info("%d SuperNodes host %d clients between them", hosts, self._clients)
        return nodes

    def gather(self, grid: Grid, enough: float) -> dict[int, int]:
        """Wait until ``enough`` clients can be reached, at most until the join deadline; node of each client."""
        begun = time.monotonic()
        nodes = self.nodes(grid, _PAUSE)
        while len(nodes) < enough and time.monotonic() - begun < self._deadline:
            time.sleep(min(_PAUSE, self._deadline))
            nodes = self.nodes(grid, _PAUSE)
        return nodes

    def _hosts(self) -> tuple[dict[int, int], int]:
        """Node of each partition, and N."""
        votes = Counter(partitions for _, partitions in self._partitions.values())
        total = votes.most_common(1)[0][0] if votes else 0
        hosts: dict[int, int] = {}
        for node, (partition, partitions) in self._partitions.items():
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
            self._partitions[node] = place
            del self._inquiries[node]
            return
        self._inquiries[node].number, self._inquiries[node].reason = "", place
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
    return f"{wire.PARTITION} = {wire.shown(partition)}, {wire.PARTITIONS} = {wire.shown(partitions)}"
