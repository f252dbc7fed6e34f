"""The inline engine: the same ServerApp and ClientApp behind Flower's Grid, in one process, one message at a time.

It needs neither Ray nor a SuperLink and serves for tests, for debugging, and for machines without Ray.
"""

import secrets
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedkace_flwr import client_app, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.errors import FedkaceError
from fedkace_flwr.experiments.running.jobs import Orders
from fedkace_flwr.flower.internals import Run, identify_process, number_message
from fedkace_flwr.keys import Scalar
from fedkace_flwr.messaging.wire import PARTITION, PARTITIONS

_CLIENT_FAILED = 2


class InlineGrid(Grid):
    """A grid whose nodes answer each message immediately.

    Parameters
    ----------
    app : ClientApp
        The app that runs on each node.
    nodes : int
        Number of nodes; node i + 2 has partition i.
    run_config : mapping
        The run config that Flower would pass to the apps.
    run_id : int
        The run's number.
    node_config : callable, optional
        Maps a partition to the node config of its SuperNode; the partition keys themselves are added.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: int,
        run_config: Mapping[str, Scalar],
        run_id: int,
        node_config: Callable[[int], Mapping[str, Scalar]] = lambda partition: {},
    ) -> None:
        self._app = app
        self._run = Run.create_empty(run_id)
        self._contexts = {
            number + 2: Context(
                run_id,
                number + 2,
                {PARTITION: number, PARTITIONS: nodes, **node_config(number)},
                RecordDict(),
                dict(run_config),
            )
            for number in range(nodes)
        }
        self._replies: dict[str, Message] = {}
        identify_process(run_id, task=0)

    def set_run(self, run: Run) -> None:
        """Set the run's description."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's description."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message to a node."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes; they never change."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let the receiving node handle each message immediately; return the messages' ids."""
        numbers = []
        for message in messages:
            numbers.append(str(uuid4()))
            number_message(message, numbers[-1])
            self._replies[numbers[-1]] = self._answer(message)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to the messages with these ids."""
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push the messages, then pull the replies."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        try:
            return self._app(message, self._context_of(message))
        except Exception as error:
            return _failure(message, error)

    def _context_of(self, message: Message) -> Context:
        return self._contexts[message.metadata.dst_node_id]


def _failure(message: Message, error: Exception) -> Message:
    """Print the traceback and return an error reply, as Flower does when a client raises an exception."""
    traceback.print_exception(error)
    return Message(Error(_CLIENT_FAILED, "".join(traceback.format_exception(error))), reply_to=message)


def run_inline(
    config: Config,
    *,
    nodes: int | None = None,
    node_config: Callable[[int], Mapping[str, Scalar]] = lambda partition: {},
) -> None:
    """Run one configuration to completion in this process.

    Parameters
    ----------
    config : Config
        The configuration, with ``run-name`` set.
    nodes : int, optional
        Number of SuperNodes; by default one per client.
    node_config : callable, optional
        As in :class:`InlineGrid`.

    Raises
    ------
    FedkaceError
        As :func:`fedkace_flwr.server_app.run`.
    """
    run_id = secrets.randbits(62)
    grid = InlineGrid(client_app.app, nodes or config.stream.clients, config.flat(), run_id, node_config)
    server_app.run(grid, config, run_id)


if __name__ == "__main__":
    orders = Orders()
    try:
        run_inline(Config.parse(orders.wait()))
    except FedkaceError as error:
        sys.exit(f"{type(error).__name__}: {error}")
