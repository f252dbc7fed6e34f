"""What a method may decide in a client's round: its hooks.

The round itself is run by :class:`fedkace_flwr.clients.round.StreamingClient`; :mod:`fedkace_flwr.clients.tools` has what hooks may use.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from flwr.app import RecordDict

from fedkace_flwr.clients.tools import ClientTools
from fedkace_flwr.clients.values import Acted as Acted
from fedkace_flwr.clients.values import Array as Array
from fedkace_flwr.clients.values import ClientRound as ClientRound
from fedkace_flwr.clients.values import Evaluation as Evaluation
from fedkace_flwr.clients.values import Kept as Kept
from fedkace_flwr.clients.values import Metrics as Metrics
from fedkace_flwr.clients.values import Stopwatch as Stopwatch
from fedkace_flwr.clients.values import Training as Training
from fedkace_flwr.config import Config
from fedkace_flwr.errors import MessageError
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.inference.kept_models import Answering
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.networks.network import Network
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.training.losses import Objective, TaskLoss

logger = logging.getLogger(__name__)


def chunk_alone(config: Config, round_number: int) -> int:
    """Count the samples of an epoch without replay, for estimates."""
    return config.mean_chunk


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
        return self.predictor.needs_local_test(state)

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
        if self.config.answers.predict_with in ("auto", "global"):
            state = replace(state, global_since=state.global_since or round_number)
        return state, {}

    def evaluate(self, net: Network, state: ClientState) -> Evaluation:
        """Test the models that the client predicts with; ``net`` holds the global model, as received."""
        return self.predictor.evaluate(net, state)

    def answering(self, sent: Mapping[str, Array], state: ClientState) -> Answering | None:
        """The networks to keep for inference after an evaluation; None if the last ones stay."""
        return self.predictor.answering(sent, state)

    def act(self, action: str, content: RecordDict, round_number: int) -> Acted:
        """Answer a message of the method's own, such as ``query.features``, within a round.

        Raises
        ------
        MessageError
            The method has no such action.
        """
        raise MessageError(f"{type(self).__name__} has no action {action!r} (content: {sorted(content)})")
