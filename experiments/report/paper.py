"""The paper's numbers, Tables 1 to 4, from ``paper.yaml``."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fedkace_flwr.experiments.studies.names import TABLES

FILE = Path(__file__).with_name("paper.yaml")
CONDITION = "condition"  # the only metric of table3; the other tables have AA and AR
_ROWS: dict[str, dict[str, str]] = {
    "table1": {
        "fedavg": "FedAVG",
        "tfcl": "TFCL",
        "dcfcl": "DCFCL",
        "refed": "Re-Fed",
        "ofcl": "OFCL",
        "fedcbdr": "FedCBDR",
        "fedkace": "FedKACE",
        "centralized": "Centralized",
    },
    "table2": {
        **{f"as{number}": f"AS{number}" for number in range(1, 9)},
        "lkc": "LKC",
        "fedkace": "FKC",
        "centralized": "CTR",
    },
    "table3": {"as5": "FedKACE_AS5", "as6": "FedKACE_AS6", "fedkace": "FedKACE"},
    "table4": {"centralized": "Centralized"},
}


@dataclass(frozen=True)
class Paper:
    """The numbers as printed.

    Attributes
    ----------
    tables : mapping
        Numbers by table, row, column (``cifar100_O4``) and metric (``AA``, ``AR`` in percent; ``condition``).
    setting : mapping
        The paper's setting by configuration key.
    slips : tuple of mapping
        Printed numbers that contradict the paper's other numbers: table, row, column, metric, printed, derived.
    """

    tables: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]
    setting: Mapping[str, int]
    slips: tuple[Mapping[str, Any], ...]

    def value(self, table: str, row: str | None, column: str, metric: str) -> float | None:
        """Return one number, or None if the paper has no such cell."""
        return self.tables.get(table, {}).get(row or "", {}).get(column, {}).get(metric)


@cache
def load_paper() -> Paper:
    """Read ``paper.yaml``."""
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    tables = {name: content[name] for name in TABLES}
    tables["table3"] = {
        row: {column: {CONDITION: number} for column, number in columns.items()}
        for row, columns in content["table3"].items()
    }
    return Paper(tables, content["setting"], tuple(content["slips"]))


def paper_row(table: str, method: str, clients: int, capacity: int) -> str | None:
    """Return the row of a table that a run belongs to, or None if the table has no such row.

    Parameters
    ----------
    table : str
        One of the published tables.
    method : str
        The method's name in configurations.
    clients, capacity : int
        K and M, which name FedKACE's rows in table4.
    """
    if table == "table4" and method == "fedkace":
        return f"K{clients}_M{capacity}"
    return _ROWS.get(table, {}).get(method)
