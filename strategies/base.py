"""The server half of every method: one round from messages to record, hooks where methods differ."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedkace_flwr import messages as keys
from fedkace_flwr.config import Config
from fedkace_flwr.errors import MessageError, RunError
from fedkace_flwr.messages import Reply, Shapes, Weights
from strategies.exchange import Exchange, by_client, client_of, exchange
from strategies.roster import Roster

logger = logging.getLogger(__name__)

TRAINING, EVALUATION = "training", "evaluation"
_WORKER_LOST = 0  # Flower's code for an error that no client has raised: its simulation has lost the process


@dataclass
class RoundReport:
    """What the server knows of a round once it is over.

    Attributes
    ----------
    number : int
        t, from 1.
    trained, evaluated : dict of int to dict
        Each client's metrics of the two phases.
    drift : float or None
        Client drift, (1/K) sum of squared distances of the local models from the global one.
    failures : list of dict
        Client, phase and reason of each reply that did not count.
    exchanges : dict of str to Exchange
        What each phase cost.
    own : dict of str to object
        What the method alone has to tell of the round, JSON-ready; further fields of the record.
    seconds : float
        The whole round.
    """

    number: int
    trained: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    evaluated: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    drift: float | None = None
    failures: list[dict[str, Any]] = field(default_factory=list)
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class ContinualStrategy(Strategy):
    """Plain rounds of training and evaluation over all clients.

    Replies are checked before they count, and taken in the order of client numbers, so that a sum does not
    depend on who answered first. A method overrides :meth:`weight`, :meth:`merge`, or whole phases.

    Parameters
    ----------
    config : Config
        The configuration.
    shapes : mapping
        Name, shape and dtype of each of the model's arrays.
    parameters : collection of str
        The names among them that are trained by gradient.
    on_round : callable
        Receives each round's report and the global model after it.
    """

    def __init__(
        self,
        config: Config,
        shapes: Shapes,
        parameters: frozenset[str],
        on_round: Callable[[RoundReport, ArrayRecord], None],
    ) -> None:
        self.config = config
        self.clients = config.stream.clients
        self._shapes = shapes
        self._parameters = parameters
        self._settings = config.run
        self._on_round = on_round
        self._roster = Roster(config.stream.clients, config.run.join_deadline)
        self._report = RoundReport(0)
        self._told: dict[str, Any] = {}
        self._done = 0

    def state(self) -> tuple[dict[str, keys.NumpyArray], dict[str, Any]]:
        """Arrays, and a JSON-ready record, that a later round depends on beside the global model."""
        return {}, {}

    def restore(self, done: int, arrays: Mapping[str, keys.NumpyArray], record: Mapping[str, Any]) -> None:
        """Go on after round ``done`` with what :meth:`state` gave then; before :meth:`start`."""
        self._done = done

    def weight(self, reply: Reply) -> float:
        """A local model's weight in the mean; 1/K each after normalisation."""
        return 1.0

    def check(self, reply: Reply) -> None:
        """Look into a training reply for what the method needs of it; that it is well formed is known.

        Raises
        ------
        MessageError
            The reply will not do; it is left out like one that is not well formed.
        """

    def merge(self, trained: Sequence[Reply]) -> Weights:
        """The new global model, from the valid replies in the order of client numbers; their weighted mean."""
        return weighted_mean([reply.weights for reply in trained], [self.weight(reply) for reply in trained])

    def model_for(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        """The model that a client is sent; personalised methods override this."""
        return arrays

    def between(self, number: int, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """A method's own exchanges between aggregation and evaluation, inside the round; the global model."""
        return arrays

    def extras_for(self, client: int) -> dict[str, ArrayRecord | ConfigRecord]:
        """Records that a client's evaluation message carries beside the model."""
        return {}

    def phase_clients(self, phase: str) -> set[int]:
        """Clients that a phase, ``training`` or ``evaluation``, is meant to reach."""
        return set(range(self.clients))

    def summary(self) -> None:
        """Log what this strategy does."""
        logger.info("%s over %d clients", type(self).__name__, self.clients)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds, from the one after the last restored; arguments as in Flower's own strategies.

        ``timeout`` holds for each phase.

        Raises
        ------
        RunError
            No SuperNode joins, or too few clients answer for the quorum.
        """
        self.summary()
        self._roster.wait(grid)
        result = Result(arrays=initial_arrays)
        self._told = dict(train_config or {})
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        for number in range(self._done + 1, num_rounds + 1):
            begun = time.monotonic()
            self._report = RoundReport(number)

            questions = self.configure_train(number, result.arrays, train_config, grid)
            replies = self._exchange(grid, TRAINING, questions, timeout)
            arrays, _ = self.aggregate_train(number, replies)
            assert arrays is not None
            result.arrays = arrays = self.between(number, arrays, grid)

            questions = self.configure_evaluate(number, arrays, evaluate_config, grid)
            replies = self._exchange(grid, EVALUATION, questions, timeout)
            metrics = self.aggregate_evaluate(number, replies)
            assert metrics is not None
            result.evaluate_metrics_clientapp[number] = metrics
            if evaluate_fn and (central := evaluate_fn(number, arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = central

            self._report.seconds = time.monotonic() - begun
            self._on_round(self._report, arrays)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One training message per client that can be reached."""
        return self._instructions(MessageType.TRAIN, server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per client that can be reached, with the new global model."""
        messages = self._instructions(MessageType.EVALUATE, server_round, arrays, config, grid)
        for message in messages:
            for name, record in self.extras_for(client_of(message)).items():
                message.content[name] = record
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the local models.

        Raises
        ------
        RunError
            Too few valid replies for the quorum.
        """
        trained = self._read(TRAINING, replies, self._shapes)
        mean = self.merge(trained)
        self._report.trained = {reply.client: reply.metrics for reply in trained}
        self._report.drift = client_drift([reply.weights for reply in trained], mean, self._parameters)
        return keys.array_record(mean), None

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean accuracy of the clients' inference models.

        Raises
        ------
        RunError
            Too few valid replies for the quorum.
        """
        met = [reply for reply in self._read(EVALUATION, replies, None) if keys.SEEN_CLASSES in reply.metrics]
        self._report.evaluated = {reply.client: reply.metrics for reply in met}
        accuracies = [float(reply.metrics[keys.ACCURACY]) for reply in met if keys.ACCURACY in reply.metrics]
        return MetricRecord({keys.ACCURACY: float(np.mean(accuracies))}) if accuracies else MetricRecord()

    def _instructions(
        self, kind: str, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        return [
            Message(
                keys.instruction(self.model_for(client, arrays), config, client, number),
                dst_node_id=node,
                message_type=kind,
                group_id=str(number),
                ttl=self._settings.deadline,
            )
            for client, node in self._roster.nodes(grid).items()
        ]

    def ask(
        self, grid: Grid, phase: str, action: str, number: int, contents: Mapping[int, RecordDict]
    ) -> dict[int, RecordDict]:
        """Exchange a method's own messages; replies with content by client, the others recorded as failures.

        Parameters
        ----------
        grid : Grid
            Where the clients are.
        phase : str
            Name for the record.
        action : str
            ``train.NAME`` or ``query.NAME``, one of the method's registered actions.
        number : int
            The round.
        contents : mapping of int to RecordDict
            What each client is sent; its configuration record is added here.
        """
        nodes = self._roster.nodes(grid)
        questions = []
        for client, content in contents.items():
            if client in nodes:
                content[keys.CONFIG] = ConfigRecord({**self._told, keys.ROUND: number, keys.CLIENT: client})
                questions.append(
                    Message(
                        content,
                        dst_node_id=nodes[client],
                        message_type=action,
                        group_id=str(number),
                        ttl=self._settings.deadline,
                    )
                )
        answers = {}
        for message in self._exchange(grid, phase, questions, self._settings.deadline, set(contents)):
            client = self._asked[message.metadata.reply_to_message_id]
            if message.has_error():
                self._fail(client, phase, keys.root_cause(message.error.reason))
            else:
                answers[client] = message.content
        return answers

    def _exchange(
        self, grid: Grid, phase: str, questions: Iterable[Message], deadline: float, wanted: set[int] | None = None
    ) -> list[Message]:
        sent = by_client(questions)
        found = exchange(grid, sent, deadline)
        self._report.exchanges[phase] = found
        for client in sorted((self.phase_clients(phase) if wanted is None else wanted) - set(sent)):
            self._fail(client, phase, "its SuperNode is not connected")
        for client in found.silent:
            self._fail(client, phase, f"no reply within {deadline:g} seconds")
        for client, reply in found.replies.items():
            if reply.has_error() and reply.error.code == _WORKER_LOST:
                raise RunError(
                    f"round {self._report.number}, {phase}: the worker process of client {client} died "
                    f"({keys.root_cause(reply.error.reason)}); the same command, or resume = true, goes on from here"
                )
        self._asked = {reply.metadata.reply_to_message_id: client for client, reply in found.replies.items()}
        return list(found.replies.values())

    def _read(self, phase: str, replies: Iterable[Message], shapes: Shapes | None) -> list[Reply]:
        valid = []
        for message in replies:
            client = self._asked[message.metadata.reply_to_message_id]
            try:
                reply = keys.read_reply(message, client, shapes)
                if phase == TRAINING:
                    self.check(reply)
                valid.append(reply)
            except MessageError as error:
                self._fail(client, phase, str(error))
        if len(valid) < self._settings.quorum * self.clients:
            reasons = "; ".join(f"client {f['client']}: {f['reason']}" for f in self._report.failures[:3])
            raise RunError(
                f"round {self._report.number}, {phase}: {len(valid)} of {self.clients} clients gave a valid reply, "
                f"quorum = {self._settings.quorum:g} needs more; {reasons}"
            )
        return sorted(valid, key=lambda reply: reply.client)

    def valid(self, replies: Iterable[Message]) -> Iterator[tuple[int, Message]]:
        """Clients and messages of the training replies that counted this round."""
        for message in replies:
            client = self._asked[message.metadata.reply_to_message_id]
            if client in self._report.trained:
                yield client, message

    def _fail(self, client: int, phase: str, reason: str) -> None:
        logger.warning("round %d, %s: client %d left out: %s", self._report.number, phase, client, reason)
        self._report.failures.append({"client": client, "phase": phase, "reason": reason})


def weighted_mean(models: Sequence[Weights], weights: Sequence[float]) -> dict[str, npt.NDArray[Any]]:
    """Average named arrays, summed in float64 in the order given.

    Batch-norm running statistics are averaged like parameters; integer counters are rounded and keep their type.

    Parameters
    ----------
    models : sequence of mapping
        At least one; the same names and shapes in each.
    weights : sequence of float
        Positive, one per model; normalised here.
    """
    total = float(sum(weights))
    mean: dict[str, npt.NDArray[Any]] = {}
    for name, first in models[0].items():
        value = np.zeros(first.shape, dtype=np.float64)
        for model, weight in zip(models, weights, strict=True):
            value += model[name] * (weight / total)
        mean[name] = (value if np.issubdtype(first.dtype, np.floating) else np.rint(value)).astype(first.dtype)
    return mean


def client_drift(models: Sequence[Weights], mean: Weights, names: Iterable[str]) -> float:
    """(1/K) sum over clients of ||theta_k - theta_g||^2, over the named arrays (paper, Theorem 3)."""
    chosen = sorted(names)
    distances = [sum(float(np.square(model[n].astype(np.float64) - mean[n]).sum()) for n in chosen) for model in models]
    return sum(distances) / len(distances)
