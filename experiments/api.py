"""Runs from Python: ``fedkace_flwr.run``, for notebooks and scripts.

It does what the command ``run`` does, with the same files and the same errors. The runs are done by processes of
their own, which need nothing of the caller: a script needs no ``if __name__ == "__main__":``.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from rich.console import Console

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.experiments.outputs import needing_report
from fedkace_flwr.experiments.report.comparison import draw_curves
from fedkace_flwr.experiments.results.reading import read_rounds
from fedkace_flwr.experiments.results.summary_table import find_runs, summary_table
from fedkace_flwr.experiments.running.display import in_notebook
from fedkace_flwr.experiments.running.runner import run_study
from fedkace_flwr.experiments.studies.inheritance import FULL, StudyFile
from fedkace_flwr.experiments.studies.names import find_study
from fedkace_flwr.experiments.studies.study import Study, load_study
from fedkace_flwr.inference.kept_models import MODEL
from fedkace_flwr.keys import PLAIN_NAME, Scalar, is_plain_name

if TYPE_CHECKING:
    import pandas as pd

    from fedkace_flwr.experiments.results.loading import Results

Value = Scalar | Sequence[Scalar]
"""A configuration key's value, or several, which make one run each."""

_TABLE_WIDTH = 115  # of a notebook's output, in characters
_RUNNERS_OWN = ("results-dir", "run-name", "resume")


@dataclass(frozen=True)
class StudyResult:
    """What a study has left in its folder.

    Attributes
    ----------
    folder : Path
        The study's folder, with a folder for each run.
    summaries : dict of str to dict
        The content of each finished run's ``summary.json``, by the run's name.
    failures : dict of str to str
        The error of each run that failed twice, or that another process replaced.
    """

    folder: Path
    summaries: dict[str, dict[str, Any]]
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def rounds(self) -> "pd.DataFrame":
        """One row per run and round; the columns are those of the report's ``rounds.csv``.

        Raises
        ------
        ResultsError
            pandas is not installed, or a file is damaged.
        """
        return self._of_these(self._results.rounds)

    @property
    def runs(self) -> "pd.DataFrame":
        """One row per run with its results and every configuration key; as the report's ``runs.csv``.

        Raises
        ------
        ResultsError
            pandas is not installed, or a file is damaged.
        """
        return self._of_these(self._results.runs)

    @property
    def models(self) -> dict[str, Path]:
        """The folders of the models that the runs have left, by run; :func:`fedkace_flwr.load_model` loads them."""
        folders = {name: self.folder / name / MODEL for name in self.summaries}
        return {name: path for name, path in folders.items() if path.exists()}

    def plot(self) -> Figure:
        """Draw the clients' mean accuracy over the rounds, one line for each run, and that of guessing."""
        figure = Plot(figsize=(9, 5), layout="constrained")
        curves = {name: read_rounds(self.folder / name) for name in self.summaries}
        methods = {name: str(summary["method"]) for name, summary in self.summaries.items()}
        draw_curves(figure, curves, methods, title=self.folder.name)
        return figure

    def report(self) -> Path:
        """Write tables, figures and a page with charts of the whole study, and return the page's path.

        Raises
        ------
        ResultsError
            A package is not installed, or a file cannot be read or written.
        """
        with needing_report("report()"):
            from fedkace_flwr.experiments.report.write import write_report

            written = write_report([self.folder])
        return next(path for path in written if path.name == "index.html")

    @cached_property
    def _results(self) -> "Results":
        with needing_report("rounds"):
            from fedkace_flwr.experiments.results.loading import load_results

            return load_results(self.folder)

    def _of_these(self, frame: "pd.DataFrame") -> "pd.DataFrame":
        return frame[frame["run"].isin(self.summaries)].reset_index(drop=True)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The summaries as a table, for notebooks."""
        runs, _notes = find_runs([self.folder / name for name in self.summaries])
        return in_notebook(summary_table(runs, _TABLE_WIDTH), _TABLE_WIDTH)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"<{len(self.summaries)} finished runs{failed} in {self.folder}>"


class Plot(Figure):
    """A figure that notebooks show, whether Matplotlib has been told of them or not."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=100)
        return picture.getvalue()


def run(
    study: str | Path | Mapping[str, Value] | Config,
    *,
    name: str = "trial",
    results: str | Path = "results",
    scale: str = FULL,
    only: str | Sequence[str] = (),
    seeds: Sequence[int] = (),
    engine: str | None = None,
    workers: int | None = None,
    gpu_fraction: float | None = None,
    progress: bool = True,
    **keys: Value,
) -> StudyResult:
    """Run what is not finished of a study, and return what it has left.

    Interrupting it, as with a notebook's stop button, ends its processes; finished rounds are kept, and the same call
    continues after them.

    Parameters
    ----------
    study : str, path, mapping or Config
        The name of one of the project's studies, the path of a study's file, or configuration keys.
    name : str
        With configuration keys: the study's name, which is that of its folder in ``results``.
    results : path-like
        The folder in which each study gets its own.
    scale, only, seeds, engine, workers, gpu_fraction
        As the options of the command ``run``.
    progress : bool
        Whether to show the progress: bars in a notebook and on a terminal, else lines.
    **keys
        Configuration keys, with underscores in place of hyphens; they override those of the study. A list makes one
        run for each of its values.

    Raises
    ------
    FedkaceError
        The configuration, the data or a folder is unsuitable, which is told before any run begins; or no run could be
        finished.
    KeyboardInterrupt
        It was interrupted.
    """
    single, sweeps = _parted({key.replace("_", "-"): value for key, value in keys.items()})
    if not isinstance(results, str | Path):
        raise ConfigError(f"results = {results!r:.200}: must be the path of a folder")
    if not isinstance(scale, str):
        raise ConfigError(f"scale = {scale!r:.200}: must be a text, such as {FULL}")
    source: Path | StudyFile
    if isinstance(study, str | Path):
        source = find_study(study) if isinstance(study, str) else study
    else:
        source = _as_file(study, name)
    loaded = load_study(
        source,
        single,
        Path(results),
        sweeps=sweeps,
        scale=scale,
        only=_patterns(only),
        seeds=_seeds(seeds),
        engine=engine,
        workers=workers,
        gpu_fraction=gpu_fraction,
    )
    return _run(loaded, Console(quiet=not progress))


def _run(study: Study, console: Console) -> StudyResult:
    outcome = run_study(study, console)
    for error in outcome.failures.values():
        if not outcome.summaries:
            raise RunError(error)
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
    return StudyResult(study.folder, outcome.summaries, outcome.failures)


def _patterns(only: str | Sequence[str]) -> list[str]:
    patterns = only.split(",") if isinstance(only, str) and only else list(only) if isinstance(only, Iterable) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"only = {only!r:.200}: must be a text or a list of texts, such as ['fedkace']")
    return patterns


def _seeds(seeds: Sequence[int]) -> list[int]:
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise ConfigError(f"seeds = {seeds!r:.200}: must be a list of whole numbers >= 0, such as [0, 1]")
    return [_own(seed) for seed in seeds]


def _as_file(study: Mapping[str, Value] | Config, name: str) -> StudyFile:
    """What a study's file with these configuration keys would hold."""
    if not isinstance(study, Mapping | Config):
        raise ConfigError(
            f"study = {study!r:.200}: must be a study's name, a path, a mapping of configuration keys or a Config"
        )
    if not isinstance(name, str) or not is_plain_name(name) or Path(name).stem != name:
        raise ConfigError(f"name = {name!r:.200}: must be {PLAIN_NAME}, and without a suffix")
    if isinstance(study, Config):
        study = {key: value for key, value in study.flat().items() if key not in _RUNNERS_OWN}
    config, grid = _parted(study)
    return StudyFile(Path(name), {"config": config, "grid": grid})


def _own(value: Any) -> Any:
    """A whole number of another type, such as NumPy's, as Python's; other values as they are."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _parted(keys: Mapping[str, Value]) -> tuple[dict[str, Scalar], dict[str, list[Scalar]]]:
    """Keys with one value, and keys with several."""
    single, several = dict[str, Scalar](), dict[str, list[Scalar]]()
    for key, value in keys.items():
        if isinstance(value := _own(value), Scalar):
            single[key] = value
        elif isinstance(value, Sequence):
            several[key] = [_own(each) for each in value]
        else:
            raise ConfigError(f"{key} = {value!r:.200}: must be a number, a text, True or False, or a list of these")
    return single, several
