"""A round as a server rule sees it: what it may read, and the tools it may use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.records import NumpyArray, Reply, Shapes
from fedkace_flwr.messaging.validation import Limits, root_mean_square
from fedkace_flwr.rounds.aggregation import Aggregator
from fedkace_flwr.rounds.defence import Defence
from fedkace_flwr.rounds.messenger import Messenger
from fedkace_flwr.rounds.replies import num_classes
from fedkace_flwr.rounds.round_report import TRAINING, RoundReport

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ServerRound:
    """One round, as it is handed to the hooks of :class:`fedkace_flwr.strategies.base.ServerRule`.

    Attributes
    ----------
    clients : int
        Number of clients K.
    shapes : mapping
        Name, shape and dtype of each of the model's arrays.
    parameters : frozenset of str
        Names of the arrays that are trained by gradient.
    messenger : Messenger
        Sends messages; rules use :meth:`ask`.
    limits : Limits
        Largest values that a client's numbers can have.
    defence : Defence
        Compares clients; rules use :meth:`compared` and :meth:`far_larger`.
    aggregate : Aggregator
        Aggregates models by the configured rule.
    run_fields : mapping
        Fields of the configuration record that every message of the run carries.
    sent : dict of int to ArrayRecord
        The model that each client was sent in the latest phase.
    """

    clients: int
    shapes: Shapes
    parameters: frozenset[str]
    messenger: Messenger
    limits: Limits
    defence: Defence
    aggregate: Aggregator
    run_fields: Mapping[str, Any]
    sent: dict[int, ArrayRecord] = field(default_factory=dict)

    @property
    def report(self) -> RoundReport:
        """The round's report: metrics by client, failures, and ``own`` for fields of the method."""
        return self.messenger.report

    @property
    def number(self) -> int:
        """Round t, counted from 1."""
        return self.report.number

    @property
    def classes(self) -> int:
        """Number of classes C."""
        return num_classes(self.shapes)

    def ask(
        self,
        phase: str,
        action: str,
        contents: Mapping[int, RecordDict],
        read: Callable[[int, RecordDict], Answer],
    ) -> dict[int, Answer]:
        """Exchange a method's own messages.

        Parameters
        ----------
        phase : str
            Name of the exchange in the record.
        action : str
            ``train.NAME`` or ``query.NAME``, one of the method's registered actions.
        contents : mapping of int to RecordDict
            Records for each client; its configuration record is added here.
        read : callable
            Reads one client's reply; a :class:`fedkace_flwr.errors.MessageError` that it raises rejects the reply.

        Returns
        -------
        dict of int to object
            Results of ``read`` by client. Every other client of ``contents`` is recorded as a failure.
        """
        for client, content in contents.items():
            content[keys.CONFIG] = ConfigRecord({**self.run_fields, keys.ROUND: self.number, keys.CLIENT: client})
        answers = {}
        for client, content in self.messenger.ask(phase, action, contents).items():
            try:
                answers[client] = read(client, content)
            except MessageError as error:
                self.fail(client, phase, str(error), error.kind)
        return answers

    def fail(self, client: int, phase: str, reason: str, kind: str = "content") -> None:
        """Record that a client's reply is rejected; ``kind`` as in :class:`fedkace_flwr.errors.MessageError`."""
        self.messenger.fail(client, phase, reason, kind)

    def compared(self, replies: Sequence[Reply]) -> list[Reply]:
        """Compare models with each other, as :mod:`fedkace_flwr.rounds.defence` does.

        Parameters
        ----------
        replies : sequence of Reply
            Training replies with a model, in the order of client numbers.

        Returns
        -------
        list of Reply
            Those that count, with clipped models; the others are recorded as failures.
        """
        counted, rejects = self.defence(replies, self.sent, self.report)
        for client, (reason, kind) in rejects.items():
            self.fail(client, TRAINING, reason, kind)
        return counted

    def far_larger(self, phase: str, name: str, rows: Mapping[int, NumpyArray]) -> set[int]:
        """Clients whose rows are much longer than is usual; recorded as failures. None if the defence is off.

        Parameters
        ----------
        phase : str
            Name of the phase in the record.
        name : str
            Name of the quantity.
        rows : mapping of int to array
            Matrix (n, F) of each client. The root mean square of its rows' lengths is compared.
        """
        far = self.defence.far_larger({client: root_mean_square(matrix) for client, matrix in rows.items()})
        for client, reason in far.items():
            self.fail(client, phase, f"{name}: {reason}", "norm")
        return set(far)
