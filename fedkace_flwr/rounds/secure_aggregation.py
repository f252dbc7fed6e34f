"""Secure aggregation: Flower's SecAgg+ workflow, driven stage by stage inside a round of our own.

The workflow is written for Flower's earlier interface: it asks a strategy for instructions by proxy, and hands it
results in which every model is the mean. Here it gets both from small stand-ins, its messages go through our own
exchange, with its deadlines, costs and failures, and what a client is sent to train on is our own instruction.

The protocol makes up for clients that vanish once keys are shared, as long as two thirds are left. It does not for
those that vanish before: then it begins anew with those that are left.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, NDArrays, Parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState

from fedkace_flwr.errors import FedkaceError, MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.rounds.exchange import by_client

_LEFT = 2 / 3
_HEADER = 1024
_PHASES = {
    Stage.SETUP: "secagg-setup",
    Stage.SHARE_KEYS: "secagg-keys",
    Stage.COLLECT_MASKED_VECTORS: "training",
    Stage.UNMASK: "secagg-unmask",
}


class MaskedSumError(FedkaceError):
    """Secure aggregation came to no sum."""


class Peer(Protocol):
    """What the protocol needs of the strategy whose round it is."""

    deadline: float

    def ask(self, phase: str, questions: list[Message]) -> dict[int, Message]:
        """Send messages in a phase of that name; the replies by client."""
        ...

    def trained(self, client: int, reply: Message) -> None:
        """Look at the numbers that come with a masked update, and take them down; MessageError leaves it out."""
        ...

    def fail(self, client: int, phase: str, error: MessageError) -> None:
        """Take down that a reply was left out."""
        ...


def mean_update(
    number: int, questions: Sequence[Message], shapes: Sequence[tuple[int, ...]], limit: float, peer: Peer
) -> NDArrays:
    """Train all clients and learn the mean of their updates alone.

    Parameters
    ----------
    number : int
        The round.
    questions : sequence of Message
        One training message per client, each to a node of its own.
    shapes : sequence of tuple
        Shapes of the arrays that an update consists of.
    limit : float
        ``secagg-range``.
    peer : Peer
        The round.

    Returns
    -------
    list of array
        float64; not numbers where all sat the round out.

    Raises
    ------
    MaskedSumError
        There is no sum.
    """
    sent = by_client(questions)
    clients = {message.metadata.dst_node_id: client for client, message in sent.items()}
    if len(clients) < len(sent):
        raise MaskedSumError(f"{len(sent)} clients at {len(clients)} SuperNodes; secagg needs one for each")
    # A client weighs 1 if it has trained and 0 if not, so the largest weight is 1.
    workflow = SecAggPlusWorkflow(1.0, _LEFT, max_weight=1.0, clipping_range=limit)
    grid, strategy = cast(Any, _Relay(clients, shapes, peer)), _Instead(sorted(clients))
    context = _context(number, strategy)
    try:
        state = _introduced(workflow, grid, context, strategy)
        state.nid_to_fitins = {node: sent[clients[node]].content for node in strategy.nodes}
        if not workflow.collect_masked_vectors_stage(grid, context, state):
            raise MaskedSumError("too few clients sent a masked update")
        with np.errstate(all="ignore"):  # where all sat the round out, the sum of weights is 0
            if not workflow.unmask_stage(grid, context, state):
                raise MaskedSumError("too few clients gave their shares of the masks")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        # The workflow takes key records as they come; one that breaks the protocol ends the sum.
        raise MaskedSumError(f"a client broke the protocol ({type(error).__name__}: {error})") from error
    assert strategy.mean is not None
    return strategy.mean


def _introduced(workflow: SecAggPlusWorkflow, grid: Any, context: LegacyContext, strategy: "_Instead") -> WorkflowState:
    """Keys exchanged between all in ``strategy.nodes``, which shrinks to those that answer."""
    enough = max(2, math.ceil(_LEFT * len(strategy.nodes)))
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
    """Stands in for a strategy of the earlier interface."""

    nodes: list[int]
    mean: NDArrays | None = None

    def configure_fit(self, *_: object) -> list[tuple[_Proxy, FitIns]]:
        """Whom to ask; what is filled in later."""
        return [(_Proxy(node), FitIns(Parameters([], ""), {})) for node in self.nodes]

    def aggregate_fit(self, number: int, results: Sequence[tuple[Any, Any]], failures: object) -> tuple[None, None]:
        """Take the mean, which the workflow puts in place of each client's model."""
        self.mean = parameters_to_ndarrays(results[0][1].parameters)
        return None, None


@dataclass
class _Relay:
    """Stands in for the grid: passes the workflow's messages on, by client, and leaves out replies that will not do."""

    nodes: Mapping[int, int]
    shapes: Sequence[tuple[int, ...]]
    peer: Peer

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Ask, and see which replies will do."""
        questions = [self._addressed(message) for message in messages]
        if not questions:
            return []
        stage = str(questions[0].content.config_records[RECORD_KEY_CONFIGS][Key.STAGE])
        phase, good = _PHASES[stage], []
        for client, reply in self.peer.ask(phase, questions).items():
            try:
                if reply.has_error():
                    raise MessageError(keys.root_cause(reply.error.reason), "error")
                if stage == Stage.COLLECT_MASKED_VECTORS:
                    self._check(reply)
                    self.peer.trained(client, reply)
                good.append(reply)
            except MessageError as error:
                self.peer.fail(client, phase, error)
        return good

    def _addressed(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        records = RecordDict(dict(message.content.items()))
        # The workflow gives all nodes one record, and the client's modifier takes an entry out of it.
        records[RECORD_KEY_CONFIGS] = ConfigRecord(dict(message.content.config_records[RECORD_KEY_CONFIGS]))
        records.setdefault(keys.CONFIG, ConfigRecord({keys.CLIENT: self.nodes[node]}))
        return Message(
            records,
            dst_node_id=node,
            message_type=message.metadata.message_type,
            group_id=message.metadata.group_id,
            ttl=self.peer.deadline,
        )

    def _check(self, reply: Message) -> None:
        """See that a masked update is one: whole numbers of the right shapes, below the modulus.

        Raises
        ------
        MessageError
            It is not.
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
                array = np.lib.format.read_array(io.BytesIO(block), allow_pickle=False)
            except Exception as error:  # the bytes are the client's, and NumPy raises whatever its parsers raise
                raise MessageError(f"a masked array cannot be read ({type(error).__name__})", "arrays") from error
            if array.shape != shape or array.dtype != np.int64 or bool((array < 0).any() | (array >> 32).any()):
                raise MessageError(f"a masked array is {array.dtype} {array.shape}, or out of its range", "arrays")
