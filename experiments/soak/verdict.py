"""What a year has shown: a table of all figures, PASS or FAIL for each, a JSON file of them, and a picture."""

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from rich.table import Table

from fedkace_flwr.experiments.soak.ledger import Ledger
from fedkace_flwr.experiments.soak.measures import COMPARED, MOST_GROWTH, Figures, quarter_and_end
from fedkace_flwr.experiments.soak.plan import Event
from fedkace_flwr.storage.files import write_bytes, write_text

SETTLED = 50
"""Rounds; in fewer, buffers and caches are still being filled at a quarter."""

_SHOWN_FAULTS = 5
_ABOUT = 5  # rounds before and after a week of wrong labels, with which it is compared
_KNOWN = 10  # tests of a node before its accuracy is watched
_LOSS = 0.05  # most that the mean accuracy over a few rounds may have fallen after it
_MEGA = 1e6
_UNITS = {
    "files": (1.0, "{:.0f}"),
    "disk": (_MEGA, "{:.2f} MB"),
    "memory": (_MEGA, "{:.0f} MB"),
    "descriptors": (1.0, "{:.0f}"),
}


class Line(NamedTuple):
    """A line of the table.

    Attributes
    ----------
    what : str
        The figure.
    value : str
        Its value, or the two that are compared.
    ok : bool or None
        Whether it is as it must be; None if nothing is asked of it.
    """

    what: str
    value: str
    ok: bool | None = None


@dataclass(frozen=True)
class Week:
    """Rounds in which nodes labelled wrongly, and their model was taken back.

    Attributes
    ----------
    before : int
        The last round before it, whose model was ordered back.
    nodes : list of str
        Who labelled wrongly.
    """

    before: int
    nodes: list[str]

    def back(self, records: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the round in which the model of before was taken back."""
        rounds = (record["round"] for record in records if record.get("rolled_back_to") == self.before)
        return next(rounds, None)


def course(
    rounds: int, records: Sequence[Mapping[str, Any]], plan: Sequence[Event], happened: Sequence[Event]
) -> list[Line]:
    """Return lines on whether the year took place as planned."""
    wanted, had = (Counter(event.kind for event in events) for events in (plan, happened))
    events = ", ".join(f"{count} {kind}" for kind, count in sorted(had.items()))
    return [
        Line("rounds", f"{len(records)} of {rounds}", len(records) >= rounds),
        Line("events", events, had == wanted),
    ]


def learning(ledger: Ledger, counted: int) -> list[Line]:
    """Return lines on samples and memories; ``counted`` is how many pictures were dropped, by the hub's count."""
    totals, (wait, dropped) = ledger.totals(), ledger.unlabelled()
    unlabelled = f"{wait + dropped}: {wait} wait, {dropped} were dropped; the hub has counted {counted}"
    faults = [Line("fault", fault, False) for fault in ledger.faults[:_SHOWN_FAULTS]]
    if more := ledger.faults[_SHOWN_FAULTS:]:
        faults.append(Line("fault", f"and {len(more)} more", False))
    memories = {
        node: f"{memory.samples} of {memory.classes} classes" for node, memory in sorted(ledger.memories.items())
    }
    return [
        Line("samples given", str(totals["given"]), totals["given"] > 0),
        Line("learned exactly once", str(totals["learned once"]), totals["learned once"] == totals["given"]),
        Line("learned more often", str(totals["learned again"]), totals["learned again"] == 0),
        Line("not learned", str(totals["not learned"]), totals["not learned"] == 0),
        Line("labelled late", str(ledger.late), ledger.late > 0),
        Line("never labelled", unlabelled, dropped == counted > 0),
        *(Line(f"{node}: buffer", memory, True) for node, memory in memories.items()),
        *faults,
    ]


def watching(
    records: Sequence[Mapping[str, Any]], weeks: Sequence[Week], heard: Sequence[Mapping[str, Any]]
) -> list[Line]:
    """Return lines on weeks of wrong labels, and on alarms in them and in quiet rounds.

    In less than 50 rounds, in which buffers are small and few devices are known well, less is asked. In the first quarter
    of a year, models are bad now and then without wrong labels, which the gate reports.

    Parameters
    ----------
    records : sequence of mapping
        The rounds.
    weeks : sequence of Week
        The weeks.
    heard : sequence of mapping
        The alarms that came to the command of ``on-alarm``.
    """
    lines, alarms, quiet = list[Line](), alarms_of(records), {record["round"] for record in records}

    def asked(ok: bool) -> bool | None:
        return ok if len(records) >= SETTLED else None

    for week in weeks:
        back = week.back(records)
        last = records[-1]["round"] if back is None else back
        quiet -= set(range(week.before + 1, last + _ABOUT + 1))
        parts = ((week.before - _ABOUT, week.before), (week.before, last - 1), (last - 1, last - 1 + _ABOUT))
        before, during, after = (_mean_accuracy(records, *part) for part in parts)
        raised = [alarm for alarm in alarms if week.before < alarm["round"] <= last]
        held = sum(alarm["kind"] == "gate" for alarm in raised)
        fell = {_called(alarm["client"]) for alarm in raised if alarm["kind"] == "accuracy"}
        due = {node for node in week.nodes if _tests(records, node, week.before) >= _KNOWN}
        name, told = f"wrong labels after round {week.before}", ", ".join(sorted(fell)) or "none"
        shown = f"{100 * before:.1f} % before, {100 * during:.1f} % in this time, {100 * after:.1f} % after it"
        lines += [
            Line(f"{name}: accuracy", shown, asked(after >= before - _LOSS)),
            Line(f"{name}: held", f"{held} of {last - week.before}", asked(held > 0)),
            Line(f"{name}: alarms", f"{told}; due: {', '.join(sorted(due)) or 'none'}", asked(fell >= due)),
            Line(f"{name}: rollback", f"taken in round {back}", back is not None),
        ]
    quarter = len(records) // 4
    early = [alarm for alarm in alarms if alarm["round"] in quiet and alarm["round"] <= quarter]
    false = [alarm for alarm in alarms if alarm["round"] in quiet and alarm["round"] > quarter]
    told = f"{len(false)} in {sum(number > quarter for number in quiet)}, and {len(early)} in the first {quarter}"
    unheard = [alarm for alarm in alarms if alarm not in heard]
    return [
        *lines,
        Line("alarms in quiet rounds", told, asked(not false)),
        Line("alarms without on-alarm", f"{len(unheard)} of {len(alarms)}", not unheard),
    ]


def _called(client: int | None) -> str:
    return "all" if client is None else f"node-{client + 1}"


def _tests(records: Sequence[Mapping[str, Any]], node: str, until: int) -> int:
    """In how many rounds a node has tested a new chunk before it trained."""
    found = [record.get("prequential_accuracy", ()) for record in records if record["round"] <= until]
    return sum(value is not None for values in found for client, value in enumerate(values) if _called(client) == node)


def alarms_of(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return all alarms."""
    return [alarm for record in records for alarm in record.get("alarms", ())]


def _mean_accuracy(records: Sequence[Mapping[str, Any]], after: int, until: int) -> float:
    values = [record["accuracy"] for record in records if after < record["round"] <= until]
    return float(mean([value for value in values if value is not None] or [nan]))


def growth(members: Mapping[str, Sequence[Figures]]) -> list[Line]:
    """Return lines that compare the end with a quarter of each member's time; in less than 50 rounds nothing is asked."""
    lines = []
    for member, figures in members.items():
        for name in COMPARED:
            unit, form = _UNITS[name]
            quarter, end = quarter_and_end(figures, name)
            ratio = end / quarter if quarter else float("inf")
            value = f"{form.format(quarter / unit)} -> {form.format(end / unit)}, x {ratio:.2f}"
            lines.append(Line(f"{member}: {name}", value, ratio <= MOST_GROWTH if len(figures) >= SETTLED else None))
    return lines


def costs(members: Mapping[str, Sequence[Figures]], records: Sequence[Mapping[str, Any]], seconds: float) -> list[Line]:
    """Return lines on what the year has cost."""
    rounds = max(1, len(records))
    sent = {way: sum(record["bytes"][way] for record in records) / rounds for way in ("down", "up")}
    lines = [
        Line("duration", f"{seconds / 60:.1f} min, {seconds / rounds:.1f} s a round"),
        Line("sent in a round, all nodes", f"{sent['down'] / _MEGA:.3f} MB down, {sent['up'] / _MEGA:.3f} MB up"),
    ]
    for member, figures in members.items():
        first, last = figures[0], figures[-1]
        spent = (last.seconds - first.seconds) / max(1, last.round - first.round)
        peak = max(each.peak for each in figures)
        lines.append(Line(f"{member}: processor, at most resident", f"{spent:.1f} s a round, {peak / _MEGA:.0f} MB"))
        lines.append(Line(f"{member}: logs and records", f"{last.logs / _MEGA:.2f} MB"))
    return lines


def table_of(lines: Sequence[Line]) -> Table:
    """Return the table."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("figure", "value", ""):
        table.add_column(head, overflow="fold")
    for line in lines:
        table.add_row(line.what, line.value, "" if line.ok is None else "PASS" if line.ok else "[red]FAIL[/]")
    return table


def write(
    folder: Path, lines: Sequence[Line], year: Mapping[str, Any], records: Sequence[Mapping[str, Any]], picture: bytes
) -> None:
    """Write ``soak.json`` and ``year.png``."""
    content = {**year, "lines": [line._asdict() for line in lines], "rounds": list(records)}
    write_text(folder / "soak.json", json.dumps(content, indent=1) + "\n")
    write_bytes(folder / "year.png", picture)


def draw(
    records: Sequence[Mapping[str, Any]],
    online: Sequence[int],
    happened: Sequence[Event],
    members: Mapping[str, Sequence[Figures]],
    weeks: Sequence[Week] = (),
) -> bytes:
    """Draw accuracy, alarms, members, events and figures over the rounds; a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(10, 8), layout="constrained")
    accuracy, nodes, memory, disk = figure.subplots(4, 1, sharex=True, height_ratios=(4, 1, 2, 2))
    numbers = [record["round"] for record in records]
    for week in weeks:
        accuracy.axvspan(week.before + 0.5, (week.back(records) or numbers[-1]) - 0.5, color="#d1495b", alpha=0.12)
    asked = [[value for value in record.get("prequential_accuracy", ()) if value is not None] for record in records]
    before = [mean(values) if values else None for values in asked]
    accuracy.plot(numbers, before, color="#9aa5b1", linewidth=0.8, label="before training, on new samples")
    accuracy.plot(numbers, [record["accuracy"] for record in records], color="#1b3a57", label="on test samples")
    for kind, mark, height in (("accuracy", "v", 1.05), ("gate", "x", 1.12)):
        raised = [alarm["round"] for alarm in alarms_of(records) if alarm["kind"] == kind]
        accuracy.plot(raised, [height] * len(raised), mark, color="#d1495b", markersize=5, label=f"alarm: {kind}")
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    accuracy.set(ylabel="accuracy", ylim=(0, 1.18))
    accuracy.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.12), frameon=False)
    for place, event in enumerate(happened):
        accuracy.axvline(event.round, color="#d1495b", linewidth=0.7, alpha=0.6)
        text = event.kind + (f" {event.node}" if event.node else "")
        height = 0.02 + 0.27 * (place % 3)
        accuracy.text(event.round, height, text, rotation=90, fontsize=7, va="bottom", ha="right", color="#d1495b")
    nodes.step(range(1, len(online) + 1), online, where="mid", color="#1b3a57")
    nodes.yaxis.set_major_locator(MaxNLocator(integer=True))
    nodes.set(ylabel="nodes", ylim=(0, max(online, default=0) + 1))
    for axes, name in ((memory, "memory"), (disk, "disk")):
        for member, figures in members.items():
            values = [getattr(each, name) / _MEGA for each in figures]
            axes.plot([each.round for each in figures], values, label=member, linewidth=1)
        axes.set(ylabel=f"{name}, MB", ylim=(0, None))
    memory.legend(fontsize=7, ncols=5)
    disk.set_xlabel("round")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()
