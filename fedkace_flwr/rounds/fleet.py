"""What each device of a run has learned and spent, as far as its replies and the server's own counts tell."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import Reply
from fedkace_flwr.rounds.server_round import RoundReport

_LAST_ALARMS = 10  # of the run, which are kept


@dataclass
class Cost:
    """A cost of a device: of the last round in which it had any, of that day (UTC), and of the run so far."""

    round: float = 0
    day: float = 0
    total: float = 0

    def add(self, amount: float) -> None:
        """Add that of a further round."""
        self.round, self.day, self.total = amount, self.day + amount, self.total + amount


_TOLD = {"waiting": wire.WAITING, "unlabelled": wire.UNLABELLED, "rejected": wire.REJECTED, "dropped": wire.DROPPED}
_TOLD |= {"accuracy": wire.ACCURACY, "prequential_accuracy": wire.PREQUENTIAL_ACCURACY}
_MEAN = "prequential_mean"
_COSTS = ("cpu_seconds", "bytes_down", "bytes_up")


@dataclass
class Device:
    """What is known of one client; None and an empty text stand for what it has not told.

    Attributes
    ----------
    asked : int
        Number of rounds in which it was asked to train.
    trained : int or None
        The last round in which it trained.
    learned : int
        Samples that it has learned in the run.
    told : dict of str to number
        The last number of each kind that it has reported: samples that are ``waiting`` in its inbox for a round or
        ``unlabelled`` for a label, those ``dropped`` for want of one, files ``rejected``, its test ``accuracy``, its
        ``prequential_accuracy``; and ``prequential_mean``, the running mean of these.
    costs : dict of str to Cost
        Its ``cpu_seconds``, and the ``bytes_down`` and ``bytes_up`` that it has received and sent.
    peak_memory : float or None
        MiB, in the last round.
    version : str
        Of its app.
    alarms : int
        Number of its alarms.
    alarm : str
        The last of them.
    """

    asked: int = 0
    trained: int | None = None
    learned: int = 0
    told: dict[str, Any] = field(default_factory=lambda: dict.fromkeys((*_TOLD, _MEAN)))
    costs: dict[str, Cost] = field(default_factory=lambda: {name: Cost() for name in _COSTS})
    peak_memory: float | None = None
    version: str = ""
    alarms: int = 0
    alarm: str = ""

    def described(self) -> dict[str, Any]:
        """All of it by name, JSON-ready."""
        every = asdict(self)
        return {**every.pop("told"), **every.pop("costs"), **every}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> "Device":
        """Undo :func:`dataclasses.asdict`; a field that this version lacks is left out."""
        device = cls(**{each.name: kept[each.name] for each in fields(cls) if each.name in kept})
        device.told = {**cls().told, **device.told}
        device.costs = {name: Cost(**kept["costs"][name]) for name in _COSTS}
        return device


class Fleet:
    """The devices of a run; there is one entry for each seat that has been heard of.

    Parameters
    ----------
    now : callable, optional
        The time of day, in UTC.
    """

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._devices: dict[int, Device] = {}
        self._day = ""
        self._last: dict[str, Any] = {}
        self._alarms: list[dict[str, Any]] = []
        self._kinds: Counter[str] = Counter()
        self._examples: dict[int, int] = {}
        self._cpu: Counter[int] = Counter()
        self._memory: dict[int, float] = {}

    def heard(self, replies: Iterable[Reply]) -> None:
        """Take note of valid replies of the present round; in a phase that is repeated, clients reply more than once."""
        for reply in replies:
            client, metrics = reply.client, reply.metrics
            device = self._device(client)
            device.told |= {name: metrics[metric] for name, metric in _TOLD.items() if metric in metrics}
            if wire.CPU_SECONDS in metrics:
                self._cpu[client] += metrics[wire.CPU_SECONDS]
            if wire.PEAK_MEMORY in metrics:
                self._memory[client] = max(metrics[wire.PEAK_MEMORY], self._memory.get(client, 0.0))

    def trained(self, replies: Iterable[Reply]) -> None:
        """Take note of valid replies to the training message of the present round, as :meth:`heard` does."""
        for reply in replies:
            self.heard([reply])
            if not reply.sat_out:
                self._examples[reply.client] = reply.examples

    def wait(self, waiting: Mapping[int, int]) -> None:
        """Take note of how many samples wait at clients."""
        for client, count in waiting.items():
            self._device(client).told["waiting"] = count

    def add_round(self, report: RoundReport, means: Mapping[int | None, float]) -> None:
        """End a round; ``means`` are the running means of the prequential accuracy by client, and of all under None."""
        self._turn()
        costs: dict[str, Mapping[int, float]]
        costs = {"cpu_seconds": self._cpu, "bytes_down": report.down, "bytes_up": report.up}
        for client in sorted({client for amounts in costs.values() for client in amounts}):
            device = self._device(client)
            for name, cost in device.costs.items():
                cost.add(costs[name].get(client, 0))
            device.peak_memory = self._memory.get(client, device.peak_memory)
            device.version = report.versions.get(client) or device.version
        for client in {*report.asked, *self._examples}:
            self._device(client).asked += 1
        for client, examples in self._examples.items():
            device = self._device(client)
            device.trained, device.learned = report.number, device.learned + examples
        for whose, mean in means.items():
            if whose is not None:
                self._device(whose).told[_MEAN] = mean
        for alarm in report.alarms:
            self._kinds[alarm.kind] += 1
            self._alarms = [*self._alarms, asdict(alarm)][-_LAST_ALARMS:]
            if alarm.client is not None:
                device = self._device(alarm.client)
                device.alarms, device.alarm = device.alarms + 1, alarm.text
        found = [metrics[wire.ACCURACY] for metrics in report.evaluated.values() if wire.ACCURACY in metrics]
        self._last = {
            "round": report.number,
            "accuracy": sum(found) / len(found) if found else None,
            "prequential_accuracy": means.get(None),
        }
        self._examples, self._cpu, self._memory = {}, Counter(), {}

    @property
    def most_asked(self) -> int:
        """The largest number of rounds in which a single client was asked to train."""
        return max((device.asked for device in self._devices.values()), default=0)

    def described(self, members: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the run for people, JSON-ready, with the seats that :meth:`Members.table` gives."""
        self._turn()
        return {
            "when": self._now().isoformat(timespec="seconds"),
            "round": 0,
            "accuracy": None,
            "prequential_accuracy": None,
            **self._last,
            "alarms": self._alarms,
            "alarms_by_kind": dict(self._kinds),
            "members": [{**each, **self._devices.get(each["seat"], Device()).described()} for each in members],
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, JSON-ready."""
        return {
            "day": self._day,
            "last": self._last,
            "alarms": self._alarms,
            "alarms_by_kind": dict(self._kinds),
            "devices": {str(client): asdict(device) for client, device in sorted(self._devices.items())},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with what :meth:`state` gave; a field that this version lacks is left out.

        Earlier versions did not count in how many rounds a device was asked to train: it counts as asked in all.
        """
        self._day, self._last = str(state.get("day", "")), dict(state.get("last", {}))
        asked = {"asked": self._last.get("round", 0)}
        self._alarms, self._kinds = list(state.get("alarms", [])), Counter(state.get("alarms_by_kind", {}))
        self._devices = {int(client): Device.of({**asked, **kept}) for client, kept in state.get("devices", {}).items()}

    def _device(self, client: int) -> Device:
        return self._devices.setdefault(client, Device())

    def _turn(self) -> None:
        """Begin a new day, if it has come."""
        today = self._now().date().isoformat()
        if today != self._day:
            self._day = today
            for device in self._devices.values():
                for cost in device.costs.values():
                    cost.day = 0
