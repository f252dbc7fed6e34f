"""What a method may decide in a client's round, its hooks; what they may use; and what they hand to each other.

The round itself is run by :class:`fedkace_flwr.clients.round.StreamingClient`.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedkace_flwr.clients.predictor import Array as Array
from fedkace_flwr.clients.predictor import Evaluation as Evaluation
from fedkace_flwr.clients.predictor import Predictor, Views, predictor_of
from fedkace_flwr.errors import MessageError, RunError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.inference.kept_models import Answering, mask_of
from fedkace_flwr.messaging import wire
from fedkace_flwr.metrics import accuracy, class_accuracies, combined_scores
from fedkace_flwr.networks.network import Network
from fedkace_flwr.samples import Samples
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.sources import Source
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.training.batches import Batching
from fedkace_flwr.training.loop import predict, train
from fedkace_flwr.training.losses import Objective, TaskLoss
from fedkace_flwr.training.optimisers import Optimiser
from fedkace_flwr.training.stored_logits import StoredLogits, StoredLogitsLoss

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
    content : RecordDict
        The training message, for methods that send more than a model.
    """

    number: int
    chunk: Samples
    state: ClientState
    current: Tensor
    sent: Mapping[str, Array] = field(default_factory=dict)
    content: RecordDict = field(default_factory=RecordDict)

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
    net : Network
        The network to train, in place.
    objective : Objective
        The loss; its tensors are on the experiment's device.
    settings : TrainingConfig
        Epochs, batch size, optimiser, learning rate, weight decay, batching, augmentation and logit adjustment.
    generator : torch.Generator
        CPU generator that orders the samples.
    batching : str, optional
        A key of :data:`fedkace_flwr.training.batches.EPOCHS`; by default that of the settings.
    optimiser : Optimiser, optional
        By default a new one, as the settings say.
    epochs : range, optional
        The epochs to run, from 0; by default all.
    after_step : callable, optional
        Called after each step with the epoch, from 1, and the share of its steps that are done.
    augmentation : torch.Generator, optional
        CPU generator of the images' random changes; needed where ``settings.augment`` asks for them.
    stored : StoredLogits, optional
        Logits of the buffer's samples, in their order, for a loss of their distance.
    captured : bool
        Whether to record the step as a CUDA graph where that is possible.
    """

    net: Network
    objective: Objective
    settings: TrainingConfig
    generator: torch.Generator
    batching: Batching | None = None
    optimiser: Optimiser | None = None
    epochs: range | None = None
    after_step: Callable[[int, float], None] | None = None
    augmentation: torch.Generator | None = None
    stored: StoredLogits | None = None
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
        every = self.seconds | {wire.STARTED: self.started, wire.FINISHED: time.time()}
        return {name: value for name, value in every.items() if name in wanted}


class ClientTools:
    """The tools of a :class:`ClientRule`.

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
    """

    def __init__(self, number: int, experiment: Experiment, source: Source, store: ClientStore) -> None:
        self.number = number
        self.experiment = experiment
        self.config = experiment.config
        self.source = source
        self.store = store

    @property
    def logits_weight(self) -> float:
        """Weight of the distance of replayed samples' logits from stored ones; with 0 none are stored."""
        return 0.0

    def generator(self, purpose: str, round_number: int) -> torch.Generator:
        """A CPU generator that depends on the seed, this client, the purpose and the round alone."""
        return generator_for(self.config.run.seed, purpose, self.number, round_number)

    def network(self, weights: Mapping[str, Array]) -> Network:
        """The one network of this process, holding these weights, or the run's initial ones if there are none."""
        if not weights:
            return self.experiment.network(self.experiment.initial_weights())
        return self.experiment.network({name: torch.from_numpy(array) for name, array in weights.items()})

    @cached_property
    def predictor(self) -> Predictor:
        """How the client predicts."""
        return predictor_of(self)

    def images(self, samples: Samples) -> Tensor:
        """Values, uint8 (n, 3, H, W) or float32 (n, ...)."""
        return samples.images(self.experiment.dataset.fetch)

    def resident(self, samples: Samples) -> Callable[[Tensor], Tensor]:
        """A function from positions, int64 on the CPU, to values: on a GPU all are moved there once."""
        device = self.experiment.device
        if device.type == "cpu":
            return lambda rows: self.images(samples.take(rows))
        pixels = self.images(samples).to(device)
        return lambda rows: pixels[rows.to(device)]

    def train(self, training: Training, chunk: Samples, buffer: Samples) -> None:
        """Carry out a training on chunk and buffer.

        Raises
        ------
        RunError
            The loss of an epoch is not finite.
        """
        objective = training.objective
        if training.stored is not None and len(buffer):
            stored = training.stored.to(self.experiment.device)
            objective = StoredLogitsLoss(objective, stored, self.logits_weight, len(chunk))
        train(
            training.net,
            (self.images(chunk), chunk.labels),
            (self.images(buffer), buffer.labels),
            objective,
            training.settings,
            self.experiment.preprocess,
            training.generator,
            batching=training.batching,
            optimiser=training.optimiser,
            epochs=training.epochs,
            after_step=training.after_step,
            augmentation=training.augmentation,
            captured=training.captured,
            kept=self.experiment.kept_steps,
        )

    def teacher_logits(self, net: Network, now: ClientRound) -> Tensor:
        """Logits of the chunk by the received model, float32 (n, C) on the CPU; for distillation, before training."""
        self.predictor.recalibrate(net, now.state.buffer.followed_by(now.chunk), now.number)
        return self.logits(net, now.chunk)

    def stored_logits(self, state: ClientState) -> StoredLogits:
        """The stored logits of the buffer's samples, in their order."""
        return StoredLogits.read(state.extra, self.experiment.num_classes).of(state.buffer)

    def with_new_logits(self, now: ClientRound, net: Network) -> StoredLogits:
        """The stored logits of the buffer's samples, and the trained network's of the chunk's."""
        return self.stored_logits(now.state).joined_by(now.chunk, self.logits(net, now.chunk), now.seen)

    def logits(self, net: Network, samples: Samples, *, mirrored: bool = False, home: bool = True) -> Tensor:
        """Logits in evaluation mode, of the images or of their mirror images.

        float32 (n, C), on the CPU or, without ``home``, on the experiment's device.

        Raises
        ------
        RunError
            A logit is not finite: training has diverged after its last loss was taken.
        """
        images_of = self.experiment.dataset.fetch if samples.by_id else (lambda block: block)
        logits = predict(net, images_of, samples.content, self.experiment.preprocess, mirrored=mirrored, home=home)
        if not bool(logits.isfinite().all()):
            rate = self.config.training.learning_rate
            raise RunError(f"the model's logits are not finite; try a learning-rate below {rate:g}")
        return logits

    def new_class_accuracies(self, now: ClientRound) -> Metrics:
        """Accuracy of the received model on the classes that are new to the client, before it trains on them.

        The model answers as after an evaluation, among all classes met including the new ones. There is none in the
        first round, whose model is untrained, and none without ``diagnostics`` or ``report-classes``.
        """
        fresh = now.current & ~now.old
        if now.number == 1 or not now.sent or not self.config.run.diagnostics or not bool(fresh.any()):
            return {}
        samples = self.source.test_set(fresh)
        if not len(samples) or not self.config.run.report_classes:
            return {}
        net = self.predictor.received(now.sent, now.state, now.number)
        return {wire.NEW_CLASS_ACCURACY: self.class_accuracies(self.test_logits(net, samples), samples, now.seen)}

    def views(self, answering: Answering, samples: Samples) -> dict[str, list[Tensor]]:
        """Logits of samples, float32 (n, C) on the CPU, by each network that predicts.

        Those of the images come first, then, by networks that see them as well, those of the mirror images.
        """
        found = {}
        for name in answering.answers:
            net, mirrored = self.network(answering.weights[name]), name in answering.mirrored
            found[name] = [
                self.logits(net, samples, mirrored=view) for view in ((False, True) if mirrored else (False,))
            ]
        return found

    def answers(self, answering: Answering, views: Views, seen: Tensor) -> Tensor:
        """The classes that the networks' views answer with together, among those seen, bool (C,); int64 (n,)."""
        each = [logits for many in views.values() for logits in many]
        if len(each) == 1:
            (answered,) = answering.answers.values()
            seen = seen & mask_of(answered, len(seen))
        shares = [answering.shares[name] for name, many in views.items() for _ in many if answering.shares]
        return combined_scores(each, seen, shares).masked_fill(~seen, -float("inf")).argmax(dim=1)

    def test(self, net: Network, seen: Tensor) -> Evaluation:
        """Test a local model on the test images of the classes seen, bool (C,)."""
        samples = self.source.test_set(seen)
        if not len(samples):
            return Evaluation(None, 0)
        logits = self.test_logits(net, samples)
        right = accuracy(logits, samples.labels, seen)
        both = self.config.answers.evaluate == "both"
        report = {wire.LOCAL_UNMASKED: accuracy(logits, samples.labels)} if both else {}
        return Evaluation(right, len(samples), report, self.class_accuracies(logits, samples, seen))

    def class_accuracies(self, scores: Tensor, samples: Samples, seen: Tensor) -> list[float]:
        """Accuracy on the samples of each class, to be reported; empty if ``report-classes`` is off.

        ``scores`` are logits or probabilities, float (N, C), and the answer is one of the classes seen, bool (C,).
        """
        if not self.config.run.report_classes:
            return []
        return class_accuracies(scores, samples.labels, seen).nan_to_num(wire.UNTESTED).tolist()

    def test_logits(self, net: Network, samples: Samples) -> Tensor:
        """As :meth:`logits`, for a client's test set; clients of a process that test the same model share them."""
        logits_of = partial(self.logits, net)
        return self.experiment.shared_logits(net, samples, logits_of) if samples.by_id else logits_of(samples)

    def class_histogram(self, buffer: Samples) -> Metrics:
        """The metric that holds the buffer's samples of each class; none if ``report-classes`` is off."""
        if not self.config.run.report_classes:
            return {}
        return {wire.BUFFER_CLASSES: buffer.class_counts(self.experiment.num_classes).tolist()}


class ClientRule(ClientTools):
    """The client half of a method: hooks with the defaults of federated averaging.

    By default a client trains on its chunk, keeps no buffer and answers with the global model. Hooks return what they
    produce; a rule keeps nothing between them, as each message may be handled by another process.

    Attributes
    ----------
    receives_model : bool
        Whether the messages of training and evaluation carry a model; else their record of arrays is empty.
    training_action : str
        The message that starts a round's training: ``train``, or one of the method's own actions.
    training_times, evaluation_times : frozenset of str
        The times that the replies to training and evaluation report.
    """

    receives_model: ClassVar[bool] = True
    training_action: ClassVar[str] = "train"
    training_times: ClassVar[frozenset[str]] = frozenset(
        {wire.TRAINING_SECONDS, wire.SELECTION_SECONDS, wire.EVALUATION_SECONDS, wire.STARTED, wire.FINISHED}
    )
    evaluation_times: ClassVar[frozenset[str]] = frozenset({wire.EVALUATION_SECONDS, wire.STARTED, wire.FINISHED})

    # Hooks, in the order in which a round calls them

    def catch_up(self, state: ClientState, round_number: int) -> ClientState:
        """Finish whatever earlier messages left open, before a round is trained or evaluated.

        The driver stores a state other than the one given.
        """
        return state

    def begin(self, net: Network, now: ClientRound) -> None:
        """Change the network, in place, that training starts from; it holds the model that was sent."""

    def objective(self, net: Network, now: ClientRound) -> Objective:
        """The loss to minimise in this round; its masks are on the experiment's device."""
        seen = now.seen.to(self.experiment.device)
        return TaskLoss(seen, seen)

    def training(self, net: Network, now: ClientRound) -> Training:
        """The local training of this round."""
        return Training(
            net,
            self.objective(net, now),
            self.config.training,
            self.generator("batches", now.number),
            augmentation=self.generator("augmentation", now.number),
            stored=self.stored_logits(now.state) if self.logits_weight else None,
            captured=self.experiment.captured,
        )

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Choose the new buffer M_t; ``training.net`` is the trained local model."""
        return Kept(now.state.buffer)

    def needs_local_test(self, state: ClientState) -> bool:
        """Whether to test the local model after its training, given the state before the round."""
        return self.predictor.needs_local_test(state)

    def report(self, now: ClientRound, training: Training, kept: Kept) -> Metrics:
        """Metrics of training and buffer for the server, beside times."""
        return {wire.BUFFER_SIZE: len(kept.buffer), **self.class_histogram(kept.buffer)}

    def reply(self, now: ClientRound, training: Training) -> dict[str, Array]:
        """Arrays of the reply to the training message: the local model's by name, those that the method declares.

        The method may add others, under other names, which its server expects and takes out in ``compare``.
        """
        held = self.experiment.travelling.replied
        return as_arrays({name: array for name, array in training.net.state_dict().items() if name in held})

    def receive(
        self, net: Network, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Decide which model answers, given the new global model and the rest of the evaluation message.

        Returns
        -------
        state : ClientState
            With ``global_since`` set if the global model answers.
        report : dict
            Metrics for the server.
        """
        if self.config.answers.predict_with in ("auto", "global"):
            state = replace(state, global_since=state.global_since or round_number)
        return state, {}

    def evaluate(self, net: Network, state: ClientState) -> Evaluation:
        """Test the models that the client predicts with; ``net`` holds the global model, as received."""
        return self.predictor.evaluate(net, state)

    def answering(self, sent: Mapping[str, Array], state: ClientState) -> Answering | None:
        """The networks to keep for inference after an evaluation; None if the last ones stay."""
        return self.predictor.answering(sent, state)

    # What the hooks are used for

    def predictions(
        self, sent: Mapping[str, Array], state: ClientState, round_number: int, samples: Samples
    ) -> Tensor | None:
        """What the client would answer in a round if ``sent`` were the global model, as it was received.

        Returns
        -------
        Labels among ``state.seen``, int64 (n,); None if the client has met no class or has no model.
        """
        answering = self._answering_now(sent, state, round_number)
        return None if answering is None else self.answers(answering, self.views(answering, samples), state.seen)

    def prequential(self, now: ClientRound, earlier: Tensor) -> tuple[Metrics, dict[str, Tensor]]:
        """Test the models that the client predicts with on the chunk's classes met before, before training.

        Parameters
        ----------
        now : ClientRound
            The round.
        earlier : Tensor
            int64 (n,): label predicted for each sample of the chunk when it arrived without one; -1 if there was none.

        Returns
        -------
        report : dict
            Metrics for the server; none in the run's first round, whose model is untrained.
        stored : dict of str to Tensor
            To be stored with the state.
        """
        places = now.state.seen[now.chunk.labels].nonzero().flatten()
        known, given = now.chunk.take(places), earlier[places]
        tests = now.number > 1 and len(known) > 0
        answering = self._answering_now(now.sent, now.state, now.number) if tests else None
        views = self.views(answering, known) if answering is not None else {}
        stored = self.predictor.observe(now, known, views)
        if answering is not None:
            given = torch.where(given < 0, self.answers(answering, views, now.state.seen), given)
        tested = int((given >= 0).sum())
        if not tested:
            return {}, stored
        right = int((given == known.labels).sum())
        return {wire.PREQUENTIAL_ACCURACY: right / tested, wire.PREQUENTIAL_SAMPLES: tested}, stored

    def _answering_now(self, sent: Mapping[str, Array], state: ClientState, round_number: int) -> Answering | None:
        if not bool(state.seen.any()) or not (sent or state.round):
            return None
        adapted = self.predictor.weights(sent, state, round_number)
        return self.answering(adapted, replace(state, evaluated=round_number))

    def act(self, action: str, content: RecordDict, round_number: int) -> Acted:
        """Answer a message of the method's own, such as ``query.features``, within a round.

        Raises
        ------
        MessageError
            The method has no such action.
        """
        raise MessageError(f"{type(self).__name__} has no action {action!r} (content: {sorted(content)})")
