"""The client half of every method: one round from chunk to stored answer, hooks where methods differ."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.client import NumPyClient
from torch import Tensor

from fedkace_flwr.data.datasets import framing_of
from fedkace_flwr.errors import MessageError, RunError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.inference import kept_models as serving
from fedkace_flwr.inference.kept_models import Answering, KeptModels
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.metrics import accuracy
from fedkace_flwr.samples import Samples
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.sources import Source
from fedkace_flwr.storage.client_store import Answer, ClientState, ClientStore
from fedkace_flwr.training.devices import choose_precision
from fedkace_flwr.training.loop import predict, train
from fedkace_flwr.training.losses import Objective, TaskLoss
from fedkace_flwr.training.model import ResNet18

logger = logging.getLogger(__name__)

Metrics = dict[str, Any]


@dataclass(frozen=True)
class ClientRound:
    """A client's round as it begins.

    Attributes
    ----------
    number : int
        t, from 1.
    chunk : Samples
        D_t.
    state : ClientState
        What the client knew at the end of the round before; its buffer is M_{t-1}.
    current : Tensor
        bool (C,): the chunk's classes, C_t.
    """

    number: int
    chunk: Samples
    state: ClientState
    current: Tensor

    @property
    def old(self) -> Tensor:
        """Classes of earlier chunks, C_<t."""
        return self.state.seen

    @property
    def seen(self) -> Tensor:
        """Classes of all chunks, C_<=t."""
        return self.current | self.state.seen


class Stopwatch:
    """Seconds by purpose."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, purpose: str) -> Iterator[None]:
        """Add the time that the block takes."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add(purpose, time.perf_counter() - begun)

    def add(self, purpose: str, seconds: float) -> None:
        """Add time that was taken elsewhere."""
        self.seconds[purpose] = self.seconds.get(purpose, 0.0) + seconds


class ContinualClient(NumPyClient):
    """One client of a streaming federation.

    As it stands it is federated averaging: it trains on its chunk, keeps no buffer and answers by the global
    model. A method overrides :meth:`begin`, :meth:`objective`, :meth:`maintain`, :meth:`report` and
    :meth:`receive`, and :meth:`act` where it has messages of its own.

    Parameters
    ----------
    number : int
        The client's number k, from 0.
    experiment : Experiment
        Configuration, data and network.
    source : Source
        Where its samples come from.
    store : ClientStore
        Where the client's state lies.
    content : RecordDict, optional
        The whole message, for methods that send more than a model.

    Attributes
    ----------
    extra : dict of str to Tensor
        What a method wants stored with the round's state, beside the buffer; on the CPU.
    """

    def __init__(
        self,
        number: int,
        experiment: Experiment,
        source: Source,
        store: ClientStore,
        content: RecordDict | None = None,
    ) -> None:
        self.number = number
        self.experiment = experiment
        self.source = source
        self.config = experiment.config
        self.store = store
        self.content = content if content is not None else RecordDict()
        self.extra: dict[str, Tensor] = {}

    # What methods override

    def begin(self, net: ResNet18, now: ClientRound) -> None:
        """Prepare the network that training starts from, in place; it holds the model that the client was sent."""

    def objective(self, net: ResNet18, now: ClientRound) -> Objective:
        """The loss that this round's training minimises; its masks lie on the experiment's device."""
        seen = now.seen.to(self.experiment.device)
        return TaskLoss(seen, seen)

    def training_settings(self) -> TrainingConfig:
        """Epochs, learning rate and batching of local training."""
        return self.config.training

    def maintain(self, net: ResNet18, now: ClientRound) -> Samples:
        """Choose the new buffer M_t, by the trained local model."""
        return now.state.buffer

    def report(self, objective: Objective, now: ClientRound) -> Metrics:
        """What the server may know of training and buffer, beside sizes and seconds."""
        return {}

    def receive(
        self, net: ResNet18, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Take the new global model, and whatever else the message brings: choose the inference model.

        Returns the state with the decision (``switched_at`` set: the global model answers), and what to report.
        """
        if self.config.run.inference == "local":
            return state, {}
        return replace(state, switched_at=state.switched_at or round_number), {}

    def answering(self, parameters: list[np.ndarray[Any, Any]], state: ClientState) -> Answering | None:
        """The networks that a round's evaluation has decided between, to be kept for inference.

        Returns None where the local model should answer and its file is lost.
        """
        weights = {serving.GLOBAL: dict(zip(self.experiment.weight_names, parameters, strict=True))}
        if state.switched_at is not None:
            return Answering(weights, {serving.GLOBAL: state.seen})
        trained = self.store.answer(state.round)
        if trained is None:
            return None
        return Answering({**weights, serving.LOCAL: dict(trained.arrays)}, {serving.LOCAL: state.seen})

    def act(self, action: str, content: RecordDict, round_number: int) -> RecordDict:
        """Answer a message of the method's own, such as ``query.features``, inside a round.

        Raises
        ------
        MessageError
            The method has no such action.
        """
        raise MessageError(f"{type(self).__name__} has no action {action!r} (content: {sorted(content)})")

    # One round, as Flower drives it

    def fit(self, parameters: list[np.ndarray[Any, Any]], config: dict[str, Any]) -> tuple[list[Any], int, Metrics]:
        """Train on this round's chunk and buffer, choose the new buffer, and return the local model.

        A round already done is answered from the store. A client to which nothing has arrived sits the round out:
        no model, no samples, and it goes on answering as before.
        """
        round_number = int(config[keys.ROUND])
        answer = self.store.answer(round_number) or self._train_round(parameters, round_number)
        return list(answer.arrays.values()), answer.examples, dict(answer.metrics)

    def evaluate(self, parameters: list[np.ndarray[Any, Any]], config: dict[str, Any]) -> tuple[float, int, Metrics]:
        """Take the new global model, decide which model answers, and report that model's test accuracy.

        Returns the share of wrong answers as Flower's loss. A client that has met no class yet tests nothing; one
        without test images reports no accuracy.
        """
        round_number = int(config[keys.ROUND])
        state = self.store.before(round_number + 1)
        if not bool(state.seen.any()):
            return 1.0, 0, {}
        if state.evaluated != round_number:
            state = self._evaluate_round(parameters, state, round_number)
            if self.config.keeps_models:  # before the state: until that is in place, all of this is done again
                self._keep_models(parameters, state)
            self.store.save(state)
        metrics = dict(state.evaluation)
        return 1.0 - metrics.get(keys.ACCURACY, 0.0), metrics.pop(keys.EXAMPLES), metrics

    def _train_round(self, parameters: list[np.ndarray[Any, Any]], round_number: int) -> Answer:
        started, watch = time.time(), Stopwatch()
        state = self.store.before(round_number)
        chunk = self.source.chunk(round_number, state.round)
        if not len(chunk):
            return Answer({}, 0, {keys.SAT_OUT: 1})
        now = ClientRound(round_number, chunk, state, chunk.class_counts(self.experiment.num_classes) > 0)
        net, fetch = self._network(parameters), self.experiment.dataset.fetch
        with watch(keys.TRAINING_SECONDS):
            self.begin(net, now)
            objective = self.objective(net, now)
            train(
                net,
                (chunk.images(fetch), chunk.labels),
                (state.buffer.images(fetch), state.buffer.labels),
                objective,
                self.training_settings(),
                self.experiment.preprocess,
                self.generator("batches", round_number),
                captured=self.config.run.step == "captured",
            )
        with watch(keys.SELECTION_SECONDS):
            buffer = self.maintain(net, now)
        with watch(keys.EVALUATION_SECONDS):
            needed = state.switched_at is None or self.config.run.evaluate == "both"
            local_accuracy = self._test(net, now.seen)[0] if needed else None

        report = self.report(objective, now) | {keys.BUFFER_SIZE: len(buffer)}
        if self.config.run.report_classes:
            report[keys.BUFFER_CLASSES] = buffer.class_counts(self.experiment.num_classes).tolist()
        report |= watch.seconds | {keys.STARTED: started, keys.FINISHED: time.time()}
        learned = replace(
            state,
            round=round_number,
            follows=state.round,
            seen=now.seen,
            buffer=buffer,
            local_accuracy=local_accuracy,
            extra={**state.extra, **self.extra},
        )
        answer = Answer(as_arrays(net.state_dict()), len(chunk), report)
        self._keep(learned, answer)
        return answer

    def _evaluate_round(
        self, parameters: list[np.ndarray[Any, Any]], state: ClientState, round_number: int
    ) -> ClientState:
        started, watch = time.time(), Stopwatch()
        net = self._network(parameters)
        with watch(keys.EVALUATION_SECONDS):
            state, report = self.receive(net, state, round_number, self.content)
            by_global = state.switched_at is not None
            accuracies = {keys.LOCAL_ACCURACY: state.local_accuracy}
            if by_global or self.config.run.evaluate == "both":
                accuracies[keys.GLOBAL_ACCURACY], examples = self._test(net, state.seen)
            else:
                examples = len(self.source.test_set(state.seen))
        accuracies[keys.ACCURACY] = accuracies[keys.GLOBAL_ACCURACY if by_global else keys.LOCAL_ACCURACY]
        report |= {name: value for name, value in accuracies.items() if value is not None}
        if by_global:
            report[keys.SWITCHED_AT] = state.switched_at
        report |= {keys.SEEN_CLASSES: int(state.seen.sum()), keys.EXAMPLES: examples}
        report |= watch.seconds | {keys.STARTED: started, keys.FINISHED: time.time()}
        return replace(state, evaluated=round_number, evaluation=report)

    def _keep_models(self, parameters: list[np.ndarray[Any, Any]], state: ClientState) -> None:
        answering, experiment = self.answering(parameters, state), self.experiment
        if answering is None:
            logger.warning("client %d: no model of round %d to keep; the last one stays", self.number, state.evaluated)
            return
        mean, std = experiment.normalisation
        precision = choose_precision(self.config.run.precision, experiment.device)
        kept = KeptModels(
            method=self.config.method,
            run=state.run,
            round=state.evaluated,
            trained=state.round,
            switched_at=state.switched_at,
            seen=_numbers(state.seen),
            class_names=experiment.dataset.class_names,
            framing=framing_of(self.config.data.dataset, experiment.dataset.image_size),
            mean=mean,
            std=std,
            width=self.config.model.width,
            stem=experiment.stem,
            precision=str(precision).removeprefix("torch."),
            answers={name: _numbers(classes) for name, classes in answering.answers.items()},
            weights=answering.weights,
        )
        serving.write(self.store.folder, kept)

    # Tools for methods

    def logits(self, net: ResNet18, samples: Samples) -> Tensor:
        """Logits in evaluation mode, float32 (n, C) on the CPU.

        Raises
        ------
        RunError
            They are not finite: training has diverged, though its last loss did not show it.
        """
        content, fetch = samples.content, self.experiment.dataset.fetch
        images_of = fetch if content.dtype == torch.int64 else (lambda block: block)
        logits = predict(net, images_of, content, self.experiment.preprocess)
        if not bool(logits.isfinite().all()):
            rate = self.config.training.learning_rate
            raise RunError(f"the model's logits are not finite; try a learning-rate below {rate:g}")
        return logits

    def generator(self, purpose: str, round_number: int) -> torch.Generator:
        """A stream of randomness for one purpose of this client in one round."""
        return generator_for(self.config.run.seed, purpose, self.number, round_number)

    def _keep(self, state: ClientState, answer: Answer) -> None:
        """Store what a round has learned; only then is its chunk put away."""
        self.store.save_trained(state, answer)
        self.source.learned(state.round)

    def _network(self, parameters: list[np.ndarray[Any, Any]]) -> ResNet18:
        names = self.experiment.weight_names
        return self.experiment.network({n: torch.from_numpy(a) for n, a in zip(names, parameters, strict=True)})

    def _test(self, net: ResNet18, seen: Tensor) -> tuple[float | None, int]:
        """Accuracy on the test images of the classes met, None where there are none, and their number."""
        samples = self.source.test_set(seen)
        if not len(samples):
            return None, 0
        by_id = samples.content.dtype == torch.int64
        logits_of = partial(self.logits, net)
        logits = self.experiment.shared_logits(net, samples, logits_of) if by_id else logits_of(samples)
        return accuracy(logits, samples.labels, seen), len(samples)


def _numbers(classes: Tensor) -> tuple[int, ...]:
    return tuple(int(label) for label in classes.nonzero())
