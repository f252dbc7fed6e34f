"""Generate documentation from declarations: pages and tables in ``docs/``, and defaults in ``pyproject.toml``.

Run as ``python -m fedkace_flwr.config_docs`` (``make docs``).
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from fedkace_flwr.config import Config, all_keys, readers_of
from fedkace_flwr.keys import Scalar, default_of
from fedkace_flwr.messaging.metrics import Metric, known_metrics
from fedkace_flwr.registry import METHODS, Traffic

_ROOT = Path(__file__).resolve().parents[1]
_TABLE = re.compile(r"(?<=\[tool\.flwr\.app\.config\]\n).*?(?=\n\[|\n#|\Z)", re.DOTALL)
_BYTES = re.compile(r"\| method \| to a client \| from a client \|\n(?:\|.*\n)+")
_FIRST = (
    "method dataset data-dir clients rounds stream window overlap samples-per-class capacity epochs "
    "network width seed device"
)


def markdown() -> str:
    """Return the content of ``docs/configuration.md``."""
    keys = {name: (section, key) for section, name, key in all_keys(added=False)}
    groups: dict[str, list[str]] = {"The fifteen that matter to everybody": _FIRST.split()}
    for name, (section, _) in keys.items():
        if name not in _FIRST.split():
            groups.setdefault(str(section.__doc__).rstrip("."), []).append(name)
    lines = [
        "# Configuration",
        "",
        "Generated from the declarations of the keys by `make docs`; a test checks that this page is up to date.",
        "",
        "Set keys with `flwr run . --run-config 'overlap=0 seed=1'`, with a file of keys "
        "(`--run-config experiments/studies/cifar100.toml`), or in a study (`--set overlap=0`). "
        "[method.md](method.md) explains the keys marked *Reading*, which choose between readings of the paper. Numbers "
        "after a word may be left out: `dirichlet`, `dirichlet:0.3`, `dirichlet:0.3:0.2`.",
        "",
        "A run can be resumed with other values of the keys marked *living*, which its further rounds use, *waiting* (how "
        "long a run waits for clients) and *place* (where and how things are stored); with another value of any other key "
        "it is refused.",
    ]
    for title, names in groups.items():
        lines += ["", f"## {title}", "", "| key | default | range | meaning |", "|---|---|---|---|"]
        for name in names:
            section, key = keys[name]
            default = _literal(default_of(section, name.replace("-", "_")))
            span = " ".join(part for part in (key.range_text(), key.unit) if part)
            kind = "living" if key.living else key.affects
            mark = "" if kind == "numbers" else f" *({kind})*"
            lines.append(f"| `{name}` | `{default}` | {span} | {key.meaning}{mark} |")
    return "\n".join(lines) + "\n"


def described_keys(word: str) -> list[tuple[str, str, str, str]]:
    """Return name, default, values and meaning of each key that has the word in its name or meaning, as plain text."""
    found = []
    for section, name, key in all_keys():
        readers = sorted(readers_of(name))
        values = "; ".join(
            filter(None, [key.range_text().replace("`", ""), key.unit, f"of {', '.join(readers)}" if readers else ""])
        )
        meaning = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", key.meaning)
        if word.lower() in f"{name} {meaning}".lower():
            default = default_of(section, name.replace("-", "_"))
            found.append(
                (name, default if isinstance(default, str) and default else _literal(default), values, meaning)
            )
    return found


def metrics_page() -> str:
    """Return the content of ``docs/metrics.md``."""
    common = [metric for metric in known_metrics().values() if not _owner(metric)]
    lines = [
        "# Metrics",
        "",
        "Generated from the declarations of the metrics by `make docs`; a test checks that this page is up to date.",
        "",
        "A metric is a number, or a list of numbers, that a client reports to the server. A reply with a metric that "
        "is out of range is rejected. *Phase* is the reply that carries the metric: the reply to the `training` or "
        "the `evaluation` message, to `either` of them (the later value is used), or to a message of the method's own "
        "(`own`). *Record* is its field in `rounds.jsonl`, a list with one entry per client (`interpolated`: one "
        "value for all); times are summed over clients. *TensorBoard* is its tag, which is followed by the client's "
        "number. *Tables* is its column in `rounds.csv`, the mean over clients, or the median for condition numbers. "
        "[method.md](method.md) describes the other fields of a record, which the server computes.",
        "",
        "## In every record",
        "",
        *_metric_table(common),
    ]
    labels: dict[tuple[Metric, ...], list[str]] = {}
    for method in METHODS.values():
        if method.metrics:
            labels.setdefault(method.metrics, []).append(method.label)
    for metrics, names in labels.items():
        lines += ["", f"## {', '.join(names)}", "", *_metric_table(metrics)]
    return "\n".join(lines) + "\n"


def with_bytes(page: str) -> str:
    """Return the text of ``docs/methods.md`` with the table of bytes from the registry."""
    rows: dict[Traffic, list[str]] = {}
    for name, method in METHODS.items():
        if method.role != "ablation" and (not method.preset or method.traffic != Traffic()):
            rows.setdefault(method.traffic, []).append(f"`{name}`")
    table = ["| method | to a client | from a client |", "|---|---|---|"]
    table += [f"| {', '.join(names)} | `{bytes_.down}` | `{bytes_.up}` |" for bytes_, names in rows.items()]
    return _BYTES.sub(lambda _: "\n".join(table) + "\n", page, count=1)


def with_defaults(pyproject: str) -> str:
    """Return the text of ``pyproject.toml`` with the current defaults as Flower's app configuration."""
    table = "".join(f"{name} = {_literal(value)}\n" for name, value in Config().flat().items())
    return _TABLE.sub(lambda _: table, pyproject, count=1)


def _metric_table(metrics: Iterable[Metric]) -> list[str]:
    lines = [
        "| metric | phase | range | unit | record | TensorBoard | tables | meaning |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for metric in metrics:
        kind = ("whole, " if metric.whole else "") + metric.range_text()
        kind += f"; one per {'class' if metric.length == 'classes' else 'epoch'}" if metric.length else ""
        field = f"seconds.{metric.column}" if metric.is_timed else metric.column
        places = [f"`{name}`" if name else "" for name in (field, metric.tag, metric.average)]
        cells = [f"`{metric.name}`", metric.phase, kind, metric.unit, *places, metric.meaning]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _owner(metric: Metric) -> bool:
    return any(metric in method.metrics for method in METHODS.values())


def _literal(value: Scalar) -> str:
    """Return a value in TOML syntax."""
    return str(value) if isinstance(value, float) else json.dumps(value)


def main() -> None:
    """Update the generated files."""
    docs, project = _ROOT / "docs", _ROOT / "pyproject.toml"
    for path, text in (
        (docs / "configuration.md", markdown()),
        (docs / "metrics.md", metrics_page()),
        (docs / "methods.md", with_bytes((docs / "methods.md").read_text(encoding="utf-8"))),
        (project, with_defaults(project.read_text(encoding="utf-8"))),
    ):
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
