"""How a client predicts: with which models, prepared how, and weighted how."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor

from fedkace_flwr.algorithms.prequential import best_weight, no_evidence, with_chunk
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.inference import kept_models as serving
from fedkace_flwr.inference.kept_models import Answering, labels_of
from fedkace_flwr.messaging import wire
from fedkace_flwr.metrics import accuracy, combined_scores, fading
from fedkace_flwr.networks.network import Network
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.training.discriminant import discriminant_share, refit
from fedkace_flwr.training.recalibration import recalibrate

if TYPE_CHECKING:
    from fedkace_flwr.clients.base import ClientRound, ClientTools, Kept, Training

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

_METRICS = {
    serving.GLOBAL: (wire.GLOBAL_ACCURACY, wire.GLOBAL_UNMASKED),
    serving.LOCAL: (wire.LOCAL_ACCURACY, wire.LOCAL_UNMASKED),
}
_EVIDENCE, _LATEST = "prequential.evidence", "prequential.latest"

Views = Mapping[str, list[Tensor]]
"""Logits, float32 (n, C), of some samples by each view of each model that predicts."""


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
        Metrics beside the accuracies.
    classes : list of float
        Accuracy on each class, -1 for a class that was not tested; empty if it is not reported.
    """

    accuracy: float | None
    examples: int
    report: Mapping[str, Any] = field(default_factory=dict)
    classes: list[float] = field(default_factory=list)


class Predictor:
    """Predicts with one model, as it was trained: the local one if there is one, or the global one.

    The latter does once ``global_since`` is set.

    Parameters
    ----------
    tools : ClientTools
        The client whose predictions these are.
    """

    def __init__(self, tools: "ClientTools") -> None:
        self.tools = tools
        self.settings = tools.config.answers

    # Which models

    def models(self, state: ClientState) -> tuple[str, ...]:
        """Names of the models that predict; the probabilities of several are averaged."""
        is_local = state.has_local_model and state.global_since is None
        return (serving.LOCAL,) if is_local else (serving.GLOBAL,)

    def mirrored(self, state: ClientState) -> tuple[str, ...]:
        """Names of those that predict by the mirrored image as well."""
        return ()

    def shares(self, names: Collection[str], state: ClientState) -> dict[str, float]:
        """Weight of each view of some predicting models in the mean of their probabilities; empty if all are equal."""
        return {}

    # Their preparation

    def observe(self, now: "ClientRound", known: Samples, views: Views) -> dict[str, Tensor]:
        """What the new chunk, before training on it, says of the models; tensors to store with the state.

        Parameters
        ----------
        now : ClientRound
            The round.
        known : Samples
            The chunk's samples of classes met before; no model can answer the others.
        views : mapping of str to list of Tensor
            Their logits, float32 (n, C), by each view of each model that predicts; empty if none can.
        """
        return {}

    def weights(self, sent: Mapping[str, Array], state: ClientState, round_number: int) -> Mapping[str, Array]:
        """Weights of a received model as this client predicts with it."""
        return sent

    def received(self, sent: Mapping[str, Array], state: ClientState, round_number: int) -> Network:
        """The process's network, holding a received model as this client predicts with it."""
        return self.tools.network(sent)

    def local_weights(self, state: ClientState, round_number: int) -> Mapping[str, Array] | None:
        """Weights of the local model, ready to predict in a round; None if they are not there."""
        trained = self.tools.store.answer(state.round)
        if trained is None:
            return None
        return {name: trained.model[name] for name in self.tools.experiment.travelling.sent}  # an answer may hold more

    def recalibrate(self, net: Network, samples: Samples, round_number: int) -> None:
        """Fit what is not trained of a received network to the client's own samples, in place, before it is used."""

    # Tests and answers

    def needs_local_test(self, state: ClientState) -> bool:
        """Whether to test the local model after its training, given the state before the round."""
        return self.settings.evaluate == "both" or state.global_since is None

    def test_local(self, now: "ClientRound", training: "Training", kept: "Kept") -> Evaluation:
        """Test the trained local model, as it predicts; the network ends as it was."""
        return self.tools.test(training.net, now.seen)

    def local_test_holds(self, state: ClientState) -> bool:
        """Whether the local model still predicts as it was tested after its training."""
        return True

    def evaluate(self, net: Network, state: ClientState) -> Evaluation:
        """Test the models that predict; ``net`` holds the global model, as received."""
        tools, predicting = self.tools, self.models(state)
        samples = tools.source.test_set(state.seen)
        if not len(samples):
            return Evaluation(None, 0)
        answers, classes = state.local_accuracy, state.local_class_accuracy
        found = {wire.LOCAL_ACCURACY: state.local_accuracy}
        both = self.settings.evaluate == "both"
        wanted = {*predicting, *([serving.GLOBAL] if both else [])}
        if tested := predicting == (serving.LOCAL,) and self.local_test_holds(state):
            wanted.remove(serving.LOCAL)  # after its training
        logits: dict[str, list[Tensor]] = {}
        for name in (serving.GLOBAL, serving.LOCAL):  # the network holds one model at a time
            weights = {} if name == serving.GLOBAL or name not in wanted else self.local_weights(state, state.evaluated)
            if name in wanted and weights is not None:
                model = tools.network(weights) if weights else net
                logits[name] = [tools.test_logits(model, samples)]
                if name in self.mirrored(state):
                    logits[name].append(tools.logits(model, samples, mirrored=True))
                if name in _METRICS:
                    among_seen, among_all = _METRICS[name]
                    found[among_seen] = accuracy(logits[name][0], samples.labels, state.seen)
                    if both:
                        found[among_all] = accuracy(logits[name][0], samples.labels)
        if not tested and any(name in logits for name in predicting):
            known = {name: logits[name] for name in predicting if name in logits}
            shares = self.shares(known, state)
            each = [shares[name] for name, views in known.items() for _ in views] if shares else []
            scores = combined_scores([view for views in known.values() for view in views], state.seen, each)
            answers = accuracy(scores, samples.labels, state.seen)
            classes = tools.class_accuracies(scores, samples, state.seen)
        report = {name: value for name, value in found.items() if value is not None}
        return Evaluation(answers, len(samples), report, classes)

    def answering(self, sent: Mapping[str, Array], state: ClientState) -> Answering | None:
        """The networks that predict after an evaluation, to be kept for inference.

        ``sent`` is the global model as the client uses it. Returns None if there is nothing to keep: the local model
        should predict alone, and its file is lost.
        """
        predicting = self.models(state)
        weights: dict[str, Mapping[str, Array]] = {}
        for name in predicting:
            own = sent if name == serving.GLOBAL else self.local_weights(state, state.evaluated)
            if own is not None:
                weights[name] = own
        known = [name for name in predicting if name in weights]
        if not known:
            number = self.tools.number
            logger.warning("client %d: no model of round %d to keep; the last one stays", number, state.evaluated)
            return None
        mirrored = tuple(name for name in known if name in self.mirrored(state))
        shares = self.shares(known, state)
        return Answering(weights, dict.fromkeys(known, labels_of(state.seen)), mirrored=mirrored, shares=shares)


class Ensemble(Predictor):
    """Predicts with several models, or with models fitted to the client's own samples, as the keys of answers ask."""

    def models(self, state: ClientState) -> tuple[str, ...]:
        """The local and the global model, if their probabilities are averaged."""
        averages = self.settings.averages and state.has_local_model
        return (serving.LOCAL, serving.GLOBAL) if averages else super().models(state)

    def mirrored(self, state: ClientState) -> tuple[str, ...]:
        """With ``views = mirrored`` the global model, if it predicts."""
        views = self.settings.test_time_augmentation == "mirrored"
        return tuple(name for name in self.models(state) if views and name == serving.GLOBAL)

    def shares(self, names: Collection[str], state: ClientState) -> dict[str, float]:
        """With ``predict-with = fading`` the local model's weight begins at twice an equal one.

        With ``prequential`` it moves from there with the evidence of the newest chunks. All views have 1 together.
        """
        inference, views = self.settings.predict_with, sum(1 + (name in self.mirrored(state)) for name in names)
        if inference not in ("fading", "prequential") or serving.LOCAL not in names or views == 1:
            return {}
        local = (1 + fading(state.evaluated)) / views
        if inference == "prequential" and _EVIDENCE in state.extra:
            latest_share = int(state.extra[_LATEST].sum()) / int(state.seen.sum())
            local = best_weight(state.extra[_EVIDENCE], latest_share, local)
        return {name: local if name == serving.LOCAL else (1 - local) / (views - 1) for name in names}

    def observe(self, now: "ClientRound", known: Samples, views: Views) -> dict[str, Tensor]:
        """With ``predict-with = prequential``, weigh the models by how they answer the new chunk before training."""
        if self.settings.predict_with != "prequential":
            return {}
        state = now.state
        found = {_EVIDENCE: state.extra.get(_EVIDENCE, no_evidence()), _LATEST: now.current}
        if _LATEST not in state.extra or serving.LOCAL not in views or serving.GLOBAL not in views:
            return found

        def likelihoods(name: str) -> list[Tensor]:
            return [_label_probabilities(logits, known.labels, state.seen) for logits in views[name]]

        others = torch.stack(likelihoods(serving.GLOBAL)).mean(dim=0)
        latest = state.extra[_LATEST][known.labels]
        found[_EVIDENCE] = with_chunk(found[_EVIDENCE], likelihoods(serving.LOCAL)[0], others, latest)
        return found

    def weights(self, sent: Mapping[str, Array], state: ClientState, round_number: int) -> Mapping[str, Array]:
        """The received model's, adapted as :meth:`received` does."""
        return as_arrays(self.received(sent, state, round_number).state_dict()) if sent else sent

    def received(self, sent: Mapping[str, Array], state: ClientState, round_number: int) -> Network:
        """With ``recalibrate-batchnorm`` recalibrated, and with the output layer refitted as ``classifier`` asks."""
        net = super().received(sent, state, round_number)
        if sent and (self.settings.recalibrate_batchnorm or self._discriminant_share(round_number)):
            own = self._own_samples(state, round_number)
            self.recalibrate(net, own, round_number)
            self._refit(net, state.buffer if state.is_undone else own, round_number)
        return net

    def local_weights(self, state: ClientState, round_number: int) -> Mapping[str, Array] | None:
        """The local model, refitted as ``classifier`` asks."""
        trained = super().local_weights(state, round_number)
        if trained is None or not self._discriminant_share(round_number):
            return trained
        net = self.tools.network(trained)
        self._refit(net, self._own_samples(state, round_number), round_number)
        return as_arrays(net.state_dict())

    def recalibrate(self, net: Network, samples: Samples, round_number: int) -> None:
        """With ``recalibrate-batchnorm``, take batch-norm statistics anew; with fewer than two samples they stay."""
        if self.settings.recalibrate_batchnorm and len(samples) > 1:
            generator = self.tools.generator("recalibration", round_number)
            recalibrate(net, self.tools.images(samples), self.tools.experiment.preprocess, generator)

    def needs_local_test(self, state: ClientState) -> bool:
        """As usual, but not if several models predict together."""
        return self.settings.evaluate == "both" or (state.global_since is None and not self.settings.averages)

    def test_local(self, now: "ClientRound", training: "Training", kept: "Kept") -> Evaluation:
        """Test it with the output layer refitted as ``classifier`` asks."""
        if not self._discriminant_share(now.number):
            return super().test_local(now, training, kept)
        output = training.net.output
        trained = [layer.detach().clone() for layer in (output.weight, output.bias)]
        self._refit(training.net, kept.buffer.followed_by(now.chunk), now.number)
        tested = super().test_local(now, training, kept)
        with torch.no_grad():
            output.weight.copy_(trained[0])
            output.bias.copy_(trained[1])
        return tested

    def local_test_holds(self, state: ClientState) -> bool:
        """Not if its output layer is another one, as the client has missed rounds.

        It is then fitted without the chunk, which is gone, and by the newest round's share.
        """
        shares = [self._discriminant_share(number) for number in (state.round, state.evaluated)]
        return state.round == state.evaluated or not any(shares)

    def _discriminant_share(self, round_number: int) -> float:
        return discriminant_share(self.settings.classifier, round_number)

    def _refit(self, net: Network, samples: Samples, round_number: int) -> None:
        """Fit the output layer to samples, in place, as ``classifier`` asks in a round."""
        share = self._discriminant_share(round_number)
        if share and len(samples):
            images, preprocess = self.tools.images(samples), self.tools.experiment.preprocess
            refit(net, images, samples.labels, preprocess, share)

    def _own_samples(self, state: ClientState, round_number: int) -> Samples:
        """All samples that the client holds in a round, once it has trained: its buffer, and the chunk if it had one.

        After an undone round, whose labels do not count, they include its chunk until the client trains again.
        """
        if state.round != round_number and not state.is_undone:
            return state.buffer
        return state.buffer.followed_by(self.tools.source.again(state.round, state.follows))


def _label_probabilities(logits: Tensor, labels: Tensor, seen: Tensor) -> Tensor:
    """Probability of each sample's label among the classes seen, float64 (n,)."""
    probabilities = logits.double().masked_fill(~seen, -float("inf")).softmax(dim=1)
    return probabilities.gather(1, labels[:, None]).flatten()


def predictor_of(tools: "ClientTools") -> Predictor:
    """The predictor that the keys of answers ask for."""
    asked = tools.config.answers
    fitted = asked.recalibrate_batchnorm or asked.classifier != "trained"
    several = asked.averages or asked.test_time_augmentation == "mirrored"
    return Ensemble(tools) if fitted or several else Predictor(tools)
