"""Paired comparison of methods over seeds: runs with the same seed see the same stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import sem, wilcoxon
from scipy.stats import t as student

from fedkace_flwr.experiments.report.names import role
from fedkace_flwr.experiments.report.palette import ranked
from fedkace_flwr.experiments.report.tables import place
from fedkace_flwr.experiments.results.loading import Results, StudyInfo, rows_of

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The difference of AA between two lines in one column of a study, over the seeds that both have run.

    Attributes
    ----------
    study, column : str
        Where the lines stand.
    line, baseline : str
        What is compared with what.
    differences : sequence of float
        AA of the line minus that of the baseline in percentage points, by seed; at least two.
    low, high : float
        Bounds of the confidence interval of the mean.
    p : float
        P-value of Wilcoxon's signed-rank test, two-sided and exact; NaN if all differences are zero.
    """

    study: str
    column: str
    line: str
    baseline: str
    differences: Sequence[float]
    low: float
    high: float
    p: float

    @property
    def mean(self) -> float:
        """Mean of the differences."""
        return float(np.mean(self.differences))

    @property
    def smallest_p(self) -> float:
        """The smallest p-value that the test can give with this many seeds."""
        return 0.5 ** (len(self.differences) - 1)


def compare(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the confidence interval of a mean of paired differences, and the p-value of no difference.

    The 95 % interval is Student's t. Unlike a bootstrap, it keeps its coverage with two or three seeds, provided that
    the differences are roughly normal. The test is Wilcoxon's, which assumes only symmetry.

    Parameters
    ----------
    differences : sequence of float
        At least two.
    """
    values = np.asarray(differences, dtype=np.float64)
    p = float(wilcoxon(values, zero_method="zsplit", method="exact").pvalue) if values.any() else float("nan")
    middle, error = float(values.mean()), float(sem(values))
    reach = error * float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return middle - reach, middle + reach, p


def paired_differences(results: Results, study: StudyInfo, baseline: str = "") -> list[Difference]:
    """Compare each line of a study with one of them, in each column, over the seeds that both have finished.

    Lines with fewer than two common seeds are left out, and so is Centralized, which AR compares with.

    Parameters
    ----------
    results, study : Results, StudyInfo
        The runs and their study.
    baseline : str
        The line to compare with, such as ``FedFrame``; empty for the first one, which is FedKACE's where it takes part.
        Columns without it are left out.
    """
    frame = results.counted(study)
    known: dict[str, dict[str, dict[int, float]]] = {}
    methods: dict[str, str] = {}
    for run in rows_of(frame[frame["finished"]]):
        line, column = place(study, run)
        if role(run["method"]) != "reference" and not pd.isna(run["aa"]):
            methods[line] = run["method"]
            known.setdefault(column, {}).setdefault(line, {})[run["seed"]] = 100 * run["aa"]
    order = ranked(methods)
    found = []
    for column, lines in known.items():
        own = baseline or next(line for line in order if line in lines)
        common = {line: len(lines[line].keys() & lines.get(own, {}).keys()) for line in order if line in lines}
        found += [
            _difference(study.name, column, line, own, lines)
            for line, seeds in common.items()
            if line != own and seeds > 1
        ]
    return found


def difference_table(differences: Sequence[Difference]) -> tuple[str, list[str], list[list[str]], list[str], int]:
    """Return title, headings, rows and notes of a table of differences, as text, and how many columns hold words.

    The notes tell how to read it, and what so few seeds cannot show.
    """
    head = ["method", "setting", "compared with", "difference in AA", "95 % interval", "p", "seeds"]
    rows = [
        [
            each.line,
            each.column,
            each.baseline,
            f"{each.mean:+.2f}",
            f"{each.low:+.2f} to {each.high:+.2f}",
            "-" if np.isnan(each.p) else f"{each.p:.3f}",
            str(len(each.differences)),
        ]
        for each in differences
    ]
    if len({each.column for each in differences}) == 1:  # then there is no need to name it
        head, rows = [head[0], *head[2:]], [[row[0], *row[2:]] for row in rows]
    words = head.index("difference in AA")
    return "Differences in AA over the same seeds, % points", head, rows, _notes(differences), words


def _notes(differences: Sequence[Difference]) -> list[str]:
    told = [
        "Differences are paired by seed: runs with the same seed have the same stream. The interval is Student's t "
        "interval of the mean; p is that of Wilcoxon's signed-rank test (two-sided, exact)."
    ]
    fewest = min(len(each.differences) for each in differences)
    if (least := max(each.smallest_p for each in differences)) > 1 - CONFIDENCE:
        told.append(f"With {fewest} seeds, p is at least {least:.2g}; for p below 0.05 at least six seeds are needed.")
    return told


def difference_frame(differences: Sequence[Difference]) -> pd.DataFrame:
    """Return one row per difference."""
    columns = ["study", "column", "line", "baseline", "mean", "low", "high", "p", "n"]
    rows: list[Mapping[str, Any]] = [
        {
            **{name: getattr(each, name) for name in columns[:-1]},
            "n": len(each.differences),
        }
        for each in differences
    ]
    return pd.DataFrame(rows, columns=columns)


def _difference(
    study: str, column: str, line: str, baseline: str, lines: Mapping[str, Mapping[int, float]]
) -> Difference:
    seeds = sorted(lines[line].keys() & lines[baseline].keys())
    values = [lines[line][seed] - lines[baseline][seed] for seed in seeds]
    return Difference(study, column, line, baseline, values, *compare(values))
