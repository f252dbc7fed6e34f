"""Tables of single runs: a study's only run with all its measures, and runs that are not finished."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedkace_flwr.experiments.report.markup import Table
from fedkace_flwr.experiments.report.tables import CHANCE, DASH, ResultTable, number, place, signed
from fedkace_flwr.experiments.results.loading import Results, StudyInfo, rows_of

_MEANS = {
    "AA %": "accuracy",
    "local models %": "local_accuracy",
    "global model %": "global_accuracy",
    "chance %": "chance",
}
_TIMES = ["seconds_training", "seconds_selection", "seconds_evaluation"]


def only_run_table(results: Results, study: StudyInfo, tables: Sequence[ResultTable]) -> Table | None:
    """Put a study's only run into one table, with its measures as rows, and the paper's numbers if it has any.

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
    Table or None
        None if the study has several runs, or one that is not finished.
    """
    runs = rows_of(results.counted(study))
    if len(runs) != 1 or not runs[0]["finished"]:
        return None
    (run,) = runs
    line, column = place(study, run)
    rows: list[list[str]] = []
    for table in tables:
        if (cell := table.cells.get((line, column))) is not None:
            rows.append([table.title, number(cell.mean), number(cell.paper), signed(cell.difference)])
        if (chance := table.cells.get((CHANCE, column))) is not None:
            rows.append(["Accuracy of guessing among the classes met, %", number(chance.mean), DASH, DASH])
    if not pd.isna(run["switched"]):
        rows.append(["Rounds in which clients switched to the global model", _switches(results, run), DASH, DASH])
    hours = _rounds(results, run).reindex(columns=_TIMES).sum().sum() / 3600
    rows.append(["Time of training, selection and tests, summed over clients, hours", f"{hours:.1f}", DASH, DASH])
    shown = 4 if any(table.with_paper for table in tables) else 2
    head = ["measure", "here", "paper", "difference"][:shown]
    notes = list(dict.fromkeys(note for table in tables for note in table.notes))
    return Table(f"{line}, {column}, seed {run['seed']}", head, [row[:shown] for row in rows], notes)


def unfinished_table(results: Results, study: StudyInfo) -> Table | None:
    """Compare each unfinished run of a study with the runs of its column and seed that have come at least as far.

    Means are over the rounds of the unfinished run; those of the local models and of the global model are shown if a
    run tested both throughout. None if no run has been begun and not finished.
    """
    runs = [run for run in rows_of(results.counted(study)) if run["rounds_done"]]
    begun = sorted((run for run in runs if not run["finished"]), key=lambda run: -run["rounds_done"])
    rows = []
    for own in begun:
        done, where = own["rounds_done"], (place(study, own)[1], own["seed"])
        rows.append(_row(results, study, own, done, f"{done} of {own['rounds']}"))
        rows += [
            _row(results, study, other, done, f"first {done}")
            for other in runs
            if other is not own and other["rounds_done"] >= done and (place(study, other)[1], other["seed"]) == where
        ]
    if not rows:
        return None
    head = ["line", "setting", "seed", "rounds", *_MEANS, "latest round %"]
    notes = ["These runs are not finished: nothing is concluded from them."]
    return Table("Unfinished runs: means over their rounds so far", head, rows, notes, words=2)


def _row(results: Results, study: StudyInfo, run: Mapping[str, Any], done: int, label: str) -> list[str]:
    rounds = _rounds(results, run)
    rounds = rounds[rounds["round"] <= done]
    tested = ["accuracy", "chance", *(["local_accuracy", "global_accuracy"] if run["evaluate"] == "both" else [])]
    means = [_percent(rounds[key].mean(skipna=False)) if key in tested else DASH for key in _MEANS.values()]
    return [*place(study, run), str(run["seed"]), label, *means, _percent(rounds["accuracy"].iloc[-1])]


def _rounds(results: Results, run: Mapping[str, Any]) -> pd.DataFrame:
    every = results.rounds
    rounds: pd.DataFrame = every[(every["study"] == run["study"]) & (every["run"] == run["run"])]
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
    return DASH if pd.isna(value) else f"{100 * value:.2f}"
