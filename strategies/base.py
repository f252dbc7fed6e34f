"""The server half of every method: one round from messages to record, hooks where methods differ."""

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedkace_flwr.config import Config
from fedkace_flwr.errors import MessageError, RunError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.records import Reply, Shapes, Weights
from fedkace_flwr.messaging.validation import Limits
from fedkace_flwr.privacy import noise
from fedkace_flwr.rounds import secure_aggregation as secure
from fedkace_flwr.rounds.aggregation import client_drift, weighted_mean
from fedkace_flwr.rounds.exchange import by_client, client_of, exchange
from fedkace_flwr.rounds.quorum import BelowQuorumError, Quorum
from fedkace_flwr.rounds.roster import Roster
from fedkace_flwr.rounds.round_report import RoundReport
from fedkace_flwr.rounds.transport import is_simulation
from fedkace_flwr.rounds.vetting import EVALUATION, TRAINING, Vetting

logger = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

_WORKER_LOST = 0  # Flower's code for an error that no client has raised: its simulation has lost the process
_USUAL = "usual-distance"
_AGAIN = 1.0  # seconds before a phase is asked again; twice as long each time
_LONGEST_AGAIN = 60.0


class ContinualStrategy(Strategy):
    """Plain rounds of training and evaluation over all clients.

    Replies are checked before they count, and taken in the order of client numbers, so that a sum does not
    depend on who answered first; :mod:`fedkace_flwr.rounds.vetting` has the checks. A method overrides :meth:`weight`, :meth:`merge`, or whole phases.

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
        self._quorum = Quorum(config.run, config.stream.clients)
        self.vetting = Vetting(Limits.of(config, shapes), parameters, config.run.norm_bound)
        self._sent: dict[int, ArrayRecord] = {}
        self._asked: dict[str, int] = {}
        self._shortfall: BelowQuorumError | None = None
        self._report = RoundReport(0)
        self._told: dict[str, Any] = {}
        self._done = 0

    def state(self) -> tuple[dict[str, keys.NumpyArray], dict[str, Any]]:
        """Arrays, and a JSON-ready record, that a later round depends on beside the global model."""
        return {}, {}

    def checkpoint(self) -> tuple[dict[str, keys.NumpyArray], dict[str, Any]]:
        """What :meth:`state` gives, and what every strategy depends on."""
        arrays, record = self.state()
        return arrays, {**record, _USUAL: self.vetting.usual()}

    def restore(self, done: int, arrays: Mapping[str, keys.NumpyArray], record: Mapping[str, Any]) -> None:
        """Go on after round ``done`` with what :meth:`checkpoint` gave then; before :meth:`start`."""
        self._done = done
        self.vetting.restore(record.get(_USUAL, {}))

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
            self._report, self._shortfall = RoundReport(number), None

            arrays = result.arrays
            merged = self._phase(self._train, number, arrays, train_config, grid, timeout)
            if merged is not None:
                result.arrays = arrays = self.between(number, merged, grid)

            metrics = self._phase(self._evaluate, number, arrays, evaluate_config, grid, timeout)
            result.evaluate_metrics_clientapp[number] = metrics or MetricRecord()
            if evaluate_fn and (central := evaluate_fn(number, arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = central

            self._report.seconds = time.monotonic() - begun
            self._on_round(self._report, arrays)
            if self._shortfall is None:
                self._quorum.met()
            elif number < num_rounds:
                self._quorum.short(self._shortfall)
                self._roster.gather(grid, self._quorum.least)
        return result

    def _train(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float
    ) -> ArrayRecord | None:
        """The training phase; None where nobody had anything to train on, and the model stays."""
        questions = list(self.configure_train(number, arrays, config, grid))
        if self.config.privacy.secagg:
            return self._train_masked(number, arrays, questions, grid, timeout)
        replies = self._exchange(grid, TRAINING, questions, timeout)
        return self.aggregate_train(number, replies)[0]

    def _train_masked(
        self, number: int, arrays: ArrayRecord, questions: Sequence[Message], grid: Grid, timeout: float
    ) -> ArrayRecord | None:
        """The training phase under secure aggregation: the mean of the updates, and no update."""
        before = keys.unpack(arrays)
        names = noise.travelling(self.config.privacy, before, self._parameters)
        peer, trouble = _Masked(self, grid, timeout), ""
        try:
            shapes = [before[name].shape for name in names]
            update = secure.mean_update(number, questions, shapes, self.config.privacy.secagg_range, peer)
        except secure.MaskedSumError as error:
            trouble = str(error)
        valid = [peer.replies[client] for client in sorted(peer.replies)]
        if not trouble:
            self.require(TRAINING, valid)
        else:
            raise BelowQuorumError(f"round {number}, {TRAINING}: secure aggregation: {trouble}", TRAINING, valid)
        trained = [reply for reply in valid if not reply.sat_out]
        if not trained:
            return None
        self._report.trained = {reply.client: reply.metrics for reply in trained}
        moved = {name: before[name] + step for name, step in zip(names, update, strict=True)}
        mean = {name: moved.get(name, array).astype(array.dtype) for name, array in before.items()}
        return keys.array_record(self._noised(mean, len(trained)))

    def _noised(self, mean: Weights, clients: int) -> Weights:
        """The mean of so many models, with the noise of ``dp = central``."""
        settings, number = self.config.privacy, self._report.number
        if settings.dp != "central":
            return mean
        seeded = settings.dp_seeded
        seed = noise.seeded_secret(self._settings.seed, "server", number) if seeded else noise.fresh_secret()
        before = keys.unpack(next(iter(self._sent.values())))  # methods that merge by a mean send all the same
        names = noise.travelling(settings, mean, self._parameters)
        return noise.noised_mean(mean, before, names, clients, settings, seed)

    def _evaluate(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float
    ) -> MetricRecord | None:
        questions = self.configure_evaluate(number, arrays, config, grid)
        replies = self._exchange(grid, EVALUATION, questions, timeout)
        return self.aggregate_evaluate(number, replies)

    def _phase(
        self,
        attempt: Callable[[int, ArrayRecord, ConfigRecord, Grid, float], Outcome | None],
        number: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
        timeout: float,
    ) -> Outcome | None:
        """One phase, by the rule of ``below-quorum`` once more or not at all; None where it was skipped."""
        pause = _AGAIN
        while True:
            try:
                result = attempt(number, arrays, config, grid, timeout)
            except BelowQuorumError as shortfall:
                if not self._quorum.skips:
                    self._quorum.short(shortfall)
                logger.warning("%s; below-quorum = %s", shortfall, self._settings.below_quorum)
                reported = {reply.client: reply.metrics for reply in shortfall.valid if not reply.sat_out}
                if shortfall.phase == TRAINING:
                    self._report.trained = reported
                else:
                    self._report.evaluated = {
                        k: metrics for k, metrics in reported.items() if keys.SEEN_CLASSES in metrics
                    }
                if self._quorum.skips:
                    self._shortfall = shortfall
                    self._report.below_quorum.append(shortfall.phase)
                    return None
                self._report.repeated[shortfall.phase] = self._report.repeated.get(shortfall.phase, 0) + 1
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_AGAIN)
                self._roster.gather(grid, self._quorum.least)
            else:
                if self._quorum.repeats:
                    self._quorum.met()
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
        """Average the local models; None where all clients sat the round out.

        Raises
        ------
        RunError
            Too few valid replies for the quorum.
        """
        trained = self._read(TRAINING, replies, self._shapes)
        if not trained:
            return None, None
        mean = self._noised(self.merge(trained), len(trained))
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
        nodes = self._roster.nodes(grid)
        self._sent = {client: self.model_for(client, arrays) for client in nodes}
        return [
            Message(
                keys.instruction(self._sent[client], config, client, number),
                dst_node_id=node,
                message_type=kind,
                group_id=str(number),
                ttl=self._settings.deadline,
            )
            for client, node in nodes.items()
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
                self._fail(client, phase, keys.root_cause(message.error.reason), "error")
            else:
                answers[client] = message.content
        return answers

    def _exchange(
        self, grid: Grid, phase: str, questions: Iterable[Message], deadline: float, wanted: set[int] | None = None
    ) -> list[Message]:
        sent = by_client(questions)
        found = exchange(grid, sent, deadline, 0.0 if is_simulation(grid) else self._settings.probe)
        self._report.exchanges[phase] = found.after(self._report.exchanges.get(phase))
        for client in sorted((self.phase_clients(phase) if wanted is None else wanted) - set(sent)):
            self._fail(client, phase, "its SuperNode is not connected", "absent")
        for client in found.silent:
            self._fail(client, phase, f"no reply within {deadline:g} seconds", "silent")
        for client, reason in sorted(found.unreadable.items()):
            self._fail(client, phase, reason, "unreadable")
        for client, reply in found.replies.items():
            if reply.has_error() and reply.error.code == _WORKER_LOST and is_simulation(grid):
                raise RunError(
                    f"round {self._report.number}, {phase}: the worker process of client {client} died "
                    f"({keys.root_cause(reply.error.reason)}); the same command, or resume = true, goes on from here"
                )
        self._asked = {reply.metadata.reply_to_message_id: client for client, reply in found.replies.items()}
        return list(found.replies.values())

    def _read(self, phase: str, replies: Iterable[Message], shapes: Shapes | None) -> list[Reply]:
        """The valid replies in the order of client numbers, without those of who sat the round out."""
        valid = []
        for message in replies:
            client = self._asked[message.metadata.reply_to_message_id]
            try:
                valid.append(self._checked(phase, keys.read_reply(message, client, shapes)))
            except MessageError as error:
                self._fail(client, phase, str(error), error.kind)
        valid.sort(key=lambda reply: reply.client)
        if phase == TRAINING:
            valid = self._within_bound(valid)
        self.require(phase, valid)
        return [reply for reply in valid if not reply.sat_out]

    def require(self, phase: str, valid: Sequence[Reply]) -> None:
        """Go on only with enough valid replies, of which some may be of clients that sat the round out.

        Raises
        ------
        RunError
            They are too few for the quorum.
        """
        if phase == TRAINING:
            self._report.sat_out = [reply.client for reply in valid if reply.sat_out]
        if len(valid) < self._quorum.share * self.clients:
            reasons = "; ".join(f"client {f['client']}: {f['reason']}" for f in self._report.failures[:3])
            raise BelowQuorumError(
                f"round {self._report.number}, {phase}: {len(valid)} of {self.clients} clients gave a valid reply, "
                f"quorum = {self._quorum.share:g} needs more; {reasons}",
                phase,
                valid,
            )

    def _checked(self, phase: str, reply: Reply) -> Reply:
        """A well-formed reply, if it can be true.

        Raises
        ------
        MessageError
            It cannot.
        """
        self.vetting.check(phase, reply)
        if phase == TRAINING and not reply.sat_out:
            self.check(reply)
        return reply

    def _within_bound(self, valid: Sequence[Reply]) -> list[Reply]:
        """The replies whose models are not much farther from where they started than the others'."""
        rejects = self.vetting.too_far([reply for reply in valid if reply.weights and not reply.sat_out], self._sent)
        for client, (reason, kind) in rejects.items():
            self._fail(client, TRAINING, reason, kind)
        return [reply for reply in valid if reply.client not in rejects]

    def far_out(self, phase: str, samples: Mapping[int, int], measured: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Clients of which a quantity is beyond ``norm-bound`` times what is usual; recorded as failures.

        Arguments as in :meth:`fedkace_flwr.rounds.vetting.Vetting.far_out`; ``phase`` is for the record.
        """
        far = self.vetting.far_out(samples, measured)
        for client, reason in far.items():
            self._fail(client, phase, reason, "norm")
        return set(far)

    def valid(self, replies: Iterable[Message]) -> Iterator[tuple[int, Message]]:
        """Clients and messages of the training replies that counted this round."""
        for message in replies:
            client = self._asked[message.metadata.reply_to_message_id]
            if client in self._report.trained:
                yield client, message

    def _fail(self, client: int, phase: str, reason: str, kind: str = "content") -> None:
        logger.warning("round %d, %s: client %d left out: %s", self._report.number, phase, client, reason)
        self._report.failures.append({"client": client, "phase": phase, "reason": reason, "kind": kind})


class _Masked:
    """A round's side of secure aggregation; see :class:`fedkace_flwr.rounds.secure_aggregation.Peer`."""

    def __init__(self, strategy: ContinualStrategy, grid: Grid, deadline: float) -> None:
        self._strategy, self._grid, self.deadline = strategy, grid, deadline
        self._absent: set[int] | None = None
        self.replies: dict[int, Reply] = {}

    def ask(self, phase: str, questions: list[Message]) -> dict[int, Message]:
        """Exchange messages; clients without a SuperNode are taken down once."""
        replies = self._strategy._exchange(self._grid, phase, questions, self.deadline, self._absent)
        self._absent = set()
        return {self._strategy._asked[reply.metadata.reply_to_message_id]: reply for reply in replies}

    def trained(self, client: int, reply: Message) -> None:
        """Check and keep the numbers of a reply; its masked update is beyond any check."""
        numbers = copy.copy(reply)
        metrics = reply.content.metric_records.get(keys.METRICS, MetricRecord())
        numbers.content = RecordDict({keys.METRICS: metrics})
        if metrics.get(keys.SAT_OUT, 0) == 0:
            numbers.content[keys.ARRAYS] = ArrayRecord()
        self.replies[client] = self._strategy._checked(TRAINING, keys.read_reply(numbers, client, {}))

    def fail(self, client: int, phase: str, error: MessageError) -> None:
        """Record a failure."""
        self._strategy._fail(client, phase, str(error), error.kind)
