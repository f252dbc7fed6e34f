"""Tables of single runs: a study's only run with all its measures, and runs that are not finished.

An unfinished run has its means over the rounds so far, beside the other runs' over the same rounds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedkace_flwr.experiments.report.tables import CHANCE, ResultTable, number, place
from fedkace_flwr.experiments.results.loading import Results, StudyInfo, rows_of

_DASH = "-"
_MEANS = {
    "AA %": "accuracy",
    "local models %": "local_accuracy",
    "global model %": "global_accuracy",
    "chance %": "chance",
}
_TIMES = ("seconds_training", "seconds_selection", "seconds_evaluation")

Table = tuple[str, list[str], list[list[str]], list[str], int]
"""Title, headings, rows and notes as text, and how many columns hold words."""


def only_run_table(results: Results, study: StudyInfo, tables: Sequence[ResultTable]) -> Table | None:
    """Put a study's only run into one table, with its measures as rows.

    Parameters
    ----------
    results : Results
        The runs.
    study : StudyInfo
        The study.
    tables : sequence of ResultTable
        The study's tables, which have one line each.

    Returns
    -------
    The table, with the paper's numbers if it has any; None if the study has several runs, or one that is not finished.
    """
    runs = rows_of(results.counted(study))
    if len(runs) != 1 or not runs[0]["finished"]:
        return None
    (run,) = runs
    line, column = place(study, run)
    rows: list[list[str]] = []
    for table in tables:
        cell = table.cells.get((line, column))
        if cell is not None:
            difference = _DASH if cell.difference is None else f"{cell.difference:+.2f}"
            rows.append([table.title, number(cell.mean), number(cell.paper), difference])
        if (chance := table.cells.get((CHANCE, column))) is not None:
            rows.append(["Accuracy of guessing among the classes met, %", number(chance.mean), _DASH, _DASH])
    if not pd.isna(run["switched"]):
        rows.append(["Rounds in which clients switched to the global model", _switches(results, run), _DASH, _DASH])
    rounds = _rounds(results, study, run)
    hours = sum(rounds[name].sum() for name in _TIMES if name in rounds) / 3600
    rows.append(["Time of training, selection and tests, summed over clients, hours", f"{hours:.1f}", _DASH, _DASH])
    notes = list(dict.fromkeys(note for table in tables for note in table.notes))
    shown = 4 if any(table.with_paper for table in tables) else 2
    head = ["measure", "here", "paper", "difference"]
    return f"{line}, {column}, seed {run['seed']}", head[:shown], [row[:shown] for row in rows], notes, 1


def unfinished_table(results: Results, study: StudyInfo) -> Table | None:
    """Compare each unfinished run of a study with the runs of its column and seed that have come at least as far.

    The means of a run's local models and of its global model are shown if the run tested both throughout.

    Returns
    -------
    The table, or None if no run has been begun and not finished.
    """
    runs = [run for run in rows_of(results.counted(study)) if run["rounds_done"]]
    begun = sorted((run for run in runs if not run["finished"]), key=lambda run: -run["rounds_done"])
    rows = []
    for own in begun:
        done, column = own["rounds_done"], place(study, own)[1]
        rows.append(_row(results, study, own, done, f"{done} of {own['rounds']}"))
        for other in runs:
            alike = place(study, other)[1] == column and other["seed"] == own["seed"]
            if alike and other is not own and other["rounds_done"] >= done:
                rows.append(_row(results, study, other, done, f"first {done}"))
    if not rows:
        return None
    head = ["line", "setting", "seed", "rounds", *_MEANS, "latest round %"]
    notes = ["These runs are not finished: nothing is concluded from them."]
    return "Unfinished runs: means over their rounds so far", head, rows, notes, 2


def _row(results: Results, study: StudyInfo, run: Mapping[str, Any], done: int, label: str) -> list[str]:
    rounds = _rounds(results, study, run)
    rounds = rounds[rounds["round"] <= done]
    tested = ["accuracy", "chance", *(["local_accuracy", "global_accuracy"] if run["evaluate"] == "both" else [])]
    means = [_percent(rounds[key].mean(skipna=False)) if key in tested else _DASH for key in _MEANS.values()]
    line, column = place(study, run)
    return [line, column, str(run["seed"]), label, *means, _percent(rounds["accuracy"].iloc[-1])]


def _rounds(results: Results, study: StudyInfo, run: Mapping[str, Any]) -> pd.DataFrame:
    every = results.rounds
    rounds: pd.DataFrame = every[(every["study"] == study.name) & (every["run"] == run["run"])]
    return rounds


def _switches(results: Results, run: Mapping[str, Any]) -> str:
    """Name the first and the last round of a switch, and how many clients never switched."""
    clients = results.records(run["folder"])[-1]["switched_at"]
    switched = sorted(at for at in clients if at is not None)
    if not switched:
        return "none"
    span = f"{switched[0]} to {switched[-1]}" if switched[0] < switched[-1] else str(switched[0])
    return span if len(switched) == len(clients) else f"{span} ({len(switched)} of {len(clients)} clients)"


def _percent(value: float) -> str:
    return _DASH if pd.isna(value) else f"{100 * value:.2f}"
