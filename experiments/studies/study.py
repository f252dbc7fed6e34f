"""A study: a YAML file that says which runs to make.

.. code-block:: yaml

    title: FedKACE against replay             # optional
    note: One seed only                       # optional: printed below the results
    config: {dataset: digits, rounds: 20}     # keys of docs/configuration.md; the others keep their defaults
    grid: {overlap: [0, 1], seed: [0, 1, 2]}  # optional: one run for each combination
    scales:                                   # optional: other sizes of the same study, chosen by --scale
      smoke: {config: {rounds: 2}, grid: {seed: [0]}}
    paper: table1                             # optional: the published table that the report compares with
    engine: flower                            # or inline: one process per run, no Ray
    workers: 2                                # flower: concurrent clients; inline: concurrent runs; default: what fits
    gpu-fraction: 0.25                        # share of a GPU for each client; default: what fits

An axis of the grid is a configuration key with its values, or a name of its own with named groups of keys:

.. code-block:: yaml

    grid:
      data:
        cifar100: {dataset: cifar100, width: 16}
        imagenet100: {dataset: imagenet100, width: 64}

``base: base/paper.yaml`` takes whatever the file does not set from another file, key by key and axis by axis; an axis
without values is dropped.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedkace_flwr.config import Config, check_value, path_keys, readers_of
from fedkace_flwr.configured import check_preset, find_method
from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.experiments.studies.grid import Axis, combinations, parse_grid, run_name
from fedkace_flwr.experiments.studies.inheritance import FULL, StudyFile, at_scale, read_study_file
from fedkace_flwr.experiments.studies.names import ENGINES, TABLES
from fedkace_flwr.experiments.studies.yaml_file import scalar, typed
from fedkace_flwr.keys import Scalar
from fedkace_flwr.registry import METHODS

_RUNNERS_OWN = ("results-dir", "run-name")


@dataclass(frozen=True)
class Study:
    """A parsed study.

    Attributes
    ----------
    name : str
        The file's name without its suffix.
    scale : str
        ``full``, or one of the file's ``scales``.
    folder : Path
        Holds the folders of the runs.
    title : str
        The title for tables and the report.
    note : str
        What to bear in mind about its results, printed below their table; may be empty.
    paper : str or None
        The published table that the study repeats.
    axes : list of str
        What varies between the runs.
    cells : dict of str to dict
        Each run's value, or group's name, on each axis.
    runs : dict of str to Config
        The runs by the names of their folders.
    engine : {"flower", "inline"}
        What executes the runs.
    workers : int or None
        Number of concurrent clients, if it is given.
    gpu_fraction : float or None
        Share of a GPU for each client, if it is given.
    keys : dict of str to list of str
        The configuration keys that each axis of the grid sets.
    data : dict of str to str
        The digest of each run's data set, once the data sets have been opened.
    """

    name: str
    scale: str
    folder: Path
    title: str
    note: str
    paper: str | None
    axes: list[str]
    cells: dict[str, dict[str, Scalar]]
    runs: dict[str, Config]
    engine: str
    workers: int | None
    gpu_fraction: float | None
    keys: dict[str, list[str]] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)


def load_study(
    path: Path | StudyFile,
    overrides: Mapping[str, Scalar],
    results: Path,
    *,
    sweeps: Mapping[str, Sequence[Scalar]] | None = None,
    scale: str = FULL,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    engine: str | None = None,
    workers: float | None = None,
    gpu_fraction: float | None = None,
) -> Study:
    """Read a study file.

    Parameters
    ----------
    path : Path or StudyFile
        The YAML file, or what one would hold.
    overrides : mapping
        Configuration keys that override the file's, its grid included.
    results : Path
        The folder that holds the studies' folders.
    sweeps : mapping, optional
        Configuration keys with several values each; they become axes of the grid, in place of the file's axes of
        these names.
    scale : str
        ``full``: the file as it is written; or one of its ``scales``.
    only : sequence of str
        Patterns (``*`` matches anything) of run names, or of parts of run names between underscores, such as
        ``fedkace`` or ``overlap-4``; by default all runs.
    seeds : sequence of int
        Replace the file's seeds.
    engine, workers, gpu_fraction : optional
        Override the file's keys of these names.

    Raises
    ------
    ConfigError
        The file is missing, is not YAML, or holds an invalid key or value; or no run matches ``only``.
    """
    file = path if isinstance(path, StudyFile) else read_study_file(path)
    path, content = file.path, file.content
    for key, values in {**{key: [value] for key, value in overrides.items()}, **(sweeps or {})}.items():
        for value in values:
            check_value(key, value)
    with _naming(path):
        for name in ("title", "note", "paper"):
            if not isinstance(content.get(name), str | None):
                raise ConfigError(f"{name} = {content[name]!r:.200}: must be text")
        paper = content.get("paper")
        if paper is not None and paper not in TABLES:
            raise ConfigError(f"paper = {paper!r:.200}: must be {', '.join(TABLES)}{closest(paper, TABLES)}")
        engine = engine or content.get("engine") or "flower"
        if engine not in ENGINES:
            hint = closest(str(engine), ENGINES)
            raise ConfigError(f"engine = {engine!r:.200}: must be {' or '.join(ENGINES)}{hint}")
        count = _number("workers", workers, content, int, low=1)
        fraction = _number("gpu-fraction", gpu_fraction, content, float, low=0)
        config, grid = at_scale(content, scale)
        config = {key: typed(key, value) for key, value in config.items()}
        if seeds:
            if "seed" in overrides or "seed" in (sweeps or {}):
                raise ConfigError(f"seed is set beside --seeds {' '.join(map(str, seeds))}; must be set by one of them")
            grid["seed"] = list(seeds)
        grid |= {key: list(values) for key, values in (sweeps or {}).items()}
        axes = parse_grid(grid, list(overrides))
        for key in {*config, *(key for axis in axes for key in axis.keys), *overrides} & set(_RUNNERS_OWN):
            raise ConfigError(f"{key} is set by the runner; choose the folder with --results")
        folder = (results / (path.stem if scale == FULL else f"{path.stem}-{scale}")).resolve()
        runs, cells = _expand(axes, config, {**overrides, "results-dir": str(folder)})
    _check_read({**overrides, **{key: values[0] for key, values in (sweeps or {}).items()}}, runs.values())
    chosen = _chosen(runs, only, path)
    return Study(
        name=path.stem,
        scale=scale,
        folder=folder,
        title=str(content.get("title", path.stem)),
        note=str(content.get("note") or ""),
        paper=paper,
        axes=list(dict.fromkeys([*(axis.name for axis in axes), "method", "seed"])),
        cells={name: cells[name] for name in chosen},
        runs={name: runs[name] for name in chosen},
        engine=engine,
        workers=None if count is None else int(count),
        gpu_fraction=fraction,
        keys={axis.name: sorted(axis.keys) for axis in axes},
    )


def _expand(
    axes: Sequence[Axis], config: Mapping[str, Any], overrides: Mapping[str, Scalar]
) -> tuple[dict[str, Config], dict[str, dict[str, Scalar]]]:
    """The configuration of each run, and its value on each axis, by the run's name."""
    runs: dict[str, Config] = {}
    cells: dict[str, dict[str, Scalar]] = {}
    for labels, chosen in combinations(axes):
        values = _with_absolute_paths({"data-dir": "data", **config, **chosen, **overrides})
        if "method" not in overrides and isinstance(method := values.get("method"), str):
            find_method(method)  # a name in the file; before its keys, which are unknown if its package is missing
        parsed = Config.parse(values)
        if parsed.method in METHODS:
            check_preset(parsed, {*chosen, *overrides})
        name = run_name(parsed, axes, labels)
        if name in runs:
            raise ConfigError(f"grid: two runs would share the folder {name}; give values whose names differ")
        if parsed.run.state_dir:  # clients of one folder would take its runs for earlier ones of their own
            values["state-dir"] = str(Path(parsed.run.state_dir) / Path(parsed.run.results_dir).name / name)
        runs[name] = Config.parse({**values, "run-name": name})
        cells[name] = {**labels, "method": parsed.method, "seed": parsed.run.seed}
    return runs, cells


def _check_read(given: Mapping[str, Scalar], runs: Iterable[Config]) -> None:
    """Check that each key given for a whole study is read by a method that takes part in it.

    Raises
    ------
    ConfigError
        One is a key of other methods only.
    """
    methods = {config.method for config in runs}
    for key, value in given.items():
        readers = readers_of(key)
        if readers and readers.isdisjoint(methods):
            names = ", ".join(name for name in METHODS if name in readers)
            raise ConfigError(f"{key} = {value!r}: no method of this study reads it; it is a key of {names}")


def _chosen(runs: Mapping[str, Config], only: Sequence[str], path: Path) -> list[str]:
    """Return the names of the runs that match a pattern as a whole or in a part; all of them if there is none.

    Raises
    ------
    ConfigError
        A pattern matches no run.
    """
    for pattern in only:
        if runs and not any(_matches(name, pattern) for name in runs):
            parts = dict.fromkeys(part for name in runs for part in (name, *name.split("_")))
            raise ConfigError(
                f"--only {pattern}: no run of {path} has such a name; the first is {next(iter(runs))}"
                f"{closest(pattern, parts)}"
            )
    return [name for name in runs if not only or any(_matches(name, pattern) for pattern in only)]


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(text, pattern) for text in (name, *name.split("_")))


def _with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    for key in path_keys() - {"results-dir"}:  # made absolute: the engines run in another working directory
        value = values.get(key)
        if isinstance(value, str) and value:
            try:
                values[key] = str(Path(value).expanduser().resolve())
            except (OSError, RuntimeError, ValueError) as error:
                raise ConfigError(f"{key} = {value!r:.200}: is not a path ({error})") from error
    return values


def _number(
    name: str, option: float | None, content: Mapping[str, Any], kind: type[float], *, low: float
) -> float | None:
    if option is None and name not in content:
        return None
    value: Any = content[name] if option is None else option
    if isinstance(value, str):
        value = scalar(value, kind)
    if type(value) not in (kind, int) or not math.isfinite(value) or value < low:
        what = "whole number" if kind is int else "number"
        raise ConfigError(f"{name} = {value!r:.200}: must be a {what} >= {low:g}")
    return float(value)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's path before an error's message."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
