"""Finished and unfinished runs as tables: one row per run, and one row per run and round.

A study is described by its ``study.json``; without a description, its axes are the configuration keys in which its runs
differ.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

import pandas as pd

from fedkace_flwr.errors import ResultsError
from fedkace_flwr.experiments.results.averages import (
    average_over_clients,
    condition_numbers,
    mean,
    of_both_models,
    switched,
)
from fedkace_flwr.experiments.results.axes import axes_of, variant_axes
from fedkace_flwr.experiments.results.folders import check_folders, studies_in
from fedkace_flwr.experiments.results.reading import SCHEMA, Record
from fedkace_flwr.experiments.results.recorded import Recorded, Run
from fedkace_flwr.experiments.results.regret import References, regret, regrets
from fedkace_flwr.messaging.metrics import COMMON, known_metrics
from fedkace_flwr.registry import METHODS
from fedkace_flwr.results.record import defence_note, defended, totals
from fedkace_flwr.storage.files import write_bytes, write_text
from fedkace_flwr.storage.folders import make_folder

_CONDITIONS = ("condition", "condition_singular", "class_condition", "class_condition_singular")
_TRANSFER = ("forgetting", "backward_transfer", "forward_transfer")
_BOTH = ("aa_local", "aa_global", "aa_unmasked", "aa_local_unmasked", "aa_global_unmasked")
_RUN_NUMBERS = ("aa", "early", "late", "ar", "final", *_BOTH, "chance", *_TRANSFER, *_CONDITIONS, "switched")


@dataclass(frozen=True)
class StudyInfo:
    """Description of a results folder.

    Attributes
    ----------
    name, title : str
        From ``study.json``, or else the folder's name.
    folder : Path
        The folder's path.
    paper : str or None
        The table of the paper that it reproduces.
    scale : str or None
        Its size, as named in ``study.json``.
    axes : tuple of str
        The keys in which its runs differ; ``seed`` is last.
    labels : mapping
        Maps the folder name of each listed run to its values on the axes.
    note : str
        What its author says about its results; may be empty.
    remarks : tuple of str
        What the reader must know of how the runs were put together.
    repeats : frozenset of str
        Runs with the configuration and the seed of another listed run, which means must not count twice.
    """

    name: str
    title: str
    folder: Path
    paper: str | None
    scale: str | None
    axes: tuple[str, ...]
    labels: Mapping[str, Mapping[str, Any]]
    note: str = ""
    remarks: tuple[str, ...] = ()
    repeats: frozenset[str] = frozenset()

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """The axes that name variants of methods."""
        return variant_axes(self.labels.values())

    @cached_property
    def methods(self) -> frozenset[str]:
        """The methods of its runs; none if the method is not an axis."""
        return frozenset(str(values["method"]) for values in self.labels.values() if "method" in values)


@dataclass(frozen=True)
class Results:
    """Runs of one or more studies.

    Attributes
    ----------
    studies : tuple of StudyInfo
        In the requested order.
    runs : DataFrame
        One row per run: ``schema``, ``study``, ``run``, ``folder``, ``finished`` (with all rounds), ``rounds_done``; shares ``aa``,
        ``early`` and ``late`` (mean accuracy over the first quarter and the second half of the rounds), ``final``,
        ``aa_local`` and ``aa_global`` (of local models and of the global one, if the run tested both), ``aa_unmasked``,
        ``aa_local_unmasked`` and ``aa_global_unmasked`` (the same with all classes as possible answers), ``ar``,
        ``chance``, ``forgetting``, ``backward_transfer``, ``forward_transfer``; ``condition``, ``class_condition``
        (medians over clients and the final three quarters of the rounds) and the shares ``condition_singular`` and
        ``class_condition_singular``; ``switched`` (missing if the method has no switch), ``failures``, updates ``rejected`` and
        ``clipped`` by the defence, bytes, seconds;
        ``axis.*``, every configuration key, ``env.*``. For an unfinished run, the numbers cover the rounds so far, and
        ``ar`` is missing.
    rounds : DataFrame
        One row per run and round: means over clients of the recorded values, and ``regret``.
    sources : mapping
        The run of each row, by its ``folder``.
    """

    studies: tuple[StudyInfo, ...]
    runs: pd.DataFrame
    rounds: pd.DataFrame
    sources: Mapping[str, Run] = field(repr=False)

    def counted(self, study: StudyInfo) -> pd.DataFrame:
        """Return the runs of a study, those with the same configuration and seed once."""
        return self.runs[(self.runs["study"] == study.name) & ~self.runs["run"].isin(study.repeats)]

    def records(self, folder: str) -> list[Record]:
        """Return the full records of a run, given the ``folder`` of its row."""
        return self.sources[folder].rounds()

    def write(self, target: Path, seen_from: Path | None = None) -> list[Path]:
        """Write ``runs`` and ``rounds`` as CSV and Parquet, and return the paths.

        The runs' folders are relative to ``seen_from``, by default ``target``.
        """
        make_folder(target)
        paths = []
        place = [os.path.relpath(folder, (seen_from or target).resolve()) for folder in self.runs["folder"]]
        for name, frame in (("runs", self.runs.assign(folder=place)), ("rounds", self.rounds)):
            write_text(target / f"{name}.csv", frame.to_csv(index=False))
            write_bytes(target / f"{name}.parquet", _uniform(frame).to_parquet(None, index=False))
            paths += [target / f"{name}.csv", target / f"{name}.parquet"]
        return paths


def load_results(*folders: Path) -> Results:
    """Read results folders.

    Parameters
    ----------
    *folders : Path
        Folders of studies, kept or not, or of single runs.

    Raises
    ------
    ResultsError
        A folder has no run, a file is damaged, or a file was written by a newer version.
    """
    rows: list[Record] = []
    rounds: list[Record] = []
    check_folders(folders)
    loaded = [_load_study(folder) for folder in dict.fromkeys(path.resolve() for path in folders)]
    studies = _told_apart([study for study, _ in loaded])
    sources = {}
    for study, (_, runs) in zip(studies, loaded, strict=True):
        for run, config in runs:
            row, lines = _load_run(study, run, config)
            rows.append(row)
            rounds += lines
            sources[row["folder"]] = run
    studies = tuple(
        _with_remarks(study, [row for row in rows if row["study"] == study.name], sources) for study in studies
    )
    _add_regret(rows, rounds, sources)
    averaged = [metric.average for metric in known_metrics().values() if metric.average]
    numbers = ("accuracy", "regret", "chance", "client_drift", "switched", *averaged)
    return Results(studies, _frame(rows, _RUN_NUMBERS), _frame(rounds, numbers), sources)


def rows_of(frame: pd.DataFrame) -> list[Record]:
    """Return the rows of a table as mappings."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def _load_study(folder: Path) -> tuple[StudyInfo, list[tuple[Run, Record]]]:
    recorded = Recorded(folder)
    told = recorded.told
    runs = [run for run in recorded.runs if told is None or run.name in told["runs"]]
    left_out = ", ".join(run.name for run in recorded.runs if run not in runs)
    for run in recorded.runs:
        if not run.name.isprintable():
            raise ResultsError(f"{folder}: has a run named {run.name!r}; give the folder a name of printable letters")
    if not runs:
        studies = [path.name for path in studies_in(folder)]
        hint = f"; name the studies in it, such as {folder / studies[0]}" if studies else "; must be a results folder"
        raise ResultsError(f"{folder}: has no run (a folder with config.json){hint}")
    configs = {run.name: run.config().flat() for run in runs}
    digests = {run.name: run.digests() for run in runs}
    axes = axes_of(configs, told, [run.name for run in runs if run.finished], digests)
    about = told or {}
    study = StudyInfo(
        about.get("study") or folder.name,
        about.get("title") or about.get("study") or folder.name,
        folder,
        about.get("paper"),
        about.get("scale"),
        axes.names,
        axes.labels,
        about.get("note") or "",
        (*axes.notes, *([f"Left out, since study.json does not list them: {left_out}."] if left_out else ())),
        axes.repeats,
    )
    return study, [(run, configs[run.name]) for run in runs]


def _with_remarks(study: StudyInfo, rows: Sequence[Record], sources: Mapping[str, Run]) -> StudyInfo:
    """Remark on updates that the defence changed, and on runs that were stopped early or resumed with other values."""
    remarks = [*study.remarks]
    counts = [(row["rejected"], row["clipped"]) for row in rows]
    if note := defence_note(*(sum(each) for each in zip(*counts, strict=True))):
        remarks.append(f"{note}, in {sum(any(each) for each in counts)} of {len(counts)} runs.")
    early = [row for row in rows if sources[row["folder"]].finished and not row["finished"]]
    if early:
        named = (f"{row['run']} ({row['rounds_done']} of {row['rounds']} rounds)" for row in early)
        remarks.append(f"Stopped early, and counted as unfinished: {', '.join(named)}.")
    resumed = {row["run"]: sources[row["folder"]].earlier_values() for row in rows}
    if any(resumed.values()):
        words = (f"{run} ({', '.join(values)})" for run, values in resumed.items() if values)
        remarks.append(f"Resumed with other values: {', '.join(words)}.")
    return replace(study, remarks=tuple(remarks))


def _told_apart(studies: Sequence[StudyInfo]) -> tuple[StudyInfo, ...]:
    """Give studies of one name the names of their folders, and number those that are still alike; titles follow."""
    names, titles = Counter(study.name for study in studies), Counter(study.title for study in studies)
    told: dict[str, StudyInfo] = {}
    for study in studies:
        base = study.folder.name if names[study.name] > 1 else study.name
        numbered = (f"{base} ({number})" for number in count(2))
        name = next(each for each in chain([base], numbered) if each not in told)
        own = name if study.title == study.name else f"{study.title} ({name})"
        told[name] = replace(study, name=name, title=own if titles[study.title] > 1 else study.title)
    return tuple(told.values())


def _load_run(study: StudyInfo, run: Run, config: Record) -> tuple[Record, list[Record]]:
    records = run.rounds(config["clients"])
    labels = study.labels[run.name]
    last = records[-1]["round"] if records else 0
    if run.finished and (told := run.summary()["rounds"]) != last:
        raise ResultsError(f"{run.folder}: is damaged; it has {last} rounds, its summary says {told}")
    place = {"schema": SCHEMA, "study": study.name, "run": run.name}
    axes = {f"axis.{axis}": labels[axis] for axis in study.axes}
    lines = [{**place, **axes, **_round_row(config, record)} for record in records]
    row = {
        **place,
        "folder": str(run.folder),
        "finished": run.is_complete(config["rounds"]),
        **_run_row(config, records),
        **axes,
        **config,
        **{f"env.{name}": value for name, value in run.environment().items()},
    }
    return row, lines


def _run_row(config: Record, records: Sequence[Record]) -> Record:
    total = totals(records)
    rejected, clipped = defended(records)
    return {
        "rounds_done": len(records),
        "aa": total["average_accuracy"],
        "early": mean(record["accuracy"] for record in records[: len(records) // 4]),
        "late": mean(record["accuracy"] for record in records[len(records) // 2 :]),
        "ar": None,
        "final": total["final_accuracy"],
        **of_both_models(config, records),
        "chance": total["average_chance"],
        **{name: total[name] for name in _TRANSFER},
        **condition_numbers(records),
        "switched": switched(config, total["switched_at"]),
        "failures": total["failures"],
        "rejected": rejected,
        "clipped": clipped,
        "bytes_down": total["bytes"]["down"],
        "bytes_up": total["bytes"]["up"],
        **{f"seconds_{part}": total["seconds"][part] for part in ("round", "training", "selection")},
    }


def _round_row(config: Record, record: Record) -> Record:
    method = config["method"]
    own = METHODS[method].metrics if method in METHODS else ()
    return {
        "method": method,
        "round": int(record["round"]),
        "accuracy": record["accuracy"],
        "regret": None,
        "chance": record["chance"],
        **{
            metric.average: average_over_clients(metric, record.get(metric.column, ()))
            for metric in (*COMMON, *own)
            if metric.average
        },
        "client_drift": record["client_drift"],
        "switched": switched(config, record["switched_at"]),
        "interpolated": bool(record.get("interpolated", False)),
        "failures": len(record["failures"]),
        "bytes_down": record["bytes"]["down"],
        "bytes_up": record["bytes"]["up"],
        **{f"seconds_{name}": value for name, value in record["seconds"].items()},
    }


def _add_regret(rows: Sequence[Record], rounds: Sequence[Record], sources: Mapping[str, Run]) -> None:
    """Add the regret of each run, and the AR of each finished one, against its Centralized run."""
    curves: dict[tuple[str, str], list[Record]] = {}
    for line in rounds:
        curves.setdefault((line["study"], line["run"]), []).append(line)
    own = {row["folder"]: curves.get((row["study"], row["run"]), []) for row in rows}
    references = References((sources[row["folder"]], row) for row in rows)
    for row in rows:
        if (nearest := references.nearest(sources[row["folder"]], row)) is None:
            continue
        lines = curves.get((row["study"], row["run"]), [])
        upper, accuracies = ([line["accuracy"] for line in each] for each in (own[str(nearest.folder)], lines))
        for line, value in zip(lines, regrets(upper, accuracies), strict=False):
            line["regret"] = value
        if row["finished"]:
            row["ar"] = regret(upper, accuracies)


def _frame(rows: Sequence[Record], numbers: Sequence[str]) -> pd.DataFrame:
    """Return a table whose numeric columns are float64 even if every value is missing, and whose axes are as given."""
    frame = pd.DataFrame(rows)
    for name in frame.columns:
        if name.startswith("axis."):  # pandas would make whole numbers 4.0 where a study lacks the axis
            frame[name] = pd.Series([row.get(name, math.nan) for row in rows], dtype=object)
    return frame.astype({name: "float64" for name in numbers if name in frame.columns})


def _uniform(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert columns of mixed types, such as an axis of numbers and words, to text: Parquet columns have one type."""
    kinds = {name: {type(value) for value in frame[name].dropna()} for name in frame.columns}
    mixed = [name for name, types in kinds.items() if len(types) > 1 and types != {int, float}]
    words = {name: frame[name].map(lambda value: None if value is None else str(value)) for name in mixed}
    return frame.assign(**words)
