"""Hooks of the server half: what a method can change in a round."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict

from fedkace_flwr.config import Config
from fedkace_flwr.messaging.records import NumpyArray, Reply, Shapes, Weights
from fedkace_flwr.rounds.aggregation import client_drift
from fedkace_flwr.rounds.server_round import ServerRound


class ServerRule:
    """Plain rounds: every client trains the global model, and the new global model is the mean.

    :class:`fedkace_flwr.rounds.driver.RoundDriver` runs the rounds: it sends messages, retries, checks replies and
    keeps checkpoints. A method overrides the hooks below, listed in the order in which a round calls them. ``now`` is
    the round, with the tools that a hook may use.

    Parameters
    ----------
    config : Config
        The configuration.

    Attributes
    ----------
    train_action : str or None
        Message type of the training phase. None: there is neither a training phase nor a global model.
    aggregates : bool
        Whether the clients' models are merged, by the rule of the key ``aggregation``.
    """

    train_action: str | None = MessageType.TRAIN
    aggregates = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def begin_round(self, now: ServerRound, arrays: ArrayRecord) -> None:
        """Prepare for a round that starts from the global model ``arrays``."""

    def model_for(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        """Model to send to a client in either phase; by default the global model ``arrays``."""
        return arrays

    def expected(self, now: ServerRound, content: RecordDict) -> Shapes:
        """Name, shape and dtype of the arrays that a training reply must hold; by default those of the model.

        ``content`` is the reply's unchecked content; hooks may read only the declarations of its arrays.

        Raises
        ------
        MessageError
            The reply declares impossible arrays.
        """
        return now.shapes

    def check(self, now: ServerRound, reply: Reply) -> None:
        """Check a well-formed training reply against the method's own requirements.

        Raises
        ------
        MessageError
            The reply is rejected, and recorded as a failure.
        """

    def compare(self, now: ServerRound, replies: Sequence[Reply]) -> list[Reply]:
        """Compare training replies with each other, and return those that count; record the others as failures.

        By default, models that cannot be the result of honest training are rejected, and updates that are longer than
        usual are scaled down.

        Parameters
        ----------
        now : ServerRound
            The round.
        replies : sequence of Reply
            Replies with arrays, in the order of client numbers.
        """
        return now.compared(replies)

    def weight(self, reply: Reply) -> float:
        """Weight of a local model in the mean, before normalisation; by default the same for all."""
        return 1.0

    def merge(self, now: ServerRound, replies: Sequence[Reply]) -> Weights:
        """New global model from at least one valid reply, in the order of client numbers; by default by ``aggregation``."""
        return now.aggregate([reply.weights for reply in replies], [self.weight(reply) for reply in replies])

    def drift(self, now: ServerRound, replies: Sequence[Reply], merged: Weights) -> float | None:
        """Client drift for the record; by default the mean squared distance of the local models from the merged model."""
        return client_drift([reply.weights for reply in replies], merged, now.parameters)

    def trained(self, now: ServerRound, replies: Sequence[Reply]) -> None:
        """Process the valid training replies; there are none if every client skipped the round.

        Under secure aggregation the replies hold no weights.
        """

    def between(self, now: ServerRound, arrays: ArrayRecord) -> ArrayRecord:
        """Run the method's own exchanges between training and evaluation, and return the global model to continue with.

        It is not called if no client has trained.
        """
        return arrays

    def extras_for(self, client: int) -> dict[str, ArrayRecord | ConfigRecord]:
        """Further records of a client's evaluation message."""
        return {}

    def evaluated(self, now: ServerRound) -> dict[str, float]:
        """Process ``now.report.evaluated``, and return further metrics of the round for Flower's result."""
        return {}

    def state(self) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
        """Arrays, and a record ready for JSON, that later rounds need besides the global model."""
        return {}, {}

    def restore(self, arrays: Mapping[str, NumpyArray], record: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned; called before the first round."""

    def lacks_global_model(self) -> str:
        """Why no single model stands for the run, in half a sentence; empty if the global model does.

        A finished run leaves its global model for others to use, unless this names a reason.
        """
        return ""

    def summary(self) -> str:
        """One line for the log at the start of a run."""
        return f"{self.config.method} over {self.config.stream.clients} clients"
