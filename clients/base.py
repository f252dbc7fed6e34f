"""What a method may decide in a client's round: its hooks.

The round itself is run by :class:`clients.round.StreamingClient`; :mod:`clients.tools` has what hooks may use.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from flwr.app import RecordDict
from torch import Tensor

from clients.tools import ClientTools
from clients.values import Acted as Acted
from clients.values import Array as Array
from clients.values import ClientRound as ClientRound
from clients.values import Evaluation as Evaluation
from clients.values import Kept as Kept
from clients.values import Metrics as Metrics
from clients.values import Stopwatch as Stopwatch
from clients.values import Training as Training
from fedkace_flwr.errors import MessageError
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.inference import kept_models as serving
from fedkace_flwr.inference.kept_models import Answering
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.metrics import accuracy, combined_scores
from fedkace_flwr.networks.network import Network
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.training.losses import Objective, TaskLoss

logger = logging.getLogger(__name__)


class ClientRule(ClientTools):
    """The client half of a method: hooks with the defaults of federated averaging.

    By default a client trains on its chunk, keeps no buffer and answers with the global model. Hooks return what they
    produce; a rule keeps nothing between them, as each message may be handled by another process.

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
        answers = self.config.answers
        return answers.evaluate == "both" or (state.global_since is None and not answers.averages)

    def report(self, now: ClientRound, training: Training, kept: Kept) -> Metrics:
        """Metrics of training and buffer for the server, beside times."""
        return {keys.BUFFER_SIZE: len(kept.buffer), **self.class_histogram(kept.buffer)}

    def reply(self, now: ClientRound, training: Training) -> dict[str, Array]:
        """Arrays of the reply to the training message: the local model, by name."""
        return as_arrays(training.net.state_dict())

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
        if self.config.answers.inference == "local" or self.config.answers.averages:
            return state, {}
        return replace(state, global_since=state.global_since or round_number), {}

    def evaluate(self, net: Network, state: ClientState) -> Evaluation:
        """Test the models that the client predicts with; ``net`` holds the global model, as received."""
        predicting, samples = self.predicting(state), self.source.test_set(state.seen)
        if not len(samples):
            return Evaluation(None, 0)
        answers, classes = state.local_accuracy, state.local_class_accuracy
        metrics = {
            serving.GLOBAL: (keys.GLOBAL_ACCURACY, keys.GLOBAL_UNMASKED),
            serving.LOCAL: (keys.LOCAL_ACCURACY, keys.LOCAL_UNMASKED),
        }
        found = {keys.LOCAL_ACCURACY: state.local_accuracy}
        both = self.config.answers.evaluate == "both"
        wanted = {*predicting, *([serving.GLOBAL] if both else [])}
        if tested := predicting == (serving.LOCAL,) and not self.refitted_since(state):
            wanted.remove(serving.LOCAL)  # after its training
        logits: dict[str, list[Tensor]] = {}
        for name in (serving.GLOBAL, serving.AVERAGE, serving.LOCAL):  # the network holds one model at a time
            weights = (
                {} if name == serving.GLOBAL or name not in wanted else self.weights_of(name, state, state.evaluated)
            )
            if name in wanted and weights is not None:
                model = self.network(weights) if weights else net
                logits[name] = [self.test_logits(model, samples)]
                if name in self.mirrored(state):
                    logits[name].append(self.logits(model, samples, mirrored=True))
                if name in metrics:
                    among_seen, among_all = metrics[name]
                    found[among_seen] = accuracy(logits[name][0], samples.labels, state.seen)
                    if both:
                        found[among_all] = accuracy(logits[name][0], samples.labels)
        if not tested and any(name in logits for name in predicting):
            known = {name: logits[name] for name in predicting if name in logits}
            shares = self.shares(known, state)
            each = [shares[name] for name, views in known.items() for _ in views] if shares else []
            scores = combined_scores([view for views in known.values() for view in views], state.seen, each)
            answers = accuracy(scores, samples.labels, state.seen)
            classes = self.class_accuracies(scores, samples, state.seen)
        report = {name: value for name, value in found.items() if value is not None}
        return Evaluation(answers, len(samples), report, classes)

    def answering(self, sent: Mapping[str, Array], state: ClientState) -> Answering | None:
        """The networks that predict after an evaluation, to be kept for inference.

        ``sent`` is the global model as the client uses it. Returns None if there is nothing to keep: here, if the local
        model should predict alone and its file is lost.
        """
        predicting = self.predicting(state)
        weights: dict[str, Mapping[str, Array]] = {}
        for name in predicting:
            own = sent if name == serving.GLOBAL else self.weights_of(name, state, state.evaluated)
            if own is not None:
                weights[name] = own
        known = [name for name in predicting if name in weights]
        if not known:
            logger.warning("client %d: no model of round %d to keep; the last one stays", self.number, state.evaluated)
            return None
        mirrored = tuple(name for name in known if name in self.mirrored(state))
        shares = self.shares(known, state)
        return Answering(weights, dict.fromkeys(known, state.seen), combined="mean", mirrored=mirrored, shares=shares)

    def act(self, action: str, content: RecordDict, round_number: int) -> Acted:
        """Answer a message of the method's own, such as ``query.features``, within a round.

        Raises
        ------
        MessageError
            The method has no such action.
        """
        raise MessageError(f"{type(self).__name__} has no action {action!r} (content: {sorted(content)})")
