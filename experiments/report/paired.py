"""Paired comparison of methods over seeds; runs with the same seed see the same stream unless their lines differ in it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import sem, wilcoxon
from scipy.stats import t as student

from fedkace_flwr.experiments.report.markup import Table
from fedkace_flwr.experiments.report.names import role
from fedkace_flwr.experiments.report.tables import DASH, place, rows_in_order, signed
from fedkace_flwr.experiments.results.loading import Results, StudyInfo, rows_of
from fedkace_flwr.experiments.results.regret import same_stream

_CONFIDENCE = 0.95
_COLUMNS = ["study", "column", "line", "baseline", "mean", "low", "high", "p", "n", "same_stream"]


def compare(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the confidence interval of a mean of paired differences, and the p-value of no difference.

    The 95 % interval is Student's t. Unlike a bootstrap, it keeps its coverage with two or three seeds, provided that
    the differences are roughly normal. The test is Wilcoxon's signed-rank test, two-sided and exact, which assumes only
    symmetry; its p is NaN if all differences are zero.

    Parameters
    ----------
    differences : sequence of float
        At least two.
    """
    values = np.asarray(differences, dtype=np.float64)
    p = float(wilcoxon(values, zero_method="zsplit", method="exact").pvalue) if values.any() else float("nan")
    middle, error = float(values.mean()), float(sem(values))
    reach = error * float(student.ppf((1 + _CONFIDENCE) / 2, len(values) - 1))
    return middle - reach, middle + reach, p


def paired_differences(results: Results, study: StudyInfo, baseline: str = "") -> pd.DataFrame:
    """Compare each line of a study with one of them, in each column, over the seeds that both have finished.

    Lines with fewer than two common seeds are left out, and so is Centralized, which AR compares with.

    Parameters
    ----------
    results, study : Results, StudyInfo
        The runs and their study.
    baseline : str
        The line to compare with, such as ``FedFrame``; empty for the tables' first one, which is FedKACE's where it takes
        part. Columns without it are left out.

    Returns
    -------
    DataFrame
        A row per comparison: ``study``, ``column``, ``line``, ``baseline``, the ``mean`` of AA of the line minus that of
        the baseline in percentage points, its interval (``low``, ``high``), ``p``, the number ``n`` of seeds, and whether
        runs with the same seed had the same data and stream (``same_stream``).
    """
    runs = rows_of(results.counted(study))
    order = rows_in_order(study, runs)
    columns: dict[str, dict[str, dict[int, Any]]] = {}
    for run in runs:
        if run["finished"] and role(run["method"]) != "reference" and not pd.isna(run["aa"]):
            line, column = place(study, run)
            columns.setdefault(column, {}).setdefault(line, {})[run["seed"]] = run
    found = []
    for column, lines in columns.items():
        own = baseline or next(line for line in order if line in lines)
        for line in order if own in lines else ():
            pairs = [(lines[line][seed], lines[own][seed]) for seed in sorted(lines.get(line, {}).keys() & lines[own])]
            if line != own and len(pairs) > 1:
                values = [100 * one["aa"] - 100 * other["aa"] for one, other in pairs]
                same = all(same_stream(*((results.sources[run["folder"]], run) for run in pair)) for pair in pairs)
                found.append(
                    [study.name, column, line, own, float(np.mean(values)), *compare(values), len(values), same]
                )
    return pd.DataFrame(found, columns=_COLUMNS)


def difference_table(differences: pd.DataFrame) -> Table:
    """Return paired differences, at least one, as text, with notes on how to read them."""
    head = ["method", "setting", "compared with", "difference in AA", "95 % interval", "p", "seeds"]
    rows = [
        [
            *(row["line"], row["column"], row["baseline"], signed(row["mean"])),
            f"{row['low']:+.2f} to {row['high']:+.2f}",
            DASH if pd.isna(row["p"]) else f"{row['p']:.3f}",
            str(row["n"]),
        ]
        for row in rows_of(differences)
    ]
    if differences["column"].nunique() == 1:  # then there is no need to name it
        head, rows = [head[0], *head[2:]], [[row[0], *row[2:]] for row in rows]
    streams = "have the same stream" if differences["same_stream"].all() else "do not all have the same stream"
    notes = [
        f"Differences are paired by seed: runs with the same seed {streams}. The interval is Student's t "
        "interval of the mean; p is that of Wilcoxon's signed-rank test (two-sided, exact)."
    ]
    fewest = differences["n"].min()
    if (least := 0.5 ** (fewest - 1)) > 1 - _CONFIDENCE:
        notes.append(f"With {fewest} seeds, p is at least {least:.2g}; for p below 0.05 at least six seeds are needed.")
    return Table(
        "Differences in AA over the same seeds, % points", head, rows, notes, words=head.index("difference in AA")
    )
