"""Which figures of a year pass."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.experiments.soak import verdict
from fedkace_flwr.experiments.soak.ledger import Ledger
from fedkace_flwr.experiments.soak.measures import Figures
from fedkace_flwr.experiments.soak.plan import Event

RECORD = {"accuracy": 0.5, "bytes": {"down": 2_000_000, "up": 1_000_000}}
WEEK = verdict.Week(10, ["node-1", "node-2"])
RAISED = (
    {"round": 12, "kind": "gate", "client": None, "text": "held"},
    {"round": 13, "kind": "accuracy", "client": 0, "text": "fell"},
)
FALSE = {**RAISED[1], "round": 40}


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


def a_week(*, after: float = 0.9, back: int = 17, raised: Sequence[Mapping[str, Any]] = RAISED) -> list[str]:
    """What fails of a year of 60 rounds in which the labels of node-1 were wrong from round 11 on."""
    records: list[dict[str, Any]] = [
        {"round": number, "accuracy": after if number >= back else 0.92, "prequential_accuracy": [0.9, None]}
        for number in range(1, 61)
    ]
    records[back - 1]["rolled_back_to"] = 10
    for alarm in raised:
        records[alarm["round"] - 1].setdefault("alarms", []).append(alarm)
    return failing(verdict.watching(records, [WEEK], [*RAISED, FALSE]))


def test_a_week_of_wrong_labels_must_be_seen_and_do_no_harm() -> None:
    name = "wrong labels after round 10"
    assert a_week() == []
    assert a_week(after=0.8) == [f"{name}: accuracy"]
    assert a_week(raised=RAISED[:1]) == [f"{name}: alarms"]
    assert a_week(raised=RAISED[1:]) == [f"{name}: held"]
    unheard = {"round": 13, "kind": "accuracy", "client": 2, "text": "to nobody"}
    assert a_week(raised=[*RAISED, unheard]) == ["alarms without on-alarm"]
    assert a_week(raised=[*RAISED, FALSE]) == ["alarms in quiet rounds"]


def test_what_nobody_has_learned_fails_and_all_is_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.drop("node-1", np.zeros((1, 8, 8), np.uint8), ["a"])
    images = np.arange(1, 4, dtype=np.uint8).repeat(64).reshape(3, 8, 8)
    late, dropped, _ = ledger.drop("node-1", images, ["a", "", ""], "unlabelled")
    ledger.label({late: "a"}, as_list=True)
    done = tmp_path / "node-1" / "inbox" / "done" / "unlabelled"
    done.mkdir(parents=True)
    next(tmp_path.rglob(dropped)).rename(done / dropped)
    ledger.count("node-1")
    lines = verdict.learning(ledger, 1)
    assert failing(lines) == ["learned exactly once", "not learned"]
    assert failing(verdict.learning(ledger, 2))[2:] == ["never labelled"], "the hub has counted one too many"
    records = [{**RECORD, "round": 1}, {**RECORD, "round": 2, "accuracy": None}]
    members = {"hub": figures(0)}
    lines += verdict.costs(members, records, 60.0)
    assert "2.000 MB down" in next(line.value for line in lines if line.what.startswith("sent"))
    picture = verdict.draw(records, [3, 3], [Event(1, "absence", 2)], members, [WEEK])
    verdict.write(tmp_path, lines, {"seed": 0}, records, picture)
    assert (tmp_path / "year.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "soak.json").read_text())["lines"][0]["value"] == "2"
