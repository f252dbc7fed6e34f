"""Runs that are not finished: their means over the rounds so far, beside the other runs' over the same rounds."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from experiments.report.tables import place
from experiments.results.loading import Results, StudyInfo, rows_of

_DASH = "-"
_MEANS = {
    "AA %": "accuracy",
    "local models %": "local_accuracy",
    "global model %": "global_accuracy",
    "chance %": "chance",
}

Table = tuple[str, list[str], list[list[str]], list[str], int]
"""Title, headings, rows and notes as text, and how many columns hold words."""


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
    every = results.rounds
    rounds = every[(every["study"] == study.name) & (every["run"] == run["run"]) & (every["round"] <= done)]
    tested = ["accuracy", "chance", *(["local_accuracy", "global_accuracy"] if run["evaluate"] == "both" else [])]
    means = [_percent(rounds[key].mean(skipna=False)) if key in tested else _DASH for key in _MEANS.values()]
    line, column = place(study, run)
    return [line, column, str(run["seed"]), label, *means, _percent(rounds["accuracy"].iloc[-1])]


def _percent(value: float) -> str:
    return _DASH if pd.isna(value) else f"{100 * value:.2f}"
