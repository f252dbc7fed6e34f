"""What a method may decide in a client's round (hooks), and what it may use (tools).

The round itself is run by :class:`clients.round.StreamingClient`.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy.typing as npt
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedkace_flwr.errors import MessageError, RunError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.inference import kept_models as serving
from fedkace_flwr.inference.kept_models import Answering
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.metrics import accuracy
from fedkace_flwr.samples import Samples
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.sources import Source
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.training.batches import Batching
from fedkace_flwr.training.loop import predict, train
from fedkace_flwr.training.losses import Objective, TaskLoss
from fedkace_flwr.training.model import ResNet18

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Metrics = dict[str, Any]


@dataclass(frozen=True)
class ClientRound:
    """A client's round at its start.

    Attributes
    ----------
    number : int
        t, from 1.
    chunk : Samples
        D_t.
    state : ClientState
        The client's state at the end of its previous round; its buffer is M_{t-1}.
    current : Tensor
        bool (C,): the chunk's classes, C_t.
    sent : mapping of str to array
        Weights of the model that the server sent, by name; empty for methods that send none.
    """

    number: int
    chunk: Samples
    state: ClientState
    current: Tensor
    sent: Mapping[str, Array] = field(default_factory=dict)

    @property
    def old(self) -> Tensor:
        """Classes of earlier chunks, C_<t, bool (C,)."""
        return self.state.seen

    @property
    def seen(self) -> Tensor:
        """Classes of all chunks so far, C_<=t, bool (C,)."""
        return self.current | self.state.seen


@dataclass(frozen=True)
class Training:
    """One local training.

    Attributes
    ----------
    net : ResNet18
        The network to train, in place.
    objective : Objective
        The loss; its tensors are on the experiment's device.
    settings : TrainingConfig
        Epochs, batch size, learning rate, weight decay and batching.
    generator : torch.Generator
        CPU generator that orders the samples.
    batching : str, optional
        A key of :data:`fedkace_flwr.training.batches.EPOCHS`; by default that of the settings.
    optimiser : Optimizer, optional
        By default a new AdamW.
    epochs : range, optional
        The epochs to run, from 0; by default all.
    after_step : callable, optional
        Called after each step with the epoch, from 1, and the share of its steps that are done.
    captured : bool
        Whether to record the step as a CUDA graph where that is possible.
    """

    net: ResNet18
    objective: Objective
    settings: TrainingConfig
    generator: torch.Generator
    batching: Batching | None = None
    optimiser: torch.optim.Optimizer | None = None
    epochs: range | None = None
    after_step: Callable[[int, float], None] | None = None
    captured: bool = False


@dataclass(frozen=True)
class Kept:
    """What a client keeps of a round.

    Attributes
    ----------
    buffer : Samples
        M_t.
    extra : mapping of str to Tensor
        CPU tensors to store in ``ClientState.extra``; they replace earlier ones of the same name.
    logits : Tensor, optional
        The local model's logits of the buffer, float32 (m, C), if the method has them; for its report.
    """

    buffer: Samples
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None


@dataclass(frozen=True)
class Evaluation:
    """A test of the model that answers.

    Attributes
    ----------
    accuracy : float or None
        Share of right answers; None without test images.
    examples : int
        Number of test images.
    report : mapping
        Metrics beside the accuracy.
    """

    accuracy: float | None
    examples: int
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Acted:
    """The result of a message of the method's own.

    Attributes
    ----------
    reply : RecordDict
        Content of the reply.
    state : ClientState, optional
        The new state, which is stored before the reply is sent.
    """

    reply: RecordDict
    state: ClientState | None = None


class Stopwatch:
    """Takes times.

    Attributes
    ----------
    started : float
        When it was made, seconds since the epoch.
    seconds : dict of str to float
        Seconds by purpose.
    """

    def __init__(self) -> None:
        self.started = time.time()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, purpose: str) -> Iterator[None]:
        """Add the time that the block takes."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[purpose] = self.seconds.get(purpose, 0.0) + time.perf_counter() - begun

    def times(self, wanted: Collection[str]) -> Metrics:
        """Seconds by purpose, start and end up to now, as far as they are wanted."""
        every = self.seconds | {keys.STARTED: self.started, keys.FINISHED: time.time()}
        return {name: value for name, value in every.items() if name in wanted}


class ClientRule:
    """The client half of a method: hooks with the defaults of federated averaging.

    By default a client trains on its chunk, keeps no buffer and answers with the global model. Hooks return what they
    produce; a rule keeps nothing between them, as each message may be handled by another process.

    Parameters
    ----------
    number : int
        The client's number k, from 0.
    experiment : Experiment
        Configuration, data and network.
    source : Source
        The client's samples.
    store : ClientStore
        The client's stored states; a rule reads them and never writes.

    Attributes
    ----------
    training_action : str
        The message that starts a round's training: ``train``, or one of the method's own actions.
    training_times, evaluation_times : frozenset of str
        The times that the replies to training and evaluation report.
    """

    training_action: ClassVar[str] = "train"
    training_times: ClassVar[frozenset[str]] = frozenset(
        {keys.TRAINING_SECONDS, keys.SELECTION_SECONDS, keys.EVALUATION_SECONDS, keys.STARTED, keys.FINISHED}
    )
    evaluation_times: ClassVar[frozenset[str]] = frozenset({keys.EVALUATION_SECONDS, keys.STARTED, keys.FINISHED})

    def __init__(self, number: int, experiment: Experiment, source: Source, store: ClientStore) -> None:
        self.number = number
        self.experiment = experiment
        self.config = experiment.config
        self.source = source
        self.store = store

    # Hooks, in the order in which a round calls them

    def catch_up(self, state: ClientState, round_number: int) -> ClientState:
        """Finish whatever earlier messages left open, before a round is trained or evaluated.

        The driver stores a state other than the one given.
        """
        return state

    def begin(self, net: ResNet18, now: ClientRound) -> None:
        """Change the network, in place, that training starts from; it holds the model that was sent."""

    def objective(self, net: ResNet18, now: ClientRound) -> Objective:
        """The loss to minimise in this round; its masks are on the experiment's device."""
        seen = now.seen.to(self.experiment.device)
        return TaskLoss(seen, seen)

    def training(self, net: ResNet18, now: ClientRound) -> Training:
        """The local training of this round."""
        return Training(
            net,
            self.objective(net, now),
            self.config.training,
            self.generator("batches", now.number),
            captured=self.config.run.step == "captured",
        )

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Choose the new buffer M_t; ``training.net`` is the trained local model."""
        return Kept(now.state.buffer)

    def needs_local_accuracy(self, state: ClientState) -> bool:
        """Whether to test the local model after its training, given the state before the round."""
        return state.global_since is None or self.config.run.evaluate == "both"

    def report(self, now: ClientRound, training: Training, kept: Kept) -> Metrics:
        """Metrics of training and buffer for the server, beside times."""
        return {keys.BUFFER_SIZE: len(kept.buffer), **self.class_histogram(kept.buffer)}

    def reply(self, now: ClientRound, training: Training) -> dict[str, Array]:
        """Arrays of the reply to the training message: the local model, by name."""
        return as_arrays(training.net.state_dict())

    def receive(
        self, net: ResNet18, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Decide which model answers, given the new global model and the rest of the evaluation message.

        Returns
        -------
        state : ClientState
            With ``global_since`` set if the global model answers.
        report : dict
            Metrics for the server.
        """
        if self.config.run.inference == "local":
            return state, {}
        return replace(state, global_since=state.global_since or round_number), {}

    def evaluate(self, net: ResNet18, state: ClientState) -> Evaluation:
        """Test the model that answers; ``net`` holds the global model."""
        report = {keys.LOCAL_ACCURACY: state.local_accuracy}
        by_global = state.global_since is not None
        if by_global or self.config.run.evaluate == "both":
            report[keys.GLOBAL_ACCURACY], examples = self.test_accuracy(net, state.seen)
        else:
            examples = len(self.source.test_set(state.seen))
        answers = report[keys.GLOBAL_ACCURACY if by_global else keys.LOCAL_ACCURACY]
        return Evaluation(answers, examples, {name: value for name, value in report.items() if value is not None})

    def answering(self, sent: Mapping[str, Array], state: ClientState) -> Answering | None:
        """The networks to keep for inference after an evaluation, and those among them that answer.

        Returns None if there is nothing to keep: here, if the local model should answer and its file is lost.
        """
        weights: dict[str, Mapping[str, Array]] = {serving.GLOBAL: sent}
        if state.global_since is not None:
            return Answering(weights, {serving.GLOBAL: state.seen})
        trained = self.store.answer(state.round)
        if trained is None:
            logger.warning("client %d: no model of round %d to keep; the last one stays", self.number, state.evaluated)
            return None
        return Answering({**weights, serving.LOCAL: trained.arrays}, {serving.LOCAL: state.seen})

    def act(self, action: str, content: RecordDict, round_number: int) -> Acted:
        """Answer a message of the method's own, such as ``query.features``, within a round.

        Raises
        ------
        MessageError
            The method has no such action.
        """
        raise MessageError(f"{type(self).__name__} has no action {action!r} (content: {sorted(content)})")

    # Tools

    def generator(self, purpose: str, round_number: int) -> torch.Generator:
        """A CPU generator that depends on the seed, this client, the purpose and the round alone."""
        return generator_for(self.config.run.seed, purpose, self.number, round_number)

    def network(self, weights: Mapping[str, Array]) -> ResNet18:
        """The one network of this process, holding these weights, or the run's initial ones if there are none."""
        if not weights:
            return self.experiment.network(self.experiment.initial_weights())
        return self.experiment.network({name: torch.from_numpy(array) for name, array in weights.items()})

    def images(self, samples: Samples) -> Tensor:
        """Pixels, uint8 (n, 3, H, W)."""
        return samples.images(self.experiment.dataset.fetch)

    def train(self, training: Training, chunk: Samples, buffer: Samples) -> None:
        """Carry out a training on chunk and buffer.

        Raises
        ------
        RunError
            The loss of an epoch is not finite.
        """
        train(
            training.net,
            (self.images(chunk), chunk.labels),
            (self.images(buffer), buffer.labels),
            training.objective,
            training.settings,
            self.experiment.preprocess,
            training.generator,
            batching=training.batching,
            optimiser=training.optimiser,
            epochs=training.epochs,
            after_step=training.after_step,
            captured=training.captured,
        )

    def logits(self, net: ResNet18, samples: Samples) -> Tensor:
        """Logits in evaluation mode, float32 (n, C) on the CPU.

        Raises
        ------
        RunError
            A logit is not finite: training has diverged after its last loss was taken.
        """
        images_of = self.experiment.dataset.fetch if samples.by_id else (lambda block: block)
        logits = predict(net, images_of, samples.content, self.experiment.preprocess)
        if not bool(logits.isfinite().all()):
            rate = self.config.training.learning_rate
            raise RunError(f"the model's logits are not finite; try a learning-rate below {rate:g}")
        return logits

    def test_accuracy(self, net: ResNet18, seen: Tensor) -> tuple[float | None, int]:
        """Accuracy on the test images of the classes seen, bool (C,), and their number; None if there are none."""
        samples = self.source.test_set(seen)
        if not len(samples):
            return None, 0
        logits_of = partial(self.logits, net)
        logits = self.experiment.shared_logits(net, samples, logits_of) if samples.by_id else logits_of(samples)
        return accuracy(logits, samples.labels, seen), len(samples)

    def class_histogram(self, buffer: Samples) -> Metrics:
        """The metric that holds the buffer's samples of each class; none if ``report-classes`` is off."""
        if not self.config.run.report_classes:
            return {}
        return {keys.BUFFER_CLASSES: buffer.class_counts(self.experiment.num_classes).tolist()}
