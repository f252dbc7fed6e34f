"""A round at the server: its report, its messages, and what a server rule may read and use."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedkace_flwr.algorithms.robust_aggregation import root_mean_square
from fedkace_flwr.errors import MessageError, RunError
from fedkace_flwr.flower.internals import is_simulation
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.metrics import COMMON, Limits, Metric
from fedkace_flwr.messaging.wire import NumpyArray, Reply, Shapes
from fedkace_flwr.rounds.defence import Defence
from fedkace_flwr.rounds.exchange import by_client, exchange
from fedkace_flwr.rounds.members import Members
from fedkace_flwr.rounds.watch import Alarm
from fedkace_flwr.sections import RunConfig

logger = logging.getLogger(__name__)

TRAINING, GATE, EVALUATION = "training", "gate", "evaluation"
"""Names of the two phases that every round has, and of the one between them in which a candidate is tested."""

_WORKER_LOST = 0  # Flower's error code when a simulation loses the worker process; no client raised the error
_REFUSED = "the grid did not accept the message to it: its SuperNode has left, or the message is too large"

Answer = TypeVar("Answer")


@dataclass
class RoundReport:
    """What the server records about a round.

    Attributes
    ----------
    number : int
        Round t, counted from 1.
    asked : tuple of int
        Clients that are to train in this round; none if the method has no training phase.
    trained, evaluated : dict of int to dict
        Each client's metrics in the two phases.
    drift : float or None
        Client drift: (1/K) sum of squared distances between the local models and the global model.
    updates : dict of int to dict
        What the server measured of each client's update: ``update_length``, cosines to the mean of the others'
        (``update_cosine``, and ``running_means_cosine`` if the network has any), the smallest part of a layer that it
        keeps (``retention``), and the number of ``clipped_layers`` if there are any.
    failures : list of dict
        Client, phase, reason and kind of each reply that was rejected, of each kind the first, however often the phase
        is repeated. The kinds are those of
        :class:`fedkace_flwr.errors.MessageError`, and ``absent`` (no SuperNode), ``refused`` (Flower did not
        accept the message), ``silent`` (no reply in time) and ``unreadable`` (Flower could not unpack the reply).
    away : list of int
        Clients that are away. They are not asked, which is not a failure.
    sat_out : list of int
        Clients without new data to train on. This is not a failure either.
    below_quorum : list of str
        Phases that were skipped because too few clients replied.
    repeated : dict of str to int
        Number of retries of each phase for the same reason.
    alarms : list of Alarm
        What an operator should look at; :meth:`alarm` adds to it.
    down, up : dict of int to int
        Bytes of all records sent to each client and received from it.
    versions : dict of int to str
        The version of the app that each client says it runs.
    own : dict of str to object
        Further JSON-ready fields of the record that the method adds.
    seconds : float
        Duration of the whole round.
    """

    number: int
    asked: tuple[int, ...]
    trained: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    evaluated: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    drift: float | None = None
    updates: dict[int, dict[str, float]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    away: list[int] = field(default_factory=list)
    sat_out: list[int] = field(default_factory=list)
    below_quorum: list[str] = field(default_factory=list)
    repeated: dict[str, int] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)
    down: Counter[int] = field(default_factory=Counter)
    up: Counter[int] = field(default_factory=Counter)
    versions: dict[int, str] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def reasons(self) -> str:
        """Return the first failures on one line; empty if there are none."""
        return "; ".join(f"client {failure['client']}: {failure['reason']}" for failure in self.failures[:3])

    def failed(self, phase: str) -> set[int]:
        """The clients that could be reached and of which a reply in a phase is missing or was rejected."""
        return {each["client"] for each in self.failures if each["phase"] == phase and each["kind"] != "absent"}

    def alarm(self, kind: str, client: int | None, text: str) -> None:
        """Raise an alarm: in the log, the round's record and the trackers, and for ``on-alarm``."""
        logger.warning("round %d, alarm: %s%s", self.number, "" if client is None else f"client {client}: ", text)
        self.alarms.append(Alarm(self.number, kind, client, text))

    def record(self, clients: int, own: Sequence[Metric] = ()) -> dict[str, Any]:
        """Return the round's line of ``rounds.jsonl``.

        Parameters
        ----------
        clients : int
            Number of clients K; in each column, a client that reported nothing has null.
        own : sequence of Metric
            The method's own metrics; those with a column are recorded after the common ones.

        Returns
        -------
        dict
            JSON-ready values. All times are under ``seconds``, so that the rest is identical for identical seeds.
        """
        trained, evaluated = self.trained, self.evaluated
        # A method may select its buffer only after it has received the new global model; the later report is then used.
        settled = {client: {**metrics, **evaluated.get(client, {})} for client, metrics in trained.items()}
        sources: dict[str, Mapping[int, Mapping[str, Any]]]
        sources = {"training": trained, "own": trained, "evaluation": evaluated, "either": settled}

        def column(metric: Metric) -> Any:
            source = sources[metric.phase]
            values = [_recorded(metric, source.get(client, {}).get(metric.name)) for client in range(clients)]
            return any(values) if metric.any_client else values

        def columns(metrics: Sequence[Metric]) -> dict[str, Any]:
            return {each.column: column(each) for each in metrics if each.column and not each.is_timed}

        reported = columns(COMMON)
        accuracies = [value for value in reported["client_accuracy"] if value is not None]
        seen = [value for value in reported["seen_classes"] if value is not None]
        both = [metrics for phase in (trained, evaluated) for metrics in phase.values()]
        timed = {each.column: each.name for each in (*COMMON, *own) if each.is_timed}
        return {
            "round": self.number,
            "accuracy": sum(accuracies) / len(accuracies) if accuracies else None,
            "chance": sum(1 / value for value in seen) / len(seen) if seen else None,
            **reported,
            **columns([each for each in own if each not in COMMON]),
            "client_drift": self.drift,
            "bytes": {"down": self.down.total(), "up": self.up.total()},
            "failures": list(self.failures),
            "seconds": {
                "round": self.seconds,
                **{part: float(sum(metrics.get(name, 0.0) for metrics in both)) for part, name in timed.items()},
                "transport": max(0.0, self.seconds - busy_seconds(both)),
            },
            **self._compared(clients),
            **self.own,
            **self._unusual(clients),
        }

    def _unusual(self, clients: int) -> dict[str, Any]:
        """Fields that appear only when they are not empty, and who was asked to train, if not all who are not away."""
        asked = list(self.asked) if len(self.asked) + len(self.away) < clients else []
        fields = {
            "asked": asked,
            "away": self.away,
            "sat_out": self.sat_out,
            "below_quorum": self.below_quorum,
            "repeated": self.repeated,
            "alarms": [asdict(alarm) for alarm in self.alarms],
        }
        return {name: value for name, value in fields.items() if value}

    def _compared(self, clients: int) -> dict[str, list[float | None]]:
        """Columns of :attr:`updates`; none without comparison."""
        names = sorted({name for measured in self.updates.values() for name in measured})
        return {name: [self.updates.get(client, {}).get(name) for client in range(clients)] for name in names}


def _recorded(metric: Metric, value: Any) -> Any:
    if metric.unknown is None or not isinstance(value, list):
        return value
    return [None if entry == metric.unknown else entry for entry in value]


def busy_seconds(spans: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds during which at least one client was computing; the rest is transport and bookkeeping."""
    edges = sorted((span[wire.STARTED], span[wire.FINISHED]) for span in spans if wire.STARTED in span)
    busy, reached = 0.0, float("-inf")
    for started, finished in edges:
        busy += max(0.0, finished - max(started, reached))
        reached = max(reached, finished)
    return busy


class Messenger:
    """Exchanges messages with clients, and writes costs and failures to the round's report.

    Parameters
    ----------
    grid : Grid
        Connection to the SuperNodes.
    members : Members
        Finds the SuperNode of each client.
    settings : RunConfig
        The run's keys: deadline and probe.
    report : RoundReport
        The round's report.
    frozen : callable, optional
        Gives the frozen part of the network, for devices that lack it.
    """

    def __init__(
        self,
        grid: Grid,
        members: Members,
        settings: RunConfig,
        report: RoundReport,
        frozen: Callable[[], ArrayRecord] | None = None,
    ) -> None:
        self.report = report
        self._grid = grid
        self._members = members
        self._settings = settings
        self._frozen = frozen
        self._senders: dict[str, int] = {}

    def nodes(self) -> dict[int, int]:
        """SuperNode of each client that can be reached now."""
        return self._members.nodes(self._grid)

    def message(self, kind: str, node: int, content: RecordDict) -> Message:
        """A message of this round to a SuperNode; ``kind`` is Flower's message type."""
        group = str(self.report.number)
        return Message(content, dst_node_id=node, message_type=kind, group_id=group, ttl=self._settings.deadline)

    def exchange(
        self, phase: str, questions: Iterable[Message], deadline: float, wanted: Iterable[int]
    ) -> dict[int, Message]:
        """Send messages and collect the replies, error replies included.

        Parameters
        ----------
        phase : str
            Name of the phase in the report.
        questions : iterable of Message
            At most one per client.
        deadline : float
            Longest wait, in seconds.
        wanted : iterable of int
            Clients that the phase is meant to reach; those without a message are recorded as absent.

        Returns
        -------
        dict of int to Message
            By client, in the order of client numbers.

        Raises
        ------
        RunError
            A simulation has lost a worker process.
        """
        sent = by_client(questions)
        probe = 0.0 if is_simulation(self._grid) else self._settings.probe
        found = exchange(self._grid, sent, deadline, probe, self._frozen)
        self.report.down.update(found.down)
        self.report.up.update(found.up)
        self.report.versions |= {client: wire.version_in(reply) for client, reply in found.replies.items()}
        for client in sorted(set(wanted) - set(sent)):
            self.fail(client, phase, "its SuperNode is not connected", "absent")
        for client in found.refused:
            self.fail(client, phase, _REFUSED, "refused")
        for client in found.silent:
            self.fail(client, phase, f"no reply within {deadline:g} seconds", "silent")
        for client, reason in sorted(found.unreadable.items()):
            self.fail(client, phase, reason, "unreadable")
        for client, reply in found.replies.items():
            if reply.has_error() and reply.error.code == _WORKER_LOST and is_simulation(self._grid):
                raise RunError(
                    f"round {self.report.number}, {phase}: the worker process of client {client} died "
                    f"({wire.root_cause(reply.error.reason)}); run the same command again, or set resume = true, "
                    "to go on from here"
                )
        self._senders = {reply.metadata.reply_to_message_id: client for client, reply in found.replies.items()}
        return found.replies

    def sender(self, reply: Message) -> int:
        """Client that sent a reply of the latest exchange; one SuperNode may host several clients."""
        return self._senders[reply.metadata.reply_to_message_id]

    def ask(self, phase: str, action: str, contents: Mapping[int, RecordDict]) -> dict[int, RecordDict]:
        """Send a method's own messages; content of the replies by client, error replies recorded as failures."""
        nodes = self.nodes()
        questions = [self.message(action, nodes[k], content) for k, content in contents.items() if k in nodes]
        answers = {}
        for client, reply in self.exchange(phase, questions, self._settings.deadline, contents).items():
            if reply.has_error():
                self.fail(client, phase, wire.root_cause(reply.error.reason), "error")
            else:
                answers[client] = reply.content
        return answers

    def fail(self, client: int, phase: str, reason: str, kind: str = "content") -> None:
        """Record that a client's reply is missing or rejected."""
        logger.warning("round %d, %s: client %d left out: %s", self.report.number, phase, client, reason)
        failures, same = self.report.failures, {"client": client, "phase": phase, "kind": kind}
        if not any(same.items() <= failure.items() for failure in failures):
            failures.append({**same, "reason": reason})


@dataclass(frozen=True)
class ServerRound:
    """One round, as it is handed to the hooks of :class:`fedkace_flwr.strategies.base.ServerRule`.

    Attributes
    ----------
    clients : int
        Number of clients K so far; those that are away or were removed count.
    shapes : mapping
        Name, shape and dtype of each of the model's arrays.
    replied : mapping
        Those of a reply to training.
    parameters : frozenset of str
        Names of those in a reply that are trained by gradient.
    messenger : Messenger
        Sends messages; rules use :meth:`ask`.
    limits : Limits
        Largest values that a client's numbers can have.
    defence : Defence
        Compares clients; rules use :meth:`compared` and :meth:`far_larger`.
    run_fields : mapping
        Fields of the configuration record that every message of the run carries.
    sent : dict of int to ArrayRecord
        The model that each client was sent in the latest phase.
    """

    clients: int
    shapes: Shapes
    replied: Shapes
    parameters: frozenset[str]
    messenger: Messenger
    limits: Limits
    defence: Defence
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
        return self.limits.classes

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
            content[wire.CONFIG] = ConfigRecord({**self.run_fields, wire.ROUND: self.number, wire.CLIENT: client})
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
