"""The training phase under secure aggregation: the server learns the mean of the updates and no single update."""

import copy
from collections.abc import Callable, Collection, Sequence

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common import NDArrays

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.records import Reply, Weights
from fedkace_flwr.rounds.messenger import Messenger
from fedkace_flwr.rounds.quorum import BelowQuorumError
from fedkace_flwr.rounds.round_report import TRAINING
from fedkace_flwr.rounds.secure_aggregation import MaskedSumError, mean_update


class MaskedTraining:
    """One training phase; a :class:`fedkace_flwr.rounds.secure_aggregation.Peer`.

    Parameters
    ----------
    messenger : Messenger
        Sends the round's messages.
    clients : collection of int
        The round's participants.
    deadline : float
        Longest wait of each exchange, in seconds.
    check : callable
        Checks the numbers of a reply; raises :class:`fedkace_flwr.errors.MessageError`.

    Attributes
    ----------
    replies : dict of int to Reply
        Valid replies so far by client, without weights.
    """

    def __init__(
        self, messenger: Messenger, clients: Collection[int], deadline: float, check: Callable[[Reply], None]
    ) -> None:
        self.deadline = deadline
        self.replies: dict[int, Reply] = {}
        self._messenger = messenger
        self._wanted = set(clients)
        self._check = check

    def run(self, questions: Sequence[Message], before: Weights, names: Sequence[str], limit: float) -> NDArrays:
        """Mean of the clients' updates.

        Parameters
        ----------
        questions : sequence of Message
            One training message per client.
        before : mapping
            Global model from which the clients train.
        names : sequence of str
            Arrays that an update consists of.
        limit : float
            Largest change of a weight (`SECAGG_RANGE`).

        Returns
        -------
        list of array
            float64, by ``names``; not numbers if all clients sat the round out.

        Raises
        ------
        BelowQuorumError
            The protocol ended without a sum.
        """
        number = self._messenger.report.number
        try:
            return mean_update(number, questions, [before[name].shape for name in names], limit, self)
        except MaskedSumError as error:
            reasons = self._messenger.report.reasons()
            text = f"round {number}, {TRAINING}: secure aggregation: {error}{'; ' if reasons else ''}{reasons}"
            raise BelowQuorumError(text, TRAINING, self.valid) from error

    @property
    def valid(self) -> list[Reply]:
        """Valid replies in the order of client numbers."""
        return [self.replies[client] for client in sorted(self.replies)]

    def ask(self, phase: str, questions: list[Message]) -> dict[int, Message]:
        """Exchange messages; clients without a SuperNode are recorded in the first phase only."""
        replies = self._messenger.exchange(phase, questions, self.deadline, self._wanted)
        self._wanted = set()
        return replies

    def trained(self, client: int, reply: Message) -> None:
        """Check and keep the numbers of a reply; a masked update itself cannot be checked."""
        numbers = copy.copy(reply)
        metrics = reply.content.metric_records.get(keys.METRICS, MetricRecord())
        numbers.content = RecordDict({keys.METRICS: metrics})
        if metrics.get(keys.SAT_OUT, 0) == 0:
            numbers.content[keys.ARRAYS] = ArrayRecord()
        checked = keys.read_reply(numbers, client, {})
        self._check(checked)
        self.replies[client] = checked

    def fail(self, client: int, phase: str, error: MessageError) -> None:
        """Record a failure."""
        self._messenger.fail(client, phase, str(error), error.kind)


def moved(before: Weights, names: Sequence[str], update: NDArrays) -> Weights:
    """The model ``before`` plus an update of the named arrays; every array keeps its dtype."""
    stepped = {name: before[name] + step for name, step in zip(names, update, strict=True)}
    return {name: stepped.get(name, array).astype(array.dtype) for name, array in before.items()}
