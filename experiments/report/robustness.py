"""Accuracy of the honest clients of the study ``poisoning``, by attack and aggregation, as Markdown."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from experiments.results.averages import mean
from experiments.results.loading import load_results, rows_of
from experiments.results.reading import Record
from fedkace_flwr.errors import ResultsError

_AXES = ("axis.federation", "axis.aggregation", "axis.attack")


def robustness_tables(folder: Path) -> str:
    """Return a table for each federation: attacks by aggregation rules.

    A cell holds the average accuracy over all rounds and the accuracy of the last round, in percent, as means over
    seeds, with the first one's standard deviation where there are several. Hostile clients count in none, and the same
    clients count in the rows without an attack.

    Parameters
    ----------
    folder : Path
        Results folder of the study; unfinished runs are left out.

    Raises
    ------
    ResultsError
        The folder is not one of this study, or no run is finished.
    """
    results = load_results(folder)
    if not set(_AXES) <= set(results.runs.columns):
        raise ResultsError(f"{folder}: has no runs of the study poisoning; must be its results folder")
    cells: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for row in rows_of(results.runs[results.runs["finished"]]):
        federation, aggregation, attack = (str(row[axis]) for axis in _AXES)
        honest = range(row["clients"] - row["hostile-clients"])
        place = cells.setdefault(federation, {}).setdefault(attack, {})
        place.setdefault(aggregation, []).append(_accuracies(results.records(row["folder"]), honest))
    if not cells:
        raise ResultsError(f"{folder}: no run of the study is finished")
    return "\n\n".join(_table(federation, rows) for federation, rows in sorted(cells.items()))


def _accuracies(records: Sequence[Record], clients: range) -> tuple[float, float]:
    each = [mean(record["client_accuracy"][client] for client in clients) for record in records]
    known = [value for value in each if value is not None]
    return 100 * fmean(known), 100 * known[-1]


def _table(federation: str, rows: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"| {federation} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for attack, row in rows.items():
        lines.append(f"| {attack} | {' | '.join(_cell(row.get(column, [])) for column in columns)} |")
    return "\n".join(lines)


def _cell(values: Sequence[tuple[float, float]]) -> str:
    if not values:
        return ""
    averages, finals = [average for average, _ in values], [final for _, final in values]
    spread = f" ± {stdev(averages):.1f}" if len(values) > 1 else ""
    return f"{fmean(averages):.1f}{spread} / {fmean(finals):.1f}"
