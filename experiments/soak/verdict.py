"""What a year has shown: a table of all figures, PASS or FAIL for each, a JSON file of them, and a picture."""

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from fedkace_flwr.experiments.soak.ledger import Ledger
from fedkace_flwr.experiments.soak.measures import COMPARED, MOST_GROWTH, Figures, quarter_and_end
from fedkace_flwr.experiments.soak.plan import Event
from fedkace_flwr.storage.files import write_bytes, write_text

_SHOWN_FAULTS = 5
_SETTLED = 50  # rounds; in fewer, buffers and caches are still being filled at a quarter
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


def learning(ledger: Ledger) -> list[Line]:
    """Return lines on samples and memories."""
    totals = ledger.totals()
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
        *(Line(f"{node}: buffer", memory, True) for node, memory in memories.items()),
        *faults,
    ]


def growth(members: Mapping[str, Sequence[Figures]]) -> list[Line]:
    """Return lines that compare the end with a quarter of each member's time; in less than 50 rounds nothing is asked."""
    lines = []
    for member, figures in members.items():
        for name in COMPARED:
            unit, form = _UNITS[name]
            quarter, end = quarter_and_end(figures, name)
            ratio = end / quarter if quarter else float("inf")
            value = f"{form.format(quarter / unit)} -> {form.format(end / unit)}, x {ratio:.2f}"
            lines.append(Line(f"{member}: {name}", value, ratio <= MOST_GROWTH if len(figures) >= _SETTLED else None))
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
) -> bytes:
    """Draw accuracy, members, events and figures over the rounds; a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(10, 8), layout="constrained")
    accuracy, nodes, memory, disk = figure.subplots(4, 1, sharex=True, height_ratios=(4, 1, 2, 2))
    numbers = [record["round"] for record in records]
    accuracy.plot(numbers, [record["accuracy"] for record in records], color="#1b3a57")
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    accuracy.set(ylabel="accuracy", ylim=(0, 1))
    texts = Counter[int]()
    for event in happened:
        accuracy.axvline(event.round, color="#d1495b", linewidth=0.7, alpha=0.6)
        text = event.kind + (f" {event.node}" if event.node else "")
        height = 0.02 + 0.25 * texts[event.round]
        texts[event.round] += 1
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
