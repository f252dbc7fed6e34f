"""What the client half of a method may use in a round: random streams, images, training, tests and logits."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial

import torch
from torch import Tensor

from fedkace_flwr.clients.predictor import Predictor, predictor_of
from fedkace_flwr.clients.values import Array, ClientRound, Evaluation, Metrics, Training
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.metrics import accuracy, class_accuracies
from fedkace_flwr.networks.network import Network
from fedkace_flwr.samples import Samples
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.sources import Source
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.training.loop import predict, train
from fedkace_flwr.training.stored_logits import StoredLogits, StoredLogitsLoss


class ClientTools:
    """The tools of a :class:`fedkace_flwr.clients.base.ClientRule`.

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
        """Pixels, uint8 (n, 3, H, W)."""
        return samples.images(self.experiment.dataset.fetch)

    def resident(self, samples: Samples) -> Callable[[Tensor], Tensor]:
        """A function from positions, int64 on the CPU, to pixels: on a GPU all pixels are moved there once."""
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
        return {keys.NEW_CLASS_ACCURACY: self.class_accuracies(self.test_logits(net, samples), samples, now.seen)}

    def test(self, net: Network, seen: Tensor) -> Evaluation:
        """Test a local model on the test images of the classes seen, bool (C,)."""
        samples = self.source.test_set(seen)
        if not len(samples):
            return Evaluation(None, 0)
        logits = self.test_logits(net, samples)
        right = accuracy(logits, samples.labels, seen)
        both = self.config.answers.evaluate == "both"
        report = {keys.LOCAL_UNMASKED: accuracy(logits, samples.labels)} if both else {}
        return Evaluation(right, len(samples), report, self.class_accuracies(logits, samples, seen))

    def class_accuracies(self, scores: Tensor, samples: Samples, seen: Tensor) -> list[float]:
        """Accuracy on the samples of each class, to be reported; empty if ``report-classes`` is off.

        ``scores`` are logits or probabilities, float (N, C), and the answer is one of the classes seen, bool (C,).
        """
        if not self.config.run.report_classes:
            return []
        return class_accuracies(scores, samples.labels, seen).nan_to_num(keys.UNTESTED).tolist()

    def test_logits(self, net: Network, samples: Samples) -> Tensor:
        """As :meth:`logits`, for a client's test set; clients of a process that test the same model share them."""
        logits_of = partial(self.logits, net)
        return self.experiment.shared_logits(net, samples, logits_of) if samples.by_id else logits_of(samples)

    def class_histogram(self, buffer: Samples) -> Metrics:
        """The metric that holds the buffer's samples of each class; none if ``report-classes`` is off."""
        if not self.config.run.report_classes:
            return {}
        return {keys.BUFFER_CLASSES: buffer.class_counts(self.experiment.num_classes).tolist()}
