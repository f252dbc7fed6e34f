"""A study: a YAML file that says which runs to make.

.. code-block:: yaml

    title: FedKACE against replay             # optional
    config: {dataset: digits, rounds: 20}     # keys of docs/configuration.md; what is left out takes its default
    grid: {overlap: [0, 1], seed: [0, 1, 2]}  # optional: one run for each combination
    scales:                                   # optional: other sizes of the same study, chosen by --scale
      smoke: {config: {rounds: 2}, grid: {seed: [0]}}
    paper: table1                             # optional: the published table that the report sets beside it
    engine: flower                            # or inline: one process a run, no Ray
    workers: 2                                # flower: clients at work at a time; inline: runs; default: as many as fit
    gpu-fraction: 0.25                        # share of a GPU that a client takes; default: what fits

An axis of the grid is a key with its values, or a name of its own with named groups of keys:

.. code-block:: yaml

    grid:
      data:
        cifar100: {dataset: cifar100, width: 16}
        imagenet100: {dataset: imagenet100, width: 64}

``base: base/paper.yaml`` takes what the file does not say from another file, key by key and axis by axis; an axis
without values is dropped. A study of another's runs says whose, and perhaps which of them:

.. code-block:: yaml

    same-runs-as: table2.yaml
    only: ["fedkace_*", "as5_*"]
"""

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from fedkace_flwr import registry as registry  # declares the methods' keys
from fedkace_flwr.config import Config, folder_keys
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import Scalar

ENGINES = ("flower", "inline")
FULL = "full"
_KEYS = ("title", "config", "grid", "scales", "paper", "base", "engine", "workers", "gpu-fraction")
_BORROWER_KEYS = ("same-runs-as", "only")
_RUNNERS_OWN = ("results-dir", "run-name")  # the runner gives every run its folder: the two keys that it sets itself
# Far above any study; a file of a few lines can stand for billions of values by naming its own parts again and again.
_MOST_VALUES, _DEEPEST, _MOST_RUNS, _LARGEST = 100_000, 20, 100_000, 2**63


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number, as in YAML 1.2; PyYAML follows 1.1, where it is a text."""


def _mapping_without_repeats(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    met = set()
    for key, _ in node.value:
        if key.value in met:
            raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
        met.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_without_repeats)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


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
        Where its runs' folders are.
    title : str
        For people.
    paper : str or None
        The published table that it follows.
    axes : list of str
        What the grid varies.
    cells : dict of str to dict
        Each run's value, or group's name, on each axis.
    runs : dict of str to Config
        By the name of the run's folder.
    engine : {"flower", "inline"}
        What runs them.
    workers : int or None
        Clients at work at a time, if that is asked for.
    gpu_fraction : float or None
        Share of a GPU that one client takes, if that is asked for.
    """

    name: str
    scale: str
    folder: Path
    title: str
    paper: str | None
    axes: list[str]
    cells: dict[str, dict[str, Scalar]]
    runs: dict[str, Config]
    engine: str
    workers: int | None
    gpu_fraction: float | None


def load_study(
    path: Path,
    overrides: Mapping[str, Scalar],
    results: Path,
    *,
    scale: str = FULL,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    lent: bool = False,
    **options: Any,
) -> Study:
    """Read a study file.

    Parameters
    ----------
    path : Path
        The YAML file.
    overrides : mapping
        Configuration keys that go before the file's, and before its grid.
    results : Path
        Folder above the studies' folders.
    scale : str
        ``full``: as the file stands, or one of its ``scales``.
    only : sequence of str
        Patterns of run names (``*`` stands for anything); by default all runs.
    seeds : sequence of int
        In place of the file's.
    lent : bool
        Whether another study names this one as its own.
    **options
        ``engine``, ``workers`` and ``gpu_fraction``; None leaves the file's.

    Raises
    ------
    ConfigError
        The file is missing, is not YAML, or holds a key or value that will not do; no run matches ``only``.
    """
    content = _read(path)
    if "same-runs-as" in content:
        if lent:
            raise ConfigError(f"{path}: same-runs-as: must name a study with runs of its own")
        return _borrowed(path, content, overrides, results, scale=scale, only=only, seeds=seeds, **options)
    for name in ("title", "paper"):
        if not isinstance(content.get(name), str | None):
            raise ConfigError(f"{path}: {name} = {content[name]!r}: must be a text")
    engine = options.get("engine") or content.get("engine", "flower")
    if engine not in ENGINES:
        raise ConfigError(f"{path}: engine = {engine!r}: must be {' or '.join(ENGINES)}")
    workers = _number(path, "workers", options.get("workers"), content, int, low=1)
    gpu_fraction = _number(path, "gpu-fraction", options.get("gpu_fraction"), content, float, low=0)
    part = _scale(path, content, scale)
    fixed = {**_mapping(path, content, "config"), **_mapping(path, part, "config")}
    axes = {**_mapping(path, content, "grid"), **_mapping(path, part, "grid")}
    if seeds:
        axes["seed"] = list(seeds)
    grid = {
        axis: _points(path, axis, values)
        for axis, values in axes.items()
        if axis not in overrides and values is not None
    }
    varied = [key for points in grid.values() for key in {key for values in points.values() for key in values}]
    for key in {*fixed, *varied, *overrides} & set(_RUNNERS_OWN):
        raise ConfigError(f"{path}: {key} is set by the runner; choose the folder with --results")
    for key in varied:
        if varied.count(key) > 1:
            raise ConfigError(f"{path}: grid: {key} stands on two axes")

    if math.prod(map(len, grid.values())) > _MOST_RUNS:
        raise ConfigError(f"{path}: grid: makes {math.prod(map(len, grid.values()))} runs, more than {_MOST_RUNS}")
    folder = (results / (path.stem if scale == FULL else f"{path.stem}-{scale}")).resolve()
    cells: dict[str, dict[str, Scalar]] = {}
    runs: dict[str, Config] = {}
    for chosen in itertools.product(*(points.items() for points in grid.values())):
        cell = {axis: label for axis, (label, _) in zip(grid, chosen, strict=True)}
        given = {key: value for _, values in chosen for key, value in values.items()}
        values = {"data-dir": "data", **fixed, **given, **overrides, "results-dir": str(folder)}
        for key in folder_keys() - {"results-dir"}:  # relative to the command's folder; the engines run in another one
            if isinstance(values.get(key), str) and values[key]:
                values[key] = _resolved(path, key, values[key])
        try:
            config = Config.parse(values)
            name = _run_name(config, cell, _groups(axes))
            if name in runs:
                raise ConfigError(f"grid: two runs would share the folder {name}; give values whose names differ")
            runs[name] = Config.parse({**values, "run-name": name})
            cells[name] = {**cell, "method": config.method, "seed": config.run.seed}
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    chosen_runs = {name for name in runs if not only or any(fnmatchcase(name, pattern) for pattern in only)}
    if not chosen_runs and runs:
        raise ConfigError(f"--only {' '.join(only)}: no run of {path} has such a name; the first is {next(iter(runs))}")
    return Study(
        name=path.stem,
        scale=scale,
        folder=folder,
        title=str(content.get("title", path.stem)),
        paper=content.get("paper"),
        axes=list(dict.fromkeys([*grid, "method", "seed"])),
        cells={name: cell for name, cell in cells.items() if name in chosen_runs},
        runs={name: config for name, config in runs.items() if name in chosen_runs},
        engine=engine,
        workers=None if workers is None else int(workers),
        gpu_fraction=gpu_fraction,
    )


def parse_setting(text: str) -> tuple[str, Scalar]:
    """Read ``key=value``; the value as YAML would read it.

    Raises
    ------
    ConfigError
        No equals sign, or a value that is not a single number, truth value or text.
    """
    key, separator, value = text.partition("=")
    try:
        parsed = yaml.load(value, _Loader) if value else ""
    except Exception:  # as in _parse
        parsed = None
    if not separator or not key or not isinstance(parsed, bool | int | float | str) or _is_too_large(parsed):
        raise ConfigError(f"--set {text}: must be key=value, for example --set overlap=0")
    return key.strip(), parsed


def _borrowed(path: Path, content: Mapping[str, Any], *arguments: Any, only: Sequence[str], **options: Any) -> Study:
    """A study of another's runs."""
    lender, patterns = content["same-runs-as"], content.get("only", ["*"])
    if not isinstance(lender, str) or not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise ConfigError(f"{path}: same-runs-as must name a study file, only must be a list of patterns")
    return load_study(path.parent / lender, *arguments, only=only or patterns, lent=True, **options)


def _resolved(path: Path, key: str, value: str) -> str:
    try:
        return str(Path(value).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path}: {key} = {value!r}: is no path ({error})") from error


def _read(path: Path, users: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A study file with what its base adds."""
    content = _parse(path)
    known = _BORROWER_KEYS if "same-runs-as" in content else _KEYS
    for key in content:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}; the keys are {', '.join(known)}")
    if "base" not in content:
        return content
    base, users = path.parent / str(content.pop("base")), (*users, path)
    if len(users) > _DEEPEST:
        raise ConfigError(f"{path}: base: the files name each other without end")
    return _merged(_read(base, users), content)


def _merged(base: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **content}
    for name in ("config", "grid"):
        if isinstance(base.get(name), dict) and isinstance(content.get(name), dict):
            merged[name] = {**base[name], **content[name]}
    if isinstance(base.get("scales"), dict) and isinstance(content.get("scales"), dict):
        ours, theirs = content["scales"], base["scales"]
        merged["scales"] = {
            scale: _merged(theirs.get(scale) or {}, ours.get(scale) or {})
            if isinstance(theirs.get(scale), dict | None) and isinstance(ours.get(scale), dict | None)
            else ours.get(scale, theirs.get(scale))
            for scale in {**theirs, **ours}
        }
    return merged


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        _check_size(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a study file") from error
    except Exception as error:  # for odd tags and values PyYAML raises whatever Python does
        line = (str(error).splitlines() or [""])[0] or type(error).__name__
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: is not YAML ({getattr(error, 'problem', None) or line})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys, among them config")
    return content


def _check_size(content: Any) -> None:
    """See that a parsed file can be walked through and quoted; aliases count as often as they stand.

    Raises
    ------
    ValueError
        It is too deep or too large, or holds itself.
    """
    met, waiting = 0, [(content, 0)]
    while waiting:
        value, depth = waiting.pop()
        met += 1
        if met > _MOST_VALUES or depth > _DEEPEST or _is_too_large(value):
            raise ValueError("it holds too many values, one within the other without end, or too large a number")
        if isinstance(value, Mapping):
            waiting += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple | set):
            waiting += [(part, depth + 1) for part in value]


def _is_too_large(value: object) -> bool:
    return isinstance(value, int) and not -_LARGEST <= value < _LARGEST


def _mapping(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    value = {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{path}: {name}: must hold configuration keys")
    return value


def _scale(path: Path, content: Mapping[str, Any], scale: str) -> dict[str, Any]:
    """What the file says of one scale."""
    scales = _mapping(path, content, "scales")
    if scale != FULL and scale not in scales:
        raise ConfigError(f"{path}: --scale {scale}: the file has {', '.join([FULL, *scales])}")
    part = _mapping(path, scales, scale)
    for key in part:
        if key not in ("config", "grid"):
            raise ConfigError(f"{path}: scales: {scale}: unknown key {key!r}; the keys are config, grid")
    return part


def _points(path: Path, axis: str, values: Any) -> dict[Scalar, dict[str, Any]]:
    """The points of an axis by label: keys with their values."""
    if isinstance(values, list):
        if 0 < len(values) == len({repr(value) for value in values}):
            return {
                value if isinstance(value, bool | int | float | str) else repr(value): {axis: value} for value in values
            }
    elif (
        isinstance(values, dict)
        and values
        and all(isinstance(group, dict | None) for group in values.values())
        and all(isinstance(key, str) for group in values.values() for key in group or {})
        and len({str(label) for label in values}) == len(values)
    ):
        return {str(label): dict(group or {}) for label, group in values.items()}
    raise ConfigError(f"{path}: grid: {axis} = {values!r}: must be a list of different values, or named groups of keys")


def _groups(axes: Mapping[str, Any]) -> set[str]:
    return {axis for axis, values in axes.items() if isinstance(values, dict)}


def _number(
    path: Path, name: str, option: float | None, content: Mapping[str, Any], kind: type[float], *, low: float
) -> float | None:
    if option is None and name not in content:
        return None
    value = content[name] if option is None else option
    if type(value) not in (kind, int) or not math.isfinite(value) or value < low:
        what = "whole number" if kind is int else "number"
        raise ConfigError(f"{path}: {name} = {value!r}: must be a {what} >= {low:g}")
    return float(value)


def _run_name(config: Config, cell: Mapping[str, Any], groups: Collection[str]) -> str:
    """Method, what the grid varies (a group by its name alone), and the seed."""
    varied = [
        str(value) if axis in groups else f"{axis}-{value}"
        for axis, value in cell.items()
        if axis not in ("method", "seed")
    ]
    return "_".join([config.method, *varied, f"seed-{config.run.seed}"]).replace("/", "-")
