"""The state of a run as a page that loads nothing and asks the browser to read it again."""

import html
from datetime import timedelta

from fedkace_flwr.results import status as states
from fedkace_flwr.results.status import Column, Status

PAGE = "status.html"
"""Its name in the run's folder."""

_AGAIN = timedelta(seconds=30)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; --ink: #16202b; --dim: #5c6b7a; --line: #d9dee4; --paper: #fff; --card: #f4f6f8;
  --good: #1a7f4b; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ee; --dim: #94a3b3; --line: #323c47; --paper: #14191f; --card: #1d242c; --good: #5cc98d;
    --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { font: 1rem/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: auto;
  max-width: 100rem; padding: 1rem 1.5rem; }
h1 { font-size: 1.4rem; margin: 0 0 .8rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; }
dl { display: flex; flex-wrap: wrap; gap: .6rem; margin: 0; }
dl div { background: var(--card); border-radius: .4rem; padding: .4rem .9rem; max-width: 100%; overflow-wrap: anywhere; }
dt, footer { color: var(--dim); font-size: .85rem; } dd { margin: 0; }
ul { margin: 0; padding: 0; list-style: none; } .alarms { border-left: .25rem solid var(--bad); padding-left: .8rem; }
.alarms li { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--dim); font-weight: 500; vertical-align: bottom; white-space: normal; }
.word { text-align: left; } td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
.on { color: var(--good); } .off { color: var(--bad); }
footer { margin-top: 1.5rem; }
"""


def page(status: Status) -> str:
    """Return the page in HTML; names and texts in it come from other machines, and are text and nothing else."""
    facts = states.facts(status)
    title = html.escape(dict(facts)["run"])
    cards = "".join(f"<div><dt>{word}</dt><dd>{html.escape(value)}</dd></div>\n" for word, value in facts[1:])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta http-equiv="refresh" content="{_AGAIN.seconds}">\n<link rel="icon" href="data:,">\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n</head>\n<body>\n'
        f"<h1>{title}</h1>\n<dl>\n{cards}</dl>\n{_alarms(status)}{_members(status)}"
        f"<footer>As the server wrote it at {html.escape(states.moment(status.get('when')))}; the page is read again "
        f"every {_AGAIN.seconds} seconds. Days are those of UTC.</footer>\n</body>\n</html>\n"
    )


def _alarms(status: Status) -> str:
    lines = "".join(f"<li>{html.escape(line)}</li>\n" for line in states.alarms(status))
    return f"<h2>Last alarms</h2>\n<ul class=alarms>\n{lines}</ul>\n" if lines else ""


def _members(status: Status) -> str:
    columns, rows = states.table(status["members"])
    lines = [_row("th", [(_kind(column), column.title) for column in columns])]
    for cells in rows:
        pairs = zip(columns, cells, strict=True)
        lines.append(_row("td", [(_kind(column, cell), cell) for column, cell in pairs]))
    return f"<h2>Clients</h2>\n<div class=wide><table>\n{''.join(lines)}</table></div>\n"


def _kind(column: Column, cell: str = "") -> str:
    colour = {"": "", "removed": "", "online": " on"}.get(cell, " off") if column is states.SEEN else ""
    return f"word{colour}" if column.is_text else ""


def _row(tag: str, cells: list[tuple[str, str]]) -> str:
    parts = [f'<{tag} class="{kind}">{html.escape(text)}</{tag}>' for kind, text in cells]
    return f"<tr>{''.join(parts)}</tr>\n"
