"""A client's round, the same for every method: from the chunk to the stored answer."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.client import NumPyClient
from torch import Tensor

from fedkace_flwr.clients import late
from fedkace_flwr.clients.base import Array, ClientRound, ClientRule, Evaluation, Metrics, Stopwatch
from fedkace_flwr.clients.judges import judges, renewed
from fedkace_flwr.clients.memory import joined, undone, unnamed
from fedkace_flwr.errors import MessageError, ModelError
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.export.global_model import models_of
from fedkace_flwr.inference import model_files
from fedkace_flwr.inference.kept_models import Answering, Predictor, labels_of
from fedkace_flwr.messaging import wire
from fedkace_flwr.storage.client_state import FIRST_MET, Answer, ClientState

_BLOCK = 2**26  # bytes of samples that are predicted at once
_FEWEST = 2  # samples in a step, for batch normalisation over maps of a single pixel

Parameters = list[np.ndarray[Any, Any]]


class StreamingClient(NumPyClient):
    """One client of a streaming federation: runs a round, with a method's rule where methods differ.

    Parameters
    ----------
    rule : ClientRule
        The method's client half.
    content : RecordDict, optional
        The whole message, for methods that send more than a model.
    models : tuple of Path and int, optional
        Folder for the models that the client predicts with, and the group that may read it; by default the state
        folder.

    Attributes
    ----------
    is_device : bool
        Whether this machine is a device, whose costs are reported, and not a part of a simulation.
    unnamed : list of str
        After training: names of the classes that the client remembers from an earlier run and that this one lacks.
    """

    def __init__(
        self,
        rule: ClientRule,
        content: RecordDict | None = None,
        models: tuple[Path, int | None] | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        self.rule = rule
        self.content = content if content is not None else RecordDict()
        self._told: Mapping[str, Any] = self.content.config_records.get(wire.CONFIG, {})
        self._models = models or (rule.store.folder, None)
        self.unnamed: list[str] = []
        self.is_device = on_device or rule.config.data.arrives
        self._keeps_models = rule.config.keeps_models(on_device=on_device)

    def fit(self, parameters: Parameters, config: dict[str, Any]) -> tuple[list[Any], int, Metrics]:
        """As :meth:`train`, in the form of Flower's ``NumPyClient``: arrays in the model's order."""
        answer = self.train(self._named(parameters), int(config[wire.ROUND]))
        return list(answer.arrays.values()), answer.examples, dict(answer.metrics)

    def evaluate(self, parameters: Parameters, config: dict[str, Any]) -> tuple[float, int, Metrics]:
        """As :meth:`test`, in the form of Flower's ``NumPyClient``; the loss is the share of wrong answers."""
        examples, metrics = self.test(self._named(parameters), int(config[wire.ROUND]))
        return 1.0 - metrics.get(wire.ACCURACY, 0.0), examples, metrics

    def train(self, sent: Mapping[str, Array], round_number: int) -> Answer:
        """Train on this round's chunk and buffer, choose the new buffer, and answer with the local model.

        A round that is already done is answered from the store. A client without a new chunk, or with one of a single
        sample and nothing in its buffer, returns no model and no samples, and goes on answering as before.
        """
        return self.rule.store.answer(round_number) or self._train_round(sent, round_number)

    def test(self, sent: Mapping[str, Array], round_number: int) -> tuple[int, Metrics]:
        """Take the new global model, decide which model answers, and report that model's test accuracy.

        Returns the number of test images, and the metrics. A client that has met no class yet, or has no model,
        tests nothing; one without test images reports no accuracy. What has waited too long for a label is dropped
        before, and what waits and has no prediction yet is predicted.
        """
        rule = self.rule
        state = rule.store.before(round_number + 1)
        # The verdict on a round's candidate may be another one after the server has lost the first.
        if state.evaluated != round_number or undone(state, self._told, rule.store) is not state:
            state = self._without_overdue(self._caught_up(state, round_number))
            if not bool(state.seen.any()) or not (sent or state.round):
                return 0, self._counts(state)
            state, answering = self._evaluate_round(sent, state, round_number)
            if self._keeps_models:  # before the state is stored: if this fails, the evaluation is repeated
                self._keep_models(answering, state)
            rule.store.save(state)
        metrics = dict(state.evaluation)
        return metrics.pop(wire.EXAMPLES), metrics | self._counts(state)

    def judge(
        self, candidate: Mapping[str, Array], accepted: Mapping[str, Array], round_number: int
    ) -> tuple[int, Metrics]:
        """Test two global models, each alone, before one of them answers; nothing is stored.

        The samples are those of :mod:`fedkace_flwr.clients.judges`. Returns their number, and the metrics of the test.
        """
        rule = self.rule
        state = undone(rule.store.before(round_number), self._told, rule.store)
        samples = judges(state)
        # As a client without a local model predicts; and not adapted to the samples on which it is tested.
        alone = replace(state, round=0, buffer=rule.source.none())
        right = {wire.GATE_CANDIDATE: 0, wire.GATE_ACCEPTED: 0}
        for name, weights in zip(right, (candidate, accepted), strict=True) if len(samples) else ():
            found = rule.predictions(weights, alone, round_number, samples)
            assert found is not None  # a class was met, and there are weights
            right[name] = int((found == samples.labels).sum())
        return len(samples), {wire.GATE_TESTED: len(samples), **right}

    def act(self, action: str, content: RecordDict, round_number: int) -> RecordDict:
        """Answer a message of the method's own.

        Raises
        ------
        MessageError
            The method has no such action, or the content does not fit it.
        """
        if action == self.rule.training_action:
            answer = self.train({}, round_number)
            return wire.reply_content(answer.arrays or None, answer.examples, answer.metrics)
        acted = self.rule.act(action, content, round_number)
        if acted.state is not None:
            self.rule.store.save(acted.state)
        return acted.reply

    def _train_round(self, sent: Mapping[str, Array], round_number: int) -> Answer:
        rule, watch = self.rule, Stopwatch()
        state = self._caught_up(rule.store.before(round_number), round_number, joins=True)
        counts = self._counts(state)  # before the chunk is taken: what arrives meanwhile is new to the server
        chunk = rule.source.chunk(round_number, state.round)
        if not len(chunk) or len(chunk) + len(state.buffer) < _FEWEST:  # what has arrived waits for the next round
            return Answer({}, 0, {wire.SAT_OUT: 1} | counts)
        keys = rule.source.late.keys(chunk)
        current = chunk.class_counts(rule.experiment.num_classes) > 0
        now = ClientRound(round_number, chunk, state, current, sent, self.content)
        with watch(wire.EVALUATION_SECONDS):
            earlier = late.recalled(state.extra, keys, chunk.labels)
            untrained, (prequential, tested) = rule.new_class_accuracies(now), rule.prequential(now, earlier)
        net = rule.network(sent)
        with watch(wire.TRAINING_SECONDS):
            rule.begin(net, now)
            training = rule.training(net, now)
            rule.train(training, chunk, state.buffer)
        with watch(wire.SELECTION_SECONDS):
            kept = rule.maintain(now, training)
            stored = rule.with_new_logits(now, training.net).tensors() if training.stored is not None else {}
            if rule.config.run.gate == "hold":
                capacity = rule.config.buffer.capacity
                stored |= renewed(now, kept.buffer, capacity, rule.generator("judges", round_number))
        with watch(wire.EVALUATION_SECONDS):
            local = (
                rule.predictor.test_local(now, training, kept) if rule.needs_local_test(state) else Evaluation(None, 0)
            )
        report = {**rule.report(now, training, kept), **untrained, **prequential, **local.report}
        arrays, model = rule.reply(now, training), training.net.state_dict()
        changing = rule.experiment.travelling.sent if rule.receives_model else ()
        rest = as_arrays({name: model[name] for name in changing if name not in arrays})
        report |= watch.times(rule.training_times)
        answer = Answer(arrays, len(chunk), report, rest)
        met = {FIRST_MET: torch.where(now.seen & ~state.seen, round_number, state.first_met)}
        learned = replace(
            state,
            round=round_number,
            # An evaluation without this training may have come before.
            evaluated=min(state.evaluated, round_number - 1),
            follows=state.round,
            seen=now.seen,
            buffer=kept.buffer,
            local_accuracy=local.accuracy,
            local_class_accuracy=local.classes,
            extra=late.forgotten({**state.extra, **met, **tested, **kept.extra, **stored}, keys),
        )
        rule.store.save_trained(learned, answer)
        rule.source.learned(round_number)  # the chunk is put away only when its outcome is on disk
        return answer

    def _evaluate_round(
        self, sent: Mapping[str, Array], state: ClientState, round_number: int
    ) -> tuple[ClientState, Answering | None]:
        """The state after the evaluation, and, if they are to be kept, the models that the client predicts with."""
        rule, watch = self.rule, Stopwatch()
        state, waiting = replace(state, evaluated=round_number), rule.source.late.waiting(round_number)
        predicts = self._keeps_models or len(late.unpredicted(state.extra, waiting)) > 0
        with watch(wire.EVALUATION_SECONDS):
            net = rule.predictor.received(sent, state, round_number)
            # Now: the method may choose another buffer, and the network holds other models later.
            received = as_arrays(net.state_dict()) if sent and predicts else {}
            buffer = state.buffer
            state, report = rule.receive(net, state, round_number, self.content)
            if state.round == round_number and not state.has_local_model:  # the method may have chosen of the chunk
                state = replace(state, buffer=buffer)
            tested = rule.evaluate(net, state)
            answering = rule.answering(received, state) if predicts else None
            state = self._predicted(answering, state, waiting)
        report |= tested.report
        if tested.accuracy is not None:
            report[wire.ACCURACY] = tested.accuracy
            if came := rule.source.late.tests(round_number):
                report[wire.ARRIVED_ACCURACY] = tested.accuracy * tested.examples / came
        if tested.classes:
            report[wire.CLASS_ACCURACY] = tested.classes
        if state.global_since is not None:
            report[wire.SWITCHED_AT] = state.global_since
        report |= {wire.SEEN_CLASSES: int(state.seen.sum()), wire.EXAMPLES: tested.examples}
        report |= watch.times(rule.evaluation_times)
        return replace(state, evaluation=report), answering

    def _predicted(self, answering: Answering | None, state: ClientState, waiting: Tensor) -> ClientState:
        """The state with predictions of the samples that wait for a label, if there are models that predict."""
        rule, source, extra = self.rule, self.rule.source.late, state.extra
        fresh = late.unpredicted(extra, waiting)
        if rule.config.data.arrives:  # the newest, so that a round's time is bounded
            fresh = fresh[-rule.config.data.inbox_bound :]
        block = max(1, _BLOCK // rule.experiment.dataset.form.size)
        for keys in torch.split(fresh, block) if answering is not None and len(fresh) else ():
            places, samples = source.samples(keys)
            if len(samples) and answering is not None:
                answers = rule.answers(answering, rule.views(answering, samples), state.seen)
                extra = late.predicted(extra, keys[places], answers, state.seen, state.evaluated)
        return replace(state, extra=late.pruned(extra, waiting, source.kept))

    def _without_overdue(self, state: ClientState) -> ClientState:
        """The state with samples dropped, and counted, that are too many or have waited too long for a label."""
        source = self.rule.source.late
        if len(overdue := source.overdue()):
            state = replace(state, extra=late.dropped(state.extra, overdue))
            self.rule.store.save(state)
            source.drop(overdue)
        return state

    def _counts(self, state: ClientState) -> Metrics:
        """What the server is told of an inbox after each evaluation, and by a client that cannot train."""
        counts = self.rule.source.counts()
        return {**counts, wire.DROPPED: late.drops(state.extra)} if counts else {}

    def _caught_up(self, state: ClientState, round_number: int, *, joins: bool = False) -> ClientState:
        """The state with earlier rounds finished and, before training, with the waiting classes that now have labels."""
        rule = self.rule
        finished = undone(rule.catch_up(state, round_number), self._told, rule.store)
        if joins:
            finished = joined(finished, rule.store.names, rule.config, rule.number)
            self.unnamed = unnamed(finished, rule.store.names)
        if finished is not state:
            self.rule.store.save(finished)
        return finished

    def _keep_models(self, answering: Answering | None, state: ClientState) -> None:
        experiment = self.rule.experiment
        if answering is None:
            return
        kept = models_of(
            experiment,
            experiment.device,
            self.rule.source.class_names,
            run=state.run,
            round=state.evaluated,
            trained=state.round,
            switched_at=state.global_since,
            seen=labels_of(state.seen),
            **vars(answering),
        )
        try:
            Predictor(kept).check()
        except ModelError as error:
            raise MessageError(f"the model of round {state.evaluated} is refused: {error}", "values") from error
        folder, group = self._models
        model_files.write(folder, kept, group)

    def _named(self, parameters: Parameters) -> dict[str, Array]:
        return dict(zip(self.rule.experiment.travelling.sent, parameters, strict=True)) if parameters else {}
