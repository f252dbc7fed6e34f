"""Accuracy of the honest clients of the study ``poisoning``, by attack and aggregation, as Markdown and CSV."""

import io
import math
from pathlib import Path
from statistics import fmean

import pandas as pd

from fedkace_flwr.errors import ResultsError
from fedkace_flwr.experiments.results.averages import mean
from fedkace_flwr.experiments.results.loading import load_results, rows_of
from fedkace_flwr.storage.files import LARGEST_LOG, read_text

AXES = ["federation", "aggregation", "attack"]
COLUMNS = [*AXES, "seed", "aa", "final"]
NO_ATTACK = "none"

_RUN = [*AXES, "seed"]
_DIGITS = 4
_ROUNDING = 2 * 10**-_DIGITS
_LARGEST = "largest loss"


def honest_accuracies(*sources: Path) -> pd.DataFrame:
    """Return the accuracy of the honest clients in each finished run, in percent.

    The columns are :data:`COLUMNS`: the place of the run in the study, its seed, the accuracy averaged over the rounds,
    and that of the last round. The clients that are hostile under attack do not count in runs without one either.

    Parameters
    ----------
    sources : Path
        Each the results folder of the study, or a CSV file with these columns, as ``--output`` writes it. A run may be
        in several of them, for example if a study was continued on another machine.

    Raises
    ------
    ResultsError
        A source is neither, no run is finished, or two sources disagree on a run.
    """
    found: list[pd.DataFrame] = []
    for source in sources:
        found.append(_read(source) if source.is_file() else _computed(source))
        if found[-1].empty:
            raise ResultsError(f"{source}: no run of the study is finished")
        spans = pd.concat(found).groupby(_RUN)[["aa", "final"]].agg(["min", "max"])
        for name in ("aa", "final"):
            odd = spans[spans[name]["max"] - spans[name]["min"] > _ROUNDING]
            if not odd.empty:
                low, high = odd[name].iloc[0]
                raise ResultsError(
                    f"{source}: {' '.join(map(str, odd.index[0]))}: {name} = {high:g} and {low:g} in this and an earlier "
                    "source; give only one of them"
                )
    return pd.concat(found).drop_duplicates(_RUN).sort_values(_RUN, ignore_index=True)


def robustness_tables(runs: pd.DataFrame) -> str:
    """Return a table for each federation: attacks by aggregation rules.

    A cell holds the average accuracy in percent as mean over seeds, and in parentheses the mean difference from the
    runs with the same seed and rule without an attack, with its standard deviation where there are several seeds.

    Parameters
    ----------
    runs : DataFrame
        From :func:`honest_accuracies`.
    """
    return "\n\n".join(_table(str(name), part) for name, part in runs.groupby("federation"))


def _computed(folder: Path) -> pd.DataFrame:
    results = load_results(folder)
    if not {f"axis.{axis}" for axis in AXES} <= set(results.runs.columns):
        raise ResultsError(f"{folder}: has no runs of the study poisoning; must be its results folder, or a CSV file")
    (study,) = results.studies
    lines = []
    runs = results.counted(study)
    others = [axis for axis in study.axes if axis not in _RUN and runs[f"axis.{axis}"].nunique() > 1]
    if others:
        raise ResultsError(f"{folder}: its runs also differ in {', '.join(others)}; move those with other values away")
    for row in rows_of(runs[runs["finished"]]):
        honest = range(row["clients"] - row["hostile-clients"])
        records = results.records(row["folder"])
        each = [mean(record["client_accuracy"][client] for client in honest) for record in records]
        known = [100 * value for value in each if value is not None]
        if not known:
            raise ResultsError(f"{row['folder']}: no round has an accuracy of an honest client; must have one to count")
        lines.append([*(str(row[f"axis.{axis}"]) for axis in AXES), row["seed"], fmean(known), known[-1]])
    return pd.DataFrame(lines, columns=COLUMNS).round(_DIGITS)


def _read(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_csv(io.StringIO(read_text(path, LARGEST_LOG)), keep_default_na=False)
        frame = frame.astype({**dict.fromkeys(AXES, str), "seed": int, "aa": float, "final": float})
    except (ValueError, KeyError) as error:
        raise ResultsError(
            f"{path}: is not a table of the study poisoning ({error}); write one with --output"
        ) from error
    return frame[COLUMNS]


def _table(federation: str, runs: pd.DataFrame) -> str:
    free = runs[runs["attack"] == NO_ATTACK].rename(columns={"aa": "free"})
    runs = runs.merge(free[["aggregation", "seed", "free"]], how="left", on=["aggregation", "seed"])
    runs["change"] = runs["aa"] - runs["free"]
    cells = runs.groupby(["attack", "aggregation"]).agg(
        aa=("aa", "mean"), change=("change", "mean"), spread=("change", "std")
    )
    texts = {where: _cell(str(where[0]), *values) for where, values in zip(cells.index, cells.to_numpy(), strict=True)}
    columns, attacks = (
        sorted(set(runs["aggregation"]), key=_place),
        sorted(set(runs["attack"]), key=lambda name: (name != NO_ATTACK, name)),
    )
    lines = [[attack, *(texts.get((attack, column), "") for column in columns)] for attack in attacks]
    worst = cells["change"].drop(NO_ATTACK, errors="ignore").groupby("aggregation").min()
    lines.append([_LARGEST, *(f"{worst[name]:+.1f}" if name in worst else "" for name in columns)])
    rows = [f"| {' | '.join(line)} |" for line in [[federation, *columns], *lines]]
    rows.insert(1, "|---" + "|---:" * len(columns) + "|")
    return "\n".join(rows)


def _place(aggregation: str) -> tuple[bool, bool, str]:
    """The plain mean first, with the defence and without; as they are called, and as earlier versions called them."""
    return aggregation not in ("defence", "default"), aggregation not in ("undefended", "unchecked"), aggregation


def _cell(attack: str, aa: float, change: float, spread: float) -> str:
    if attack == NO_ATTACK or math.isnan(change):
        return f"{aa:.1f}"
    return f"{aa:.1f} ({change:+.1f}{'' if math.isnan(spread) else f' ± {spread:.1f}'})"
