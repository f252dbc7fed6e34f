"""The paper's numbers, Tables 1 to 4, from ``paper.yaml``."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fedkace_flwr.experiments.report.names import method_name

CONDITION = "condition"  # the only metric of table3; the other tables have AA and AR


@cache
def paper() -> Mapping[str, Any]:
    """Return the content of ``paper.yaml``.

    ``table1`` to ``table4`` hold numbers by row, column (``cifar100_O4``) and metric (``AA`` and ``AR`` in percent, or
    ``condition``); ``setting`` the paper's configuration keys; ``slips`` printed numbers that contradict other ones:
    table, row, column, metric, printed, derived.
    """
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8"))
    content["table3"] = {
        row: {column: {CONDITION: number} for column, number in columns.items()}
        for row, columns in content["table3"].items()
    }
    return content


def printed(table: str, row: str, column: str, metric: str) -> float | None:
    """Return one number, or None if the paper has no such cell."""
    number: float | None = paper()[table].get(row, {}).get(column, {}).get(metric)
    return number


def paper_row(table: str, run: Mapping[str, Any]) -> str:
    """Return the name of the row of a table that a run belongs to, if the table has it; K and M name those of table4."""
    if table == "table4" and run["method"] == "fedkace":
        return f"K{run['clients']}_M{run['capacity']}"
    return method_name(run["method"])
