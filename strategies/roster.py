"""Which SuperNode hosts which client.

A SuperNode's number is random in each run; what lasts is the partition it names. Client k lives at partition
k mod N, so a federation of fewer SuperNodes than clients hosts several clients at each.
"""

import logging
import time

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedkace_flwr import messages as keys
from fedkace_flwr.errors import RunError
from strategies.exchange import exchange

logger = logging.getLogger(__name__)

_PAUSE = 0.5


class Roster:
    """Finds and remembers the SuperNodes of a run.

    Parameters
    ----------
    clients : int
        Number of clients K.
    join_deadline : float
        Seconds to wait for the SuperNodes.
    """

    def __init__(self, clients: int, join_deadline: float) -> None:
        self._clients = clients
        self._deadline = join_deadline
        self._partitions: dict[int, tuple[int, int]] = {}

    def nodes(self, grid: Grid) -> dict[int, int]:
        """Map each client that can be reached to its node, asking nodes not met before who they are."""
        present = set(grid.get_node_ids())
        self._partitions = {node: known for node, known in self._partitions.items() if node in present}
        self._ask(grid, sorted(present - set(self._partitions)))
        total = max((partitions for _, partitions in self._partitions.values()), default=0)
        host = {partition: node for node, (partition, _) in sorted(self._partitions.items())}
        return {client: host[client % total] for client in range(self._clients) if total and client % total in host}

    def wait(self, grid: Grid) -> dict[int, int]:
        """Wait until every client can be reached.

        Raises
        ------
        RunError
            No SuperNode joined in time.
        """
        begun = time.monotonic()
        nodes = self.nodes(grid)
        while len(nodes) < self._clients and time.monotonic() - begun < self._deadline:
            time.sleep(_PAUSE)
            nodes = self.nodes(grid)
        if not nodes:
            raise RunError(f"no SuperNode joined within join-deadline = {self._deadline:g} seconds")
        hosts = len(set(nodes.values()))
        if len(nodes) < self._clients:
            logger.warning("%d of %d clients can be reached; starting without the others", len(nodes), self._clients)
        elif hosts < self._clients:
            logger.info("%d SuperNodes host %d clients between them", hosts, self._clients)
        return nodes

    def _ask(self, grid: Grid, unknown: list[int]) -> None:
        if not unknown:
            return

        def question(node: int) -> Message:
            content = RecordDict({keys.CONFIG: ConfigRecord({keys.CLIENT: node})})
            return Message(content, dst_node_id=node, message_type=MessageType.QUERY, ttl=self._deadline)

        found = exchange(grid, {node: question(node) for node in unknown}, self._deadline)
        for node, reply in found.replies.items():
            if reply.has_error():
                raise RunError(f"a SuperNode could not name its partition: {keys.root_cause(reply.error.reason)}")
            answer = reply.content.config_records[keys.CONFIG]
            self._partitions[node] = (int(answer[keys.PARTITION]), int(answer[keys.PARTITIONS]))  # type: ignore[arg-type]
