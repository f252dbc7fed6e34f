"""Which figures of a year pass."""

import json
from pathlib import Path

import numpy as np

from fedkace_flwr.experiments.soak import verdict
from fedkace_flwr.experiments.soak.ledger import Ledger
from fedkace_flwr.experiments.soak.measures import Figures
from fedkace_flwr.experiments.soak.plan import Event

RECORD = {"accuracy": 0.5, "bytes": {"down": 2_000_000, "up": 1_000_000}}


def failing(lines: list[verdict.Line]) -> list[str]:
    return [line.what for line in lines if line.ok is False]


def figures(growth: float) -> list[Figures]:
    """The disk grows by so much of its first size in the whole time."""
    return [
        Figures(number, files=10, disk=int(1000 * (1 + growth * number / 100)), memory=10**8, descriptors=20)
        for number in range(1, 101)
    ]


def test_what_grows_by_more_than_a_tenth_after_a_quarter_fails() -> None:
    assert failing(verdict.growth({"hub": figures(0.12), "node-1": figures(0.2)})) == ["node-1: disk"]


def test_a_year_without_one_of_its_events_or_rounds_fails() -> None:
    plan = [Event(3, "upgrade"), Event(4, "kill-all")]
    records = [{**RECORD, "round": number} for number in range(1, 16)]
    assert failing(verdict.course(15, records, plan, plan)) == []
    assert failing(verdict.course(16, records, plan, plan[:1])) == ["rounds", "events"]


def test_what_nobody_has_learned_fails_and_all_is_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.drop("node-1", np.zeros((1, 8, 8), np.uint8), ["a"])
    lines = verdict.learning(ledger)
    assert failing(lines) == ["learned exactly once", "not learned"]
    records = [{**RECORD, "round": 1}, {**RECORD, "round": 2, "accuracy": None}]
    members = {"hub": figures(0)}
    lines += verdict.costs(members, records, 60.0)
    assert "2.000 MB down" in next(line.value for line in lines if line.what.startswith("sent"))
    picture = verdict.draw(records, [3, 3], [Event(1, "absence", 2)], members)
    verdict.write(tmp_path, lines, {"seed": 0}, records, picture)
    assert (tmp_path / "year.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "soak.json").read_text())["lines"][0]["value"] == "1"
