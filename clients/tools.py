"""What the client half of a method may use in a round: training, testing, and the models that a client predicts with."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from clients.values import Array, ClientRound, Evaluation, Kept, Metrics, Training
from fedkace_flwr.algorithms.prequential import best_weight, no_evidence, with_chunk
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.inference import kept_models as serving
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.metrics import accuracy, class_accuracies, fading
from fedkace_flwr.networks.network import Network
from fedkace_flwr.samples import Samples
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.sources import Source
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.training.discriminant import discriminant_share, refit
from fedkace_flwr.training.loop import predict, train
from fedkace_flwr.training.recalibration import recalibrate
from fedkace_flwr.training.snapshots import snapshot, weights_in
from fedkace_flwr.training.stored_logits import StoredLogits, StoredLogitsLoss

_EVIDENCE, _LATEST = "prequential.evidence", "prequential.latest"


class ClientTools:
    """The tools of a :class:`clients.base.ClientRule`.

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
        return self.config.buffer.stored_logits

    def generator(self, purpose: str, round_number: int) -> torch.Generator:
        """A CPU generator that depends on the seed, this client, the purpose and the round alone."""
        return generator_for(self.config.run.seed, purpose, self.number, round_number)

    def network(self, weights: Mapping[str, Array]) -> Network:
        """The one network of this process, holding these weights, or the run's initial ones if there are none."""
        if not weights:
            return self.experiment.network(self.experiment.initial_weights())
        return self.experiment.network({name: torch.from_numpy(array) for name, array in weights.items()})

    def predicting(self, state: ClientState) -> tuple[str, ...]:
        """Names of the models that the client predicts with; the probabilities of several are averaged."""
        settings = self.config.answers
        received = (serving.GLOBAL, serving.AVERAGE) if settings.model_average else (serving.GLOBAL,)
        if settings.averages:
            return (serving.LOCAL, *received)
        return received[-1:] if state.global_since is not None else (serving.LOCAL,)

    def mirrored(self, state: ClientState) -> tuple[str, ...]:
        """Names of the models that predict by the mirrored image as well (``views``): the last received one, if any."""
        received = [name for name in self.predicting(state) if name != serving.LOCAL]
        return tuple(received[-1:]) if self.config.answers.views == "mirrored" else ()

    def shares(self, names: Collection[str], state: ClientState) -> dict[str, float]:
        """Weight of each view of some predicting models in the mean of their probabilities; empty if all are equal.

        With ``inference = fading`` the local model's weight begins at twice an equal one; with ``prequential`` it moves
        from there with the evidence of the newest chunks. All views have 1 together.
        """
        inference, views = self.config.answers.inference, sum(1 + (name in self.mirrored(state)) for name in names)
        if inference not in ("fading", "prequential") or serving.LOCAL not in names or views == 1:
            return {}
        local = (1 + fading(state.evaluated)) / views
        if inference == "prequential" and _EVIDENCE in state.extra:
            latest_share = int(state.extra[_LATEST].sum()) / int(state.seen.sum())
            local = best_weight(state.extra[_EVIDENCE], latest_share, local)
        return {name: local if name == serving.LOCAL else (1 - local) / (views - 1) for name in names}

    def tested_on_chunk(self, now: ClientRound) -> dict[str, Tensor]:
        """Test the models that the client predicts with on its new chunk, before training (``inference = prequential``).

        Images of classes never met before are left out, as no model can answer them. All models are as the client would
        predict with them now that the chunk before is gone.

        Returns
        -------
        dict of str to Tensor
            The evidence and the classes of this chunk, to be stored; empty with another ``inference``.
        """
        if self.config.answers.inference != "prequential":
            return {}
        state = now.state
        found = {_EVIDENCE: state.extra.get(_EVIDENCE, no_evidence()), _LATEST: now.current}
        known = now.chunk.take(state.seen[now.chunk.labels].nonzero().flatten())
        probabilities: dict[str, list[Tensor]] = {}
        for name in self.predicting(state) if now.sent and len(known) and _LATEST in state.extra else ():
            weights = now.sent if name == serving.GLOBAL else self.weights_of(name, state, now.number)
            if weights is None:
                continue
            net = self.received(weights, state, now.number) if name == serving.GLOBAL else self.network(weights)
            views = (False, True) if name in self.mirrored(state) else (False,)
            probabilities[name] = [self._label_probabilities(net, known, state.seen, mirrored) for mirrored in views]
        local = probabilities.pop(serving.LOCAL, None)
        if local is not None and probabilities:
            received = torch.stack([view for views in probabilities.values() for view in views]).mean(dim=0)
            latest = state.extra[_LATEST][known.labels]
            found[_EVIDENCE] = with_chunk(found[_EVIDENCE], local[0], received, latest)
        return found

    def received(self, sent: Mapping[str, Array], state: ClientState, round_number: int) -> Network:
        """The process's network, holding a received model as this client predicts with it.

        With ``recalibrate`` it is recalibrated, and its output layer is refitted as ``classifier`` asks.
        """
        net, settings = self.network(sent), self.config.answers
        if sent and (settings.recalibrate or discriminant_share(settings.classifier, round_number)):
            own = self.own_samples(state, round_number)
            if settings.recalibrate:
                self.recalibrate(net, own, round_number)
            self.refit(net, own, round_number)
        return net

    def own_samples(self, state: ClientState, round_number: int) -> Samples:
        """All samples that the client holds in a round, once it has trained: its buffer, and the chunk if it had one."""
        if state.round != round_number:
            return state.buffer
        fresh = self.source.chunk(round_number, state.round)
        return state.buffer.followed_by(fresh)

    def recalibrate(self, net: Network, samples: Samples, round_number: int) -> None:
        """Take the network's batch-norm statistics anew, in place, on samples; with fewer than two they stay."""
        if len(samples) > 1:
            generator = self.generator("recalibration", round_number)
            recalibrate(net, self.images(samples), self.experiment.preprocess, generator)

    def refit(self, net: Network, samples: Samples, round_number: int) -> None:
        """Fit the output layer to samples, in place, as ``classifier`` asks in a round."""
        settings = self.config.answers
        share = discriminant_share(settings.classifier, round_number)
        if share and len(samples):
            refit(net, self.images(samples), samples.labels, self.experiment.preprocess, settings.shrinkage, share)

    def refitted_since(self, state: ClientState) -> bool:
        """Whether the local model's output layer is another one than after its training, as the client has missed rounds.

        It is then fitted without the chunk, which is gone, and by the newest round's share.
        """
        shares = [
            discriminant_share(self.config.answers.classifier, number) for number in (state.round, state.evaluated)
        ]
        return state.round != state.evaluated and any(shares)

    def averaged(self, sent: Mapping[str, Array], state: ClientState, round_number: int) -> ClientState:
        """Take a received model into the exponential mean that the client keeps with ``model-average``."""
        if not sent or not self.config.answers.model_average:
            return state
        decay = min(self.config.answers.model_average, round_number / (round_number + 9))
        mean = {name: torch.from_numpy(array) for name, array in sent.items()}
        for name, before in weights_in(serving.AVERAGE, state.extra).items():
            if mean[name].is_floating_point():
                mean[name] = torch.lerp(mean[name], before, decay)
        return replace(state, extra={**state.extra, **snapshot(serving.AVERAGE, mean)})

    def weights_of(self, name: str, state: ClientState, round_number: int) -> Mapping[str, Array] | None:
        """Weights of the local or the averaged model, ready to predict in a round; None if they are not there."""
        if name == serving.LOCAL:
            trained = self.store.answer(state.round)
            if trained is None or not discriminant_share(self.config.answers.classifier, round_number):
                return trained.arrays if trained is not None else None
            net = self.network(trained.arrays)
            self.refit(net, self.own_samples(state, round_number), round_number)
            return as_arrays(net.state_dict())
        kept = weights_in(serving.AVERAGE, state.extra)
        return as_arrays(self.received(as_arrays(kept), state, round_number).state_dict()) if kept else None

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
        if self.config.answers.recalibrate:
            self.recalibrate(net, now.state.buffer.followed_by(now.chunk), now.number)
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
        net = self.received(now.sent, now.state, now.number)
        return {keys.NEW_CLASS_ACCURACY: self.class_accuracies(self.test_logits(net, samples), samples, now.seen)}

    def local_test(self, now: ClientRound, training: Training, kept: Kept) -> Evaluation:
        """Test the trained local model, as it predicts; the network ends as it was."""
        if not discriminant_share(self.config.answers.classifier, now.number):
            return self.test(training.net, now.seen)
        output = training.net.output
        trained = [layer.detach().clone() for layer in (output.weight, output.bias)]
        self.refit(training.net, kept.buffer.followed_by(now.chunk), now.number)
        tested = self.test(training.net, now.seen)
        with torch.no_grad():
            output.weight.copy_(trained[0])
            output.bias.copy_(trained[1])
        return tested

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

    def _label_probabilities(self, net: Network, samples: Samples, seen: Tensor, mirrored: bool) -> Tensor:
        """Probability of each sample's label among the classes seen, float64 (n,)."""
        logits = self.logits(net, samples, mirrored=mirrored).double().masked_fill(~seen, -float("inf"))
        return logits.softmax(dim=1).gather(1, samples.labels[:, None]).flatten()

    def test_logits(self, net: Network, samples: Samples) -> Tensor:
        """As :meth:`logits`, for a client's test set; clients of a process that test the same model share them."""
        logits_of = partial(self.logits, net)
        return self.experiment.shared_logits(net, samples, logits_of) if samples.by_id else logits_of(samples)

    def class_histogram(self, buffer: Samples) -> Metrics:
        """The metric that holds the buffer's samples of each class; none if ``report-classes`` is off."""
        if not self.config.run.report_classes:
            return {}
        return {keys.BUFFER_CLASSES: buffer.class_counts(self.experiment.num_classes).tolist()}
