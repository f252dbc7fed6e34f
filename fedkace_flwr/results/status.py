"""The state of a run and of its clients for people: what is shown of it, and how.

It is a JSON-ready mapping: fields of the run, and under ``members`` one mapping for each seat. The server writes it to
``members.json`` (:class:`fedkace_flwr.rounds.fleet.Fleet`). A field may be missing or None, which shows as nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fedkace_flwr.storage.names import printable

MEMBERS = "members.json"
"""Its name in the run's folder."""

Status = Mapping[str, Any]
Member = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the table of clients.

    Attributes
    ----------
    title : str
        What is above it.
    cell : callable
        Its text for a client; empty if nothing is known.
    short : str
        The same where there is little room; empty if the column is left out there.
    is_text : bool
        Whether it holds words, rather than numbers.
    """

    title: str
    cell: Callable[[Member], str]
    short: str
    is_text: bool = False


def facts(status: Status) -> list[tuple[str, str]]:
    """Return what is said of the run as a whole: pairs of a word and its value."""
    members = status["members"]
    online = [each for each in members if each.get("online")]
    mean = percent(status.get("prequential_accuracy"))
    found = [
        ("run", f"{status.get('run')}: {status.get('method')}, version {status.get('version')}"),
        ("round", f"{status.get('round') or 'none yet'}"),
        ("as of", moment(status.get("when"))),
        ("test accuracy", percent(status.get("accuracy"))),
        ("before training", f"{mean} (running mean)" if mean else ""),
        ("online", f"{len(online)} of {len(members)} clients" if any("online" in each for each in members) else ""),
        ("waits for", str(status.get("waits_for") or "")),
    ]
    return [(word, printable(value)) for word, value in found if value]


def alarms(status: Status) -> list[str]:
    """Return the run's last alarms, the newest first, each in one line."""
    names = {each["seat"]: called(each) for each in status["members"]}
    return [
        printable(
            f"round {each['round']}, {each['kind']}, "
            f"{'all' if each['client'] is None else names.get(each['client'], each['client'])}: {each['text']}"
        )
        for each in reversed(status.get("alarms", ()))
    ]


def table(members: Sequence[Member], *, narrow: bool = False) -> tuple[list[Column], list[list[str]]]:
    """Return the columns in which anything is known, and the cells of each client."""
    columns = [column for column in _COLUMNS if column.short or not narrow]
    rows = [[printable(column.cell(each)) for column in columns] for each in members]
    shown = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    return [columns[number] for number in shown], [[row[number] for number in shown] for row in rows]


def called(member: Member) -> str:
    """Return a client's name, or else its number."""
    return str(member.get("name") or f"client {member['seat']}")


def percent(share: float | None) -> str:
    """Return a share in percent; empty if it is unknown."""
    return "" if share is None else f"{100 * share:.1f} %"


def moment(text: str | None) -> str:
    """Return a time of :meth:`datetime.isoformat` in UTC for people."""
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC" if text else ""


def _seen(member: Member) -> str:
    if member.get("status") == "removed":
        return "removed"
    if "online" not in member:
        return ""
    if member["online"]:
        return "online"
    return f"{moment(member['last'])[5:-7]}" if member.get("last") else "never"


def _whole(name: str) -> Callable[[Member], str]:
    return lambda member: "" if member.get(name) is None else f"{member[name]:,}"


def _percent_of(name: str) -> Callable[[Member], str]:
    return lambda member: percent(member.get(name)).removesuffix(" %")


def _cost(*names: str, unit: float = 1.0) -> Callable[[Member], str]:
    """The sum of costs, of the last round and of the day."""

    def cell(member: Member) -> str:
        costs = [member[name] for name in names if member.get(name)]
        if not any(cost["total"] for cost in costs):
            return ""
        return "/".join(_short(sum(cost[span] for cost in costs) / unit) for span in ("round", "day"))

    return cell


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


SEEN = Column("online, or last seen", _seen, "seen", is_text=True)
"""The column that says whether a client is online."""

_COLUMNS = (
    Column("name", called, "name", is_text=True),
    Column("seat", lambda member: str(member["seat"]), "seat"),
    SEEN,
    Column("last round", _whole("trained"), "last\nround"),
    Column("learned", _whole("learned"), "learned"),
    Column("waiting", _whole("waiting"), "wait-\ning"),
    Column("without label", _whole("unlabelled"), "no\nlabel"),
    Column("rejected", _whole("rejected"), "re-\njected"),
    Column("dropped", _whole("dropped"), ""),
    Column("test %", _percent_of("accuracy"), "test\n%"),
    Column("before training %", _percent_of("prequential_accuracy"), "new\n%"),
    Column("running mean %", _percent_of("prequential_mean"), ""),
    Column("CPU s round/day", _cost("cpu_seconds"), "CPU s\nround/day"),
    Column("MB round/day", _cost("bytes_down", "bytes_up", unit=1e6), "MB\nround/day"),
    Column(
        "peak MiB", lambda member: f"{member['peak_memory']:,.0f}" if member.get("peak_memory") else "", "peak\nMiB"
    ),
    Column("version", lambda member: str(member.get("version") or ""), "ver-\nsion", is_text=True),
    Column("alarms", lambda member: str(member.get("alarms") or ""), "alarms"),
)
