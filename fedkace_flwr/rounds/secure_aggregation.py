"""Secure aggregation: the stages of Flower's SecAgg+ workflow, run inside the driver's round.

The workflow is written for Flower's earlier interface: it gets instructions for client proxies from a strategy, and
returns results in which every model is the mean. Small adapters replace that strategy and the grid. Its messages go
through the driver's exchange, with deadlines, costs and failures, and carry the driver's training instructions.

The protocol tolerates clients that drop out after keys are shared, while two thirds are left. If a client drops out
earlier, the protocol starts again without it.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import FitIns, NDArrays, Parameters, parameters_to_ndarrays
from flwr.server.workflow import SecAggPlusWorkflow

from fedkace_flwr.errors import FedkaceError, MessageError
from fedkace_flwr.flower.internals import (
    MAIN_CONFIGS_RECORD,
    MAIN_PARAMS_RECORD,
    RECORD_KEY_CONFIGS,
    Key,
    LegacyContext,
    Stage,
    WorkflowKey,
    WorkflowState,
)
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import Reply, Weights
from fedkace_flwr.npy import HeaderError, read_array
from fedkace_flwr.rounds.exchange import by_client
from fedkace_flwr.rounds.server_round import Messenger
from fedkace_flwr.sections import SMALLEST_SUM

_LEFT = 2 / 3
_HEADER = 1024
_PHASES = {
    Stage.SETUP: "secagg-setup",
    Stage.SHARE_KEYS: "secagg-keys",
    Stage.COLLECT_MASKED_VECTORS: "training",
    Stage.UNMASK: "secagg-unmask",
}


class MaskedSumError(FedkaceError):
    """Secure aggregation ended without a sum."""


class Peer(Protocol):
    """What the protocol needs of the round in which it runs."""

    deadline: float

    def ask(self, phase: str, questions: list[Message]) -> dict[int, Message]:
        """Send messages in the named phase; replies by client."""
        ...

    def trained(self, client: int, reply: Message) -> bool:
        """Check and keep the numbers that come with a masked update, and return whether its client has trained.

        MessageError rejects the reply.
        """
        ...

    def fail(self, client: int, phase: str, error: MessageError) -> None:
        """Record that a reply was rejected."""
        ...


class MaskedTraining:
    """One training phase under secure aggregation: the server learns the mean of the updates and no single update. A :class:`Peer`.

    Parameters
    ----------
    messenger : Messenger
        Sends the round's messages.
    clients : collection of int
        The round's participants.
    deadline : float
        Longest wait of each exchange, in seconds.
    check : callable
        Checks the numbers of a reply; raises :class:`fedkace_flwr.errors.MessageError`.

    Attributes
    ----------
    replies : dict of int to Reply
        Valid replies so far by client, without weights.
    """

    def __init__(
        self, messenger: Messenger, clients: Collection[int], deadline: float, check: Callable[[Reply], None]
    ) -> None:
        self.deadline = deadline
        self.replies: dict[int, Reply] = {}
        self._messenger = messenger
        self._wanted = set(clients)
        self._check = check

    def run(self, questions: Sequence[Message], before: Weights, names: Sequence[str], limit: float) -> NDArrays | None:
        """Mean of the clients' updates.

        Parameters
        ----------
        questions : sequence of Message
            One training message per client.
        before : mapping
            Global model from which the clients train.
        names : sequence of str
            Arrays that an update consists of.
        limit : float
            Largest change of a weight (`SECAGG_RANGE`).

        Returns
        -------
        list of array or None
            float64, by ``names``; None if fewer than `SMALLEST_SUM` clients have trained.

        Raises
        ------
        MaskedSumError
            The protocol ended without a sum.
        """
        number = self._messenger.report.number
        return mean_update(number, questions, [before[name].shape for name in names], limit, self)

    @property
    def valid(self) -> list[Reply]:
        """Valid replies in the order of client numbers."""
        return [self.replies[client] for client in sorted(self.replies)]

    def ask(self, phase: str, questions: list[Message]) -> dict[int, Message]:
        """Exchange messages; clients without a SuperNode are recorded in the first phase only."""
        replies = self._messenger.exchange(phase, questions, self.deadline, self._wanted)
        self._wanted = set()
        return replies

    def trained(self, client: int, reply: Message) -> bool:
        """Check and keep the numbers of a reply; a masked update itself cannot be checked."""
        numbers = copy.copy(reply)
        metrics = reply.content.metric_records.get(wire.METRICS, MetricRecord())
        numbers.content = RecordDict({wire.METRICS: metrics})
        if metrics.get(wire.SAT_OUT, 0) == 0:
            numbers.content[wire.ARRAYS] = ArrayRecord()
        checked = wire.read_reply(numbers, client, {})
        self._check(checked)
        self.replies[client] = checked
        return not checked.sat_out

    def fail(self, client: int, phase: str, error: MessageError) -> None:
        """Record a failure."""
        self._messenger.fail(client, phase, str(error), error.kind)


def moved(before: Weights, names: Sequence[str], update: NDArrays) -> Weights:
    """The model ``before`` plus an update of the named arrays; every array keeps its dtype."""
    stepped = {name: before[name] + step for name, step in zip(names, update, strict=True)}
    return {name: stepped.get(name, array).astype(array.dtype) for name, array in before.items()}


def mean_update(
    number: int, questions: Sequence[Message], shapes: Sequence[tuple[int, ...]], limit: float, peer: Peer
) -> NDArrays | None:
    """Train all clients and learn only the mean of their updates.

    Parameters
    ----------
    number : int
        The round.
    questions : sequence of Message
        One training message per client, each to a node of its own.
    shapes : sequence of tuple
        Shapes of an update's arrays.
    limit : float
        the range.
    peer : Peer
        The round.

    Returns
    -------
    list of array or None
        float64; None if fewer than `SMALLEST_SUM` clients have trained: then nothing is unmasked.

    Raises
    ------
    MaskedSumError
        There is no sum.
    """
    sent = by_client(questions)
    clients = {message.metadata.dst_node_id: client for client, message in sent.items()}
    if len(clients) < len(sent):
        raise MaskedSumError(f"{len(sent)} clients at {len(clients)} SuperNodes; secagg needs one for each")
    # A client has weight 1 if it has trained, otherwise 0, so the largest weight is 1.
    workflow = SecAggPlusWorkflow(1.0, _LEFT, max_weight=1.0, clipping_range=limit)
    told = {client: message.content.config_records[wire.CONFIG] for client, message in sent.items()}
    fields = {
        client: {name: each[name] for name in (wire.CLIENT, wire.FROZEN) if name in each}
        for client, each in told.items()
    }
    relay, strategy = _Relay(clients, shapes, peer, fields), _Instead(sorted(clients))
    grid = cast(Any, relay)
    context = _context(number, strategy)
    try:
        state = _introduced(workflow, grid, context, strategy)
        state.nid_to_fitins = {node: sent[clients[node]].content for node in strategy.nodes}
        if not workflow.collect_masked_vectors_stage(grid, context, state):
            raise MaskedSumError("too few clients sent a masked update")
        if len(relay.trained) < SMALLEST_SUM:
            return None
        if not workflow.unmask_stage(grid, context, state):
            raise MaskedSumError("too few clients gave their shares of the masks")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        # The workflow does not check key records; one that breaks the protocol ends the sum.
        raise MaskedSumError(f"a client broke the protocol ({type(error).__name__}: {error})") from error
    assert strategy.mean is not None
    return strategy.mean


def _introduced(workflow: SecAggPlusWorkflow, grid: Any, context: LegacyContext, strategy: "_Instead") -> WorkflowState:
    """Exchange keys among ``strategy.nodes``, which shrinks to those that answer."""
    enough = max(SMALLEST_SUM, math.ceil(_LEFT * len(strategy.nodes)))
    while True:
        state = WorkflowState()
        done = workflow.setup_stage(grid, context, state)
        done = done and state.active_node_ids == set(strategy.nodes) and workflow.share_keys_stage(grid, context, state)
        left = sorted(state.active_node_ids)
        if done and left == strategy.nodes:
            return state
        if len(left) < enough or left == strategy.nodes:
            raise MaskedSumError(f"{len(left)} clients exchanged keys, {enough} are needed")
        strategy.nodes = left


def _context(number: int, strategy: "_Instead") -> LegacyContext:
    state = RecordDict(
        {
            MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: number}),
            MAIN_PARAMS_RECORD: ArrayRecord(),
        }
    )
    return LegacyContext(Context(0, 0, {}, state, {}), strategy=cast(Any, strategy))


@dataclass
class _Proxy:
    node_id: int


@dataclass
class _Instead:
    """Replaces the strategy of the earlier interface."""

    nodes: list[int]
    mean: NDArrays | None = None

    def configure_fit(self, *_: object) -> list[tuple[_Proxy, FitIns]]:
        """Clients to ask; instructions are filled in later."""
        return [(_Proxy(node), FitIns(Parameters([], ""), {})) for node in self.nodes]

    def aggregate_fit(self, number: int, results: Sequence[tuple[Any, Any]], failures: object) -> tuple[None, None]:
        """Keep the mean, which the workflow gives as every client's model."""
        self.mean = parameters_to_ndarrays(results[0][1].parameters)
        return None, None


@dataclass
class _Relay:
    """Replaces the grid: forwards the workflow's messages by client and rejects invalid replies."""

    nodes: Mapping[int, int]
    shapes: Sequence[tuple[int, ...]]
    peer: Peer
    fields: Mapping[int, Mapping[str, Any]]
    trained: set[int] = field(default_factory=set)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages; the valid replies."""
        questions = [self._addressed(message) for message in messages]
        if not questions:
            return []
        stage = str(questions[0].content.config_records[RECORD_KEY_CONFIGS][Key.STAGE])
        phase, good = _PHASES[stage], []
        for client, reply in self.peer.ask(phase, questions).items():
            try:
                if reply.has_error():
                    raise MessageError(wire.root_cause(reply.error.reason), "error")
                if stage == Stage.COLLECT_MASKED_VECTORS:
                    self._check(reply)
                    if self.peer.trained(client, reply):
                        self.trained.add(client)
                good.append(reply)
            except MessageError as error:
                self.peer.fail(client, phase, error)
        return good

    def _addressed(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        records = RecordDict(dict(message.content.items()))
        # The workflow shares one record among all nodes, and the client's modifier removes an entry from it.
        records[RECORD_KEY_CONFIGS] = ConfigRecord(dict(message.content.config_records[RECORD_KEY_CONFIGS]))
        records.setdefault(wire.CONFIG, ConfigRecord({**self.fields[self.nodes[node]]}))
        return Message(
            records,
            dst_node_id=node,
            message_type=message.metadata.message_type,
            group_id=message.metadata.group_id,
            ttl=self.peer.deadline,
        )

    def _check(self, reply: Message) -> None:
        """Check that a masked update consists of whole numbers of the right shapes, below the modulus.

        Raises
        ------
        MessageError
            It does not.
        """
        record = reply.content.config_records.get(RECORD_KEY_CONFIGS)
        masked = record.get(Key.MASKED_PARAMETERS) if record is not None else None
        wanted = [(1,), *self.shapes]
        if not isinstance(masked, list) or len(masked) != len(wanted):
            raise MessageError("the reply holds no masked update of the model", "records")
        for block, shape in zip(masked, wanted, strict=True):
            if not isinstance(block, bytes) or len(block) > 8 * math.prod(shape) + _HEADER:
                raise MessageError(f"a masked array of {shape} has a wrong size", "size")
            try:
                array = read_array(block)
            except HeaderError as error:
                raise MessageError(f"a masked array cannot be read ({error})", "arrays") from error
            if array.shape != shape or array.dtype != np.int64 or bool((array < 0).any() | (array >> 32).any()):
                raise MessageError(f"a masked array is {array.dtype} {array.shape}, or out of its range", "arrays")
