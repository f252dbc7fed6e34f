"""The table of runs that ``run`` and ``table`` print: finished runs with their regret, in the width of the terminal."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedkace_flwr.errors import ConfigError, ResultsError, RunError, closest
from fedkace_flwr.experiments.results.averages import switched
from fedkace_flwr.experiments.results.folders import is_kept, studies_in
from fedkace_flwr.experiments.results.recorded import Recorded, Run
from fedkace_flwr.experiments.results.regret import References, regret
from fedkace_flwr.results.record import defence_note, defended
from fedkace_flwr.storage.names import closest_path, printable

_GAP = 2  # spaces between columns

_WithConfig = tuple[Run, Mapping[str, Any]]


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    Attributes
    ----------
    name : str
        Its name in the table.
    source : Run
        Where it is recorded.
    config, summary : mapping
        Its configuration, with today's defaults for missing keys, and its summary.
    regret : float or None
        AR against the Centralized run of the same stream among the listed runs or in the run's own study.
    """

    name: str
    source: Run
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    regret: float | None

    @property
    def switched(self) -> str:
        """How many clients have switched to the global model; a dash if the method has no switch."""
        count = switched({**self.config, "method": self.summary["method"]}, self.summary["switched_at"])
        return "-" if count is None else f"{count} of {self.summary['clients']}"


@dataclass(frozen=True)
class Column:
    """A column of the table: heading, explanation, and text of a run's value."""

    heading: str
    meaning: str
    text: Callable[[FinishedRun], str]


def _share(name: str) -> Callable[[FinishedRun], str]:
    return lambda run: percent(run.summary.get(name))


def _megabytes(way: str) -> Callable[[FinishedRun], str]:
    return lambda run: f"{run.summary['bytes'][way] / 1e6:.1f}"


COLUMNS: dict[str, Column] = {
    "aa": Column("AA %", "accuracy averaged over rounds and clients", _share("average_accuracy")),
    "ar": Column("AR %", "how far AA falls short of `centralized` on the same stream", lambda run: percent(run.regret)),
    "final": Column("final %", "accuracy after the last round", _share("final_accuracy")),
    "forgetting": Column(
        "forgetting %", "by how much a class was answered better in an earlier round", _share("forgetting")
    ),
    "bwt": Column("BWT %", "what later rounds added to a class's first accuracy", _share("backward_transfer")),
    "fwt": Column("FWT %", "accuracy above chance on a class before training on it", _share("forward_transfer")),
    "chance": Column("chance %", "accuracy of guessing among the classes met", _share("average_chance")),
    "switched": Column("switched", "clients that went over to the global model", lambda run: run.switched),
    "failures": Column("failures", "replies that were missing or rejected", lambda run: str(run.summary["failures"])),
    "alarms": Column("alarms", "alarms for a person", lambda run: str(run.summary.get("alarms", "-"))),
    "down": Column("MB down", "megabytes sent to clients", _megabytes("down")),
    "up": Column("MB up", "megabytes received from clients", _megabytes("up")),
    "seconds": Column("seconds", "duration of all rounds", lambda run: f"{run.summary['seconds']['round']:.1f}"),
}
"""The columns that ``table --columns`` knows, in the order in which they are printed."""

# In this order, in a narrow terminal; failures stay if there are any, and alarms.
_DROPPED = ("down", "up", "failures", "seconds", "fwt", "bwt", "chance", "switched", "forgetting", "ar", "final")
_EXPLAINED = ("aa", "ar", "final", "forgetting", "bwt", "fwt", "chance", "switched")


def chosen_columns(names: Sequence[str]) -> list[str]:
    """Return the names of the columns to print; all of them if none is named.

    Raises
    ------
    ConfigError
        There is no such column.
    """
    for name in names:
        if name not in COLUMNS:
            raise ConfigError(f"--columns {name}: must be one of {', '.join(COLUMNS)}{closest(name, COLUMNS)}")
    return [name for name in COLUMNS if name in names] if names else list(COLUMNS)


def find_runs(folders: Sequence[Path]) -> tuple[list[FinishedRun], list[str]]:
    """Read the finished runs in folders of runs or of studies.

    Parameters
    ----------
    folders : sequence of Path
        Folders of runs, of studies, kept or not, or of several studies; or a run's name in the folder of a kept study.

    Returns
    -------
    runs : list of FinishedRun
        In the order given, each once.
    notes : list of str
        One line for each folder that is left out, with the reason.

    Raises
    ------
    RunError
        No folder holds a finished run.
    ResultsError
        A file is damaged.
    """
    found: dict[Path, Run] = {}
    notes: list[str] = []
    for folder in folders:
        runs = _runs_in(folder)
        if not runs:
            notes.append(f"{folder} is left out: it holds no run")
        for run in runs:
            if run.finished:
                found[run.folder.resolve()] = run
            else:
                notes.append(f"{run.folder} is left out: the run is not finished")
    if not found:
        raise RunError(
            f"{', '.join(str(folder) for folder in folders)}: no finished run; name folders of studies or of runs, "
            f"such as results/quickstart{closest_path(folders[0])}"
        )
    return _finished(found), notes


def summary_table(runs: Sequence[FinishedRun], width: int, columns: Sequence[str] = tuple(COLUMNS)) -> Table:
    """Return a table with one row per run.

    Columns without any value are left out. If the table is too wide, whole columns are dropped, bytes first; the
    names of runs are never shortened.

    Parameters
    ----------
    runs : sequence of FinishedRun
        The rows.
    width : int
        Width of the terminal in characters.
    columns : sequence of str
        Names from :data:`COLUMNS`.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run", overflow="fold")
    shown = shown_columns(runs, width, columns)
    for name in shown:
        table.add_column(COLUMNS[name].heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(escape(run.name), *(COLUMNS[name].text(run) for name in shown))
    return table


def shown_columns(runs: Sequence[FinishedRun], width: int, columns: Sequence[str] = tuple(COLUMNS)) -> list[str]:
    """Return the columns that have a value in some run and fit into ``width`` characters; failures always do."""
    texts = {name: [COLUMNS[name].text(run) for run in runs] for name in columns}
    shown = _with_values(texts)
    sizes = {name: _GAP + max(map(len, [COLUMNS[name].heading, *texts[name]])) for name in shown}
    first = max((len(run.name) for run in runs), default=0)
    for name in _DROPPED:
        if first + sum(sizes[each] for each in shown) <= width:
            break
        if name != "failures" or not set(texts.get(name, ())) - {"0"}:
            shown = [each for each in shown if each != name]
    return shown


def hidden_columns(runs: Sequence[FinishedRun], width: int, columns: Sequence[str] = tuple(COLUMNS)) -> list[str]:
    """Return the columns that have a value in some run and do not fit."""
    shown = shown_columns(runs, width, columns)
    every = _with_values({name: [COLUMNS[name].text(run) for run in runs] for name in columns})
    return [name for name in every if name not in shown]


def _with_values(texts: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for name, each in texts.items() if set(each) - {"-"}]


def legend(columns: Sequence[str]) -> list[str]:
    """Return a line for each abbreviation among the columns."""
    explained = [COLUMNS[name] for name in columns if name in _EXPLAINED]
    return [f"{column.heading.removesuffix(' %')}: {column.meaning}" for column in explained]


def run_notes(runs: Sequence[FinishedRun]) -> list[str]:
    """Return a line for each run that was stopped early, or in which the defence rejected or clipped an update."""
    lines = []
    for run in runs:
        done, planned = run.summary["rounds"], run.config["rounds"]
        early = f"stopped after {done} of {planned} rounds" if done < planned else ""
        lines += [f"{run.name}: {note}" for note in (early, defence_note(*defended(run.source.rounds()))) if note]
    return lines


def percent(value: float | None) -> str:
    """Return a share as a percentage with two decimals, or a dash for None."""
    return "-" if value is None else f"{100 * value:.2f}"


def _runs_in(folder: Path) -> Sequence[Run]:
    """Return the run whose folder it is, or else the runs of a study, or those of all studies in it."""
    if any((folder / name).exists() for name in ("config.json", "summary.json")):
        return [Run(folder)]
    if is_kept(folder.parent) and not folder.exists():
        return [run for run in Recorded(folder.parent).runs if run.name == folder.name]
    return [run for each in (folder, *studies_in(folder)) for run in Recorded(each).runs]


def _finished(runs: Mapping[Path, Run]) -> list[FinishedRun]:
    named = {path: (run, run.config().flat()) for path, run in runs.items()}
    references = {study: _references(study, named) for study in {path.parent for path in named}}
    names = _names(list(named))
    return [
        FinishedRun(names[path], run, config, run.summary(), _regret(run, references[path.parent].nearest(run, config)))
        for path, (run, config) in named.items()
    ]


def _names(folders: Sequence[Path]) -> dict[Path, str]:
    """Return the names of the folders, with as much of the path as tells them apart."""
    own = Counter(folder.name for folder in folders)
    with_parent = Counter(folder.parts[-2:] for folder in folders)
    names = {}
    for folder in folders:
        parted = f"{folder.parent.name}/{folder.name}" if with_parent[folder.parts[-2:]] == 1 else str(folder)
        names[folder] = printable(folder.name if own[folder.name] == 1 else parted)
    return names


def _references(study: Path, named: Mapping[Path, _WithConfig]) -> References:
    """Return the references among the named runs, and in a study of theirs if none of its other runs is damaged."""
    try:
        beside = [run for run in Recorded(study).runs if run.finished and run.folder not in named]
        return References([*named.values(), *((run, run.config().flat()) for run in beside)])
    except ResultsError:
        return References(named.values())


def _regret(run: Run, reference: Run | None) -> float | None:
    return None if reference is None else regret(_accuracies(reference), _accuracies(run))


def _accuracies(run: Run) -> list[float | None]:
    return [record["accuracy"] for record in run.rounds()]
