"""Flower strategy that runs the rounds of every method: messages, checks, quorum, retries, report and checkpoint."""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedkace_flwr.algorithms.server_optimisers import ServerOptimiser
from fedkace_flwr.config import Config
from fedkace_flwr.errors import MessageError, RunError, StateError
from fedkace_flwr.keys import word_of
from fedkace_flwr.messaging import validation, wire
from fedkace_flwr.messaging.metrics import Limits
from fedkace_flwr.messaging.travelling import Travelling
from fedkace_flwr.messaging.wire import NumpyArray, Reply, Weights
from fedkace_flwr.privacy.central import CentralNoise
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.rounds.class_names import CLASSES, ClassNames
from fedkace_flwr.rounds.defence import Defence
from fedkace_flwr.rounds.exchange import client_of
from fedkace_flwr.rounds.fleet import Fleet
from fedkace_flwr.rounds.gate import Gate
from fedkace_flwr.rounds.gate import check as check_counts
from fedkace_flwr.rounds.members import Members
from fedkace_flwr.rounds.pace import Pace
from fedkace_flwr.rounds.secure_aggregation import MaskedSumError, MaskedTraining, moved
from fedkace_flwr.rounds.server_round import EVALUATION, GATE, TRAINING, Messenger, RoundReport, ServerRound
from fedkace_flwr.rounds.watch import ACCURACY, Watch
from fedkace_flwr.sections import SECAGG_RANGE, SMALLEST_SUM, RunConfig
from fedkace_flwr.storage.checkpoint import Checkpoint
from fedkace_flwr.strategies.base import ServerRule

logger = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

_DEFENCE, _FLEET, _MEMBERS, _WATCH = "defence", "fleet", "members", "watch"
_KEPT = 1000  # rounds whose mean accuracies Flower's result holds
_FIRST_RETRY = 1.0  # seconds before a phase is retried; doubles with each retry
_LONGEST_RETRY = 60.0


class BelowQuorumError(RunError):
    """Fewer valid replies than the quorum.

    Attributes
    ----------
    phase : str
        Name of the phase.
    valid : sequence of Reply
        The valid replies.
    """

    def __init__(self, text: str, phase: str, valid: Sequence[Reply]) -> None:
        super().__init__(text)
        self.phase = phase
        self.valid = valid


class _StoppedError(Exception):
    """The run ends within a round, which has not been."""


class RoundDriver(Strategy):
    """Runs rounds by a method's rule: training by the round's participants, then evaluation by all clients.

    Replies are checked before they are used, and used in the order of client numbers, so that sums do not depend on
    the order of arrival. :mod:`fedkace_flwr.messaging.validation` checks each reply by itself, and
    :mod:`fedkace_flwr.rounds.defence` compares them if the defence is on.

    Parameters
    ----------
    rule : ServerRule
        The method's hooks.
    config : Config
        The configuration.
    travelling : Travelling
        The arrays that travel.
    on_round : callable
        Receives each round's report and the global model after it.
    orders : Orders, optional
        What the run is ordered to do meanwhile.
    past : callable, optional
        The checkpoint of a round, to go back to.
    on_change : callable, optional
        Called at the beginning of each round, and after each look at who is there between two rounds.
    frozen : callable, optional
        Gives the frozen part of the network, which devices that lack it are sent.

    Attributes
    ----------
    members : Members
        Who takes part.
    watch : Watch
        Follows the accuracy of each client.
    """

    def __init__(
        self,
        rule: ServerRule,
        config: Config,
        travelling: Travelling,
        on_round: Callable[[RoundReport, ArrayRecord], None],
        orders: Orders | None = None,
        past: Callable[[int], Checkpoint] | None = None,
        on_change: Callable[[], None] = lambda: None,
        frozen: Callable[[], ArrayRecord] | None = None,
    ) -> None:
        self.rule = rule
        self.members = Members(config, orders)
        self._fleet = Fleet()
        self._config = config
        self._travelling = travelling
        self._on_round, self._on_change = on_round, on_change
        self.class_names = ClassNames(config.data)
        self._orders, self._past = orders, past
        self._frozen = frozen
        self._pace = Pace(config, self.members, self.class_names, orders, self._looked)
        self._gate = Gate(config.run)
        self._quorum = Quorum(config.run, arrives=config.data.arrives)
        self._limits = Limits.of(config, travelling.held)
        self._noise = CentralNoise(config.privacy, config.run.seed, travelling.update)
        self._defence = Defence(config, travelling.parameters)
        word, numbers = word_of(config.aggregation, "server_optimiser")
        self._optimiser = ServerOptimiser(word, numbers.get("rate", 1.0))
        self.watch = Watch()
        self._done = 0
        self._waits_for = ""
        self._unfit: dict[int, int] = {}  # samples on which clients could not train in this round
        self._now: ServerRound

    def checkpoint(self) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
        """Arrays, and a JSON-ready record, that later rounds need beside the global model."""
        arrays, record = self._aggregation()
        own = {
            _DEFENCE: self._defence.state(),
            _FLEET: self._fleet.state(),
            _MEMBERS: self.members.state(),
            CLASSES: self.class_names.state(),
            _WATCH: self.watch.state(),
            GATE: self._gate.state(),
        }
        return arrays, {**record, **own}

    def restore(self, done: int, arrays: Mapping[str, NumpyArray], record: Mapping[str, Any]) -> None:
        """Continue after round ``done`` with what :meth:`checkpoint` gave then; call before :meth:`start`."""
        self._done = done
        self._defence.restore(record.get(_DEFENCE, {}))  # checkpoints of earlier versions lack these
        self.members.restore(record.get(_MEMBERS, []))
        self.class_names.restore(record.get(CLASSES, {}))
        self._fleet.restore(record.get(_FLEET, {}))
        self.watch.restore(record.get(_WATCH, []))
        self._gate.restore(record.get(GATE, {}), done)
        self._restore_aggregation(arrays, record)

    def described(self) -> dict[str, Any]:
        """The state of the run and of its clients for people, JSON-ready."""
        return {"waits_for": self._waits_for or self._pace.waits_for(), **self._fleet.described(self.members.table())}

    @property
    def most_asked(self) -> int:
        """The largest number of rounds, of those so far, in which a single client was asked to train."""
        return self._fleet.most_asked

    def _looked(self, waiting: Mapping[int, int]) -> None:
        self._fleet.wait(waiting)
        self._on_change()

    def summary(self) -> None:
        """Log what the rule does."""
        logger.info("%s", self.rule.summary())

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
        """Run the rounds that follow the last restored one; arguments as in Flower's own strategies.

        ``timeout`` applies to each phase. With ``num_rounds = 0`` rounds go on until the run is ordered to stop.

        Raises
        ------
        RunError
            No SuperNode joins, or too few clients answer for the quorum.
        """
        self.summary()
        if not self._pace.is_stopped:
            self.members.wait(grid)
        result = Result(arrays=initial_arrays)
        fields = dict(train_config or {}), dict(evaluate_config or {})
        for number in range(self._done + 1, num_rounds + 1) if num_rounds else itertools.count(self._done + 1):
            back, goes_on = self._wait(grid, number)
            if not goes_on:
                logger.info("ordered to stop after round %d", number - 1)
                break
            begun = time.monotonic()
            now = self._open(number, grid, self._told(fields[0]), trains=back is None)
            if self._orders and self._config.data.arrives:
                self._orders.finish(number)
            self._waits_for = f"the clients' replies in round {number}"
            self._on_change()
            before = result.arrays
            arrays = self._go_back(now, back) if back else before
            try:
                self.rule.begin_round(now, arrays)
                result.arrays, short_of_model = (arrays, None) if back else self._renew(arrays, grid, timeout)
                evaluation = partial(self._evaluate, result.arrays, self._told(fields[1]), grid, timeout)
                metrics, short_of_evaluation = self._phase(evaluation, grid)
            except _StoppedError:
                result.arrays = before
                logger.info("ordered to stop in round %d, which is repeated if the run goes on", number)
                break
            result.evaluate_metrics_clientapp[number] = metrics or MetricRecord()
            result.evaluate_metrics_clientapp.pop(number - _KEPT, None)
            if evaluate_fn and (central := evaluate_fn(number, result.arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = central

            if agreed := self.class_names.settle(number):
                now.report.own["new_classes"] = agreed
            for client, text in self.watch.take(now.report.trained).items():
                now.report.alarm(ACCURACY, client, text)
            now.report.seconds = time.monotonic() - begun
            self._fleet.add_round(now.report, self.watch.means())
            self._waits_for = ""
            self._on_round(now.report, result.arrays)
            if self._orders:  # only now: after a crash the round is repeated
                self._orders.finished(number)
                if back:
                    self._orders.rolled_back(back.round)
            shortfall = short_of_evaluation or short_of_model
            if shortfall is None:
                self._quorum.met()
            elif number != num_rounds:
                self._quorum.short(shortfall)
                self.members.gather(grid, self._quorum.share)
        self._waits_for = "nothing: the run has ended"
        return result

    def _told(self, fields: Mapping[str, Any]) -> ConfigRecord:
        """The configuration record of a phase's messages: what the run tells all, as it is now."""
        return ConfigRecord({**fields, **self.class_names.told(), **self._gate.told()})

    def _wait(self, grid: Grid, number: int) -> tuple[Checkpoint | None, bool]:
        """Wait for the next round: what it is ordered to go back to, and whether there is one."""
        while self._pace.wait(grid, number):
            to = self._orders.rollback if self._orders else None
            if to is None or self._orders is None:
                return None, True
            try:
                if self._past is None:
                    raise StateError("the run keeps no past models")
                return self._past(to), True
            except StateError as error:
                logger.error("cannot go back to round %d, as was ordered: %s", to, error)
                self._orders.rolled_back(to)
        return None, False

    def _go_back(self, now: ServerRound, back: Checkpoint) -> ArrayRecord:
        """Take the global model, and what it was made with, from an earlier round, and distrust what came after it."""
        self._restore_aggregation(back.arrays, back.record)
        self._gate.undo(back.record.get(GATE, {}), back.round, now.number)
        now.report.own["rolled_back_to"] = back.round
        logger.warning("round %d: goes back to the model of round %d, as was ordered", now.number, back.round)
        return wire.array_record(back.weights)

    def _renew(self, arrays: ArrayRecord, grid: Grid, timeout: float) -> tuple[ArrayRecord, BelowQuorumError | None]:
        """Train and merge, and test the outcome if there is a gate; the global model to continue with."""
        now, judges = self._now, self._gate.judges
        before = (self._aggregation(), self._defence.state()) if judges else None
        config = ConfigRecord({**now.run_fields})
        merged, shortfall = self._phase(partial(self._train, arrays, config, grid, timeout), grid)
        if merged is None:
            return arrays, shortfall
        candidate = self.rule.between(now, self._stepped(arrays, merged))
        if before is None:
            self._gate.settle(now.number, held=False)
            return candidate, None
        verdict, shortfall = self._phase(partial(self._judge, candidate, arrays, grid, timeout), grid)
        now.report.own[GATE] = verdict or {"candidate": None, "accepted": None, "tested": 0, "held": True}
        self._gate.settle(now.number, held=now.report.own[GATE]["held"])
        if not now.report.own[GATE]["held"]:
            return candidate, None
        self._restore_aggregation(*before[0])
        self._defence.restore(before[1])
        return arrays, shortfall

    def _stepped(self, arrays: ArrayRecord, aggregate: ArrayRecord) -> ArrayRecord:
        """The model after the server optimiser's step from the global model towards the clients' aggregate."""
        if not self._optimiser.is_on:
            return aggregate
        parameters = self._travelling.parameters
        return wire.array_record(self._optimiser.step(wire.unpack(arrays), wire.unpack(aggregate), parameters))

    def _aggregation(self) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
        """What the rule and the server optimiser need in later rounds: arrays, and a record ready for JSON."""
        arrays, record = self.rule.state()
        return {**arrays, **self._optimiser.state()}, record

    def _restore_aggregation(self, arrays: Mapping[str, NumpyArray], record: Mapping[str, Any]) -> None:
        self.rule.restore(self._optimiser.restored(arrays), record)

    def _judge(self, candidate: ArrayRecord, accepted: ArrayRecord, grid: Grid, timeout: float) -> dict[str, Any]:
        """The gate's phase: all clients test two models on samples of their own."""
        now = self._now
        config = ConfigRecord({**now.run_fields})
        questions = self._instructions(f"{MessageType.QUERY}.{wire.GATE}", candidate, config, self.members.present)
        for question in questions:
            question.content[wire.ACCEPTED] = accepted
        replies = now.messenger.exchange(GATE, questions, timeout, self.members.present)
        verdict = self._gate.judge(self._with_quorum(GATE, self._read(GATE, replies.values())))
        if verdict["held"]:
            now.report.alarm(
                "gate",
                None,
                f"its model is held: it answers {100 * verdict['candidate']:.1f} % of {verdict['tested']} samples "
                f"rightly, and the accepted one {100 * verdict['accepted']:.1f} %, which everyone keeps",
            )
        return verdict

    def _open(self, number: int, grid: Grid, run_fields: ConfigRecord, *, trains: bool) -> ServerRound:
        self._unfit = {}
        self.members.open(number, grid)
        present = self.members.present
        asked: tuple[int, ...] = ()
        if trains and self.rule.train_action:
            asked = self._config.stream.participants(number, self._config.run.seed, present)
        report = RoundReport(number, asked, away=list(self.members.away))
        messenger = Messenger(grid, self.members, self._config.run, report, self._frozen)
        self._now = ServerRound(
            self.members.count,
            self._travelling.sent,
            self._travelling.replied,
            self._travelling.parameters,
            messenger,
            self._limits,
            self._defence,
            dict(run_fields),
        )
        return self._now

    def _phase(self, attempt: Callable[[], Outcome], grid: Grid) -> tuple[Outcome | None, BelowQuorumError | None]:
        """Run a phase, retrying or skipping it as ``below-quorum`` says; its result, or why it was skipped.

        Raises
        ------
        RunError
            The phase stays below the quorum too often.
        _StoppedError
            The run was ordered to stop, and the phase is below the quorum.
        """
        pause = _FIRST_RETRY
        while True:
            try:
                result = attempt()
            except BelowQuorumError as shortfall:
                if not self._quorum.skips:
                    self._quorum.short(shortfall)
                logger.warning("%s; below-quorum = %s", shortfall, self._config.run.below_quorum)
                self._note(shortfall)
                if self._quorum.skips:
                    return None, shortfall
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_RETRY)
                self.members.gather(grid, self._quorum.share)
                self._on_change()
                if self._pace.is_stopped:
                    raise _StoppedError from shortfall
                self._ask_others()
            else:
                if self._quorum.repeats:
                    self._quorum.met()
                return result, None

    def _ask_others(self) -> None:
        """Ask no one any longer who has been away for too long; if nobody is left, ask those who are there now."""
        report, present = self._now.report, self.members.present
        left = tuple(client for client in report.asked if client in present)
        if report.asked and not left:
            left = self._config.stream.participants(report.number, self._config.run.seed, present)
        report.asked = left or report.asked

    def _note(self, shortfall: BelowQuorumError) -> None:
        """Report a phase below the quorum, with the metrics that did arrive."""
        report = self._now.report
        metrics = {reply.client: reply.metrics for reply in shortfall.valid if not reply.sat_out}
        if shortfall.phase == TRAINING:
            report.trained = metrics
        elif shortfall.phase == EVALUATION:
            report.evaluated = {client: held for client, held in metrics.items() if wire.SEEN_CLASSES in held}
        if self._quorum.skips:
            report.below_quorum.append(shortfall.phase)
        else:
            report.repeated[shortfall.phase] = report.repeated.get(shortfall.phase, 0) + 1

    def _train(self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float) -> ArrayRecord | None:
        """The training phase; None if no client had anything to train on and the model stays."""
        if self.rule.train_action is None:
            return ArrayRecord()
        questions = list(self.configure_train(self._now.number, arrays, config, grid))
        if self._config.privacy.secagg:
            return self._train_masked(arrays, questions, timeout)
        replies = self._now.messenger.exchange(TRAINING, questions, timeout, self._now.report.asked)
        return self.aggregate_train(self._now.number, replies.values())[0]

    def _train_masked(self, arrays: ArrayRecord, questions: Sequence[Message], timeout: float) -> ArrayRecord | None:
        now, before, names = self._now, wire.unpack(arrays), self._travelling.update
        phase = MaskedTraining(now.messenger, now.report.asked, timeout, self._check_training)
        try:
            update = phase.run(questions, before, names, SECAGG_RANGE)
        except MaskedSumError as error:
            reasons = "; ".join(filter(None, [str(error), now.report.reasons()]))
            text = f"round {now.number}, {TRAINING}: secure aggregation: {reasons}"
            raise BelowQuorumError(text, TRAINING, phase.valid) from error
        finally:
            self._fleet.trained(phase.valid)
        trained = self._with_quorum(TRAINING, phase.valid)
        now.report.trained = {reply.client: reply.metrics for reply in trained}
        if update is None:
            if trained:
                few = "round %d: the model stays as it is: %d devices trained, and a masked sum needs %d"
                logger.info(few, now.number, len(trained), SMALLEST_SUM)
            self.rule.trained(now, [])
            return None
        self.rule.trained(now, trained)
        return wire.array_record(self._noise.add(moved(before, names, update), before, len(trained), now.number))

    def _evaluate(self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float) -> MetricRecord | None:
        questions = self.configure_evaluate(self._now.number, arrays, config, grid)
        replies = self._now.messenger.exchange(EVALUATION, questions, timeout, self.members.present)
        return self.aggregate_evaluate(self._now.number, replies.values())

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One training message for each of the round's participants that can be reached."""
        kind = self.rule.train_action or MessageType.TRAIN
        messages = self._instructions(kind, arrays, config, self._now.report.asked)
        return _with_extras(messages, self.rule.training_extras_for)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per client that can be reached, with the new global model."""
        messages = self._instructions(MessageType.EVALUATE, arrays, config, self.members.present)
        return _with_extras(messages, self.rule.extras_for)

    def _instructions(
        self, kind: str, arrays: ArrayRecord, config: ConfigRecord, clients: Collection[int]
    ) -> list[Message]:
        now, messenger = self._now, self._now.messenger
        nodes = {client: node for client, node in messenger.nodes().items() if client in clients}
        now.sent.clear()
        now.sent.update({client: self.rule.model_for(client, arrays) for client in nodes})
        return [
            messenger.message(kind, node, wire.instruction(now.sent[client], config, client, now.number))
            for client, node in nodes.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the local models; None if all clients sat the round out.

        Raises
        ------
        BelowQuorumError
            Too few valid replies.
        """
        now = self._now
        valid = self._read(TRAINING, replies)
        models = [reply for reply in valid if reply.weights and not reply.sat_out]
        # Methods with central noise send all clients the same model.
        before = wire.unpack(next(iter(now.sent.values()))) if self._noise.is_on and models else {}
        if before:
            models = [replace(each, weights=self._noise.clipped(each.weights, before)) for each in models]
        counted = self.rule.compare(now, models)
        absent = [reply for reply in valid if reply.sat_out or not reply.weights]
        trained = self._with_quorum(TRAINING, sorted([*counted, *absent], key=lambda reply: reply.client))
        now.report.trained = {reply.client: reply.metrics for reply in trained}
        if not trained:
            self.rule.trained(now, [])
            return None, None
        merged = self.rule.merge(now, trained)
        if before:
            merged = self._noise.add(merged, before, len(trained), now.number)
        if self._config.run.diagnostics:
            now.report.drift = self.rule.drift(now, trained, merged)
        self.rule.trained(now, trained)
        self._defence.remember()
        return wire.array_record(merged), None

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean accuracy of the clients' inference models.

        Raises
        ------
        BelowQuorumError
            Too few valid replies.
        """
        valid = self._with_quorum(EVALUATION, self._read(EVALUATION, replies))
        waiting = {reply.client: int(reply.metrics.get(wire.WAITING, 0)) for reply in valid}
        report = self._now.report
        self._pace.told(waiting, self._unfit, report.failed(TRAINING) - {*report.trained, *report.sat_out})
        met = [reply for reply in valid if wire.SEEN_CLASSES in reply.metrics]
        self._now.report.evaluated = {reply.client: reply.metrics for reply in met}
        accuracies = [float(reply.metrics[wire.ACCURACY]) for reply in met if wire.ACCURACY in reply.metrics]
        mean = {wire.ACCURACY: float(np.mean(accuracies))} if accuracies else {}
        return MetricRecord({**mean, **self.rule.evaluated(self._now)})

    def _read(self, phase: str, replies: Iterable[Message]) -> list[Reply]:
        """The replies that are valid by themselves, in the order of client numbers; the others are recorded."""
        now, valid, models = self._now, list[Reply](), dict[int, Weights]()
        for message in replies:
            client = now.messenger.sender(message)
            try:
                if phase == TRAINING:
                    # An error reply has no content; `read_reply` raises its reason.
                    shapes = now.replied if message.has_error() else self.rule.expected(now, message.content)
                    reply = self._completed(wire.read_reply(message, client, shapes), models)
                    self._check_training(reply)
                else:
                    reply = wire.read_reply(message, client, None)
                    validation.check_metrics(reply.metrics, self._limits)
                    if phase == GATE:
                        check_counts(reply)
                valid.append(reply)
                self.class_names.take(client, message.content)
            except MessageError as error:
                now.fail(client, phase, str(error), error.kind)
        valid.sort(key=lambda reply: reply.client)
        (self._fleet.trained if phase == TRAINING else self._fleet.heard)(valid)
        return valid

    def _completed(self, reply: Reply, models: dict[int, Weights]) -> Reply:
        """A reply with part of the model, completed by what its client was sent; others stay as they are.

        Clients that were sent the same model, as ``models`` keeps them, share the arrays, which
        :func:`fedkace_flwr.strategies.base.weighted_mean` therefore leaves as they are.
        """
        names = self._travelling.sent.keys()
        if not 0 < len(reply.weights.keys() & names) < len(names):
            return reply
        sent = self._now.sent[reply.client]
        if id(sent) not in models:
            models[id(sent)] = wire.unpack(sent)
        return replace(reply, weights={**models[id(sent)], **reply.weights})

    def _check_training(self, reply: Reply) -> None:
        validation.check_metrics(reply.metrics, self._limits)
        if not reply.sat_out:
            validation.check_examples(reply.examples, self._limits)
            validation.check_statistics(reply.weights, wire.unpack(self._now.sent[reply.client]), self._limits)
            self.rule.check(self._now, reply)

    def _with_quorum(self, phase: str, valid: Sequence[Reply]) -> list[Reply]:
        """The replies of clients that did not sit the round out.

        Raises
        ------
        BelowQuorumError
            All valid replies together are too few.
        """
        report = self._now.report
        if phase == TRAINING:
            self._unfit = {reply.client: int(reply.metrics.get(wire.WAITING, 0)) for reply in valid if reply.sat_out}
            report.sat_out = list(self._unfit)
        asked = report.asked if phase == TRAINING else self.members.present
        if len(valid) < self._quorum.share * len(asked) or not asked:
            raise BelowQuorumError(
                f"round {report.number}, {phase}: {len(valid)} of {len(asked)} clients gave a valid reply, "
                f"quorum = {self._quorum.share:g} needs more; {report.reasons()}",
                phase,
                valid,
            )
        return [reply for reply in valid if not reply.sat_out]


def _with_extras(
    messages: list[Message], extras_for: Callable[[int], Mapping[str, ArrayRecord | ConfigRecord]]
) -> list[Message]:
    for message in messages:
        for name, record in extras_for(client_of(message)).items():
            message.content[name] = record
    return messages


class Quorum:
    """Counts consecutive shortfalls; keys ``quorum`` and ``below-quorum``.

    Parameters
    ----------
    settings : RunConfig
        The run's keys.
    arrives : bool
        Whether data arrives in inboxes, where ``auto`` repeats without a limit.

    Attributes
    ----------
    share : float
        Smallest sufficient share of the clients that a phase asks.
    """

    def __init__(self, settings: RunConfig, *, arrives: bool) -> None:
        self._rule, numbers = word_of(settings, "below_quorum")
        if self._rule == "auto":
            self._rule = "repeat" if arrives else "stop"
        self._limit = int(numbers.get("limit", 0))
        self._in_a_row = 0
        self.share = settings.quorum

    @property
    def skips(self) -> bool:
        """Whether a phase below the quorum is skipped."""
        return self._rule == "skip"

    @property
    def repeats(self) -> bool:
        """Whether a phase below the quorum is retried."""
        return self._rule == "repeat"

    def met(self) -> None:
        """Reset the count."""
        self._in_a_row = 0

    def short(self, shortfall: BelowQuorumError) -> None:
        """Count one more round (``skip``) or attempt (``repeat``) below the quorum.

        Raises
        ------
        RunError
            The run ends: at once with ``stop``, otherwise when the limit is reached.
        """
        if self._rule == "stop":
            raise shortfall
        self._in_a_row += 1
        if 0 < self._limit <= self._in_a_row:
            what = "rounds" if self._rule == "skip" else "attempts"
            raise RunError(
                f"{shortfall}; below-quorum = {self._rule}:{self._limit}, so many consecutive {what} reached: "
                "finished rounds are kept, the same command with resume = true goes on"
            ) from shortfall
