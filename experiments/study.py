"""A study: a YAML file that says which runs to make.

.. code-block:: yaml

    config: {dataset: digits, rounds: 20}     # keys of docs/configuration.md; what is left out takes its default
    grid: {overlap: [0, 1], seed: [0, 1, 2]}  # optional: one run for each combination
    engine: flower                            # or inline: one process, no Ray
    workers: 2                                # clients at work at a time; default: one per core
    gpu-fraction: 0.25                        # share of a GPU that a client takes; default 0
"""

import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedkace_flwr.config import Config, Scalar
from fedkace_flwr.errors import ConfigError

ENGINES = ("flower", "inline")
_KEYS = ("config", "grid", "engine", "workers", "gpu-fraction")
_PATHS = ("data-dir", "cache-dir", "state-dir")  # the engines run elsewhere than the command
_RUNNERS_OWN = ("results-dir", "run-name")


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
    runs : dict of str to Config
        By the name of the run's folder.
    engine : {"flower", "inline"}
        What runs them.
    workers : int
        Clients at work at a time.
    gpu_fraction : float
        Share of a GPU that one client takes.
    """

    name: str
    runs: dict[str, Config]
    engine: str
    workers: int
    gpu_fraction: float


def load_study(path: Path, overrides: Mapping[str, Scalar], results: Path, **options: Any) -> Study:
    """Read a study file.

    Parameters
    ----------
    path : Path
        The YAML file.
    overrides : mapping
        Configuration keys that go before the file's, and before its grid.
    results : Path
        Folder above the studies' folders.
    **options
        ``engine``, ``workers`` and ``gpu_fraction``; None leaves the file's.

    Raises
    ------
    ConfigError
        The file is missing, is not YAML, or holds a key or value that will not do.
    """
    content = _read(path)
    engine = options.get("engine") or content.get("engine", "flower")
    if engine not in ENGINES:
        raise ConfigError(f"{path}: engine = {engine!r}: must be {' or '.join(ENGINES)}")
    workers = _number(path, "workers", options.get("workers"), content, os.cpu_count() or 1, low=1)
    gpu_fraction = _number(path, "gpu-fraction", options.get("gpu_fraction"), content, 0.0, low=0)
    fixed = _mapping(path, content, "config")
    grid = {key: values for key, values in _mapping(path, content, "grid").items() if key not in overrides}
    for key in {*fixed, *grid, *overrides} & set(_RUNNERS_OWN):
        raise ConfigError(f"{path}: {key} is set by the runner; choose the folder with --results")
    for key, values in grid.items():
        if not isinstance(values, list) or not values or len({repr(value) for value in values}) < len(values):
            raise ConfigError(f"{path}: grid: {key} = {values!r}: must be a list of different values")
    folder = (results / path.stem).resolve()
    runs: dict[str, Config] = {}
    for chosen in itertools.product(*grid.values()):
        cell = dict(zip(grid, chosen, strict=True))
        values = {"data-dir": "data", **fixed, **cell, **overrides, "results-dir": str(folder)}
        for key in _PATHS:
            if isinstance(values.get(key), str) and values[key]:
                values[key] = str(Path(values[key]).expanduser().resolve())
        try:
            config = Config.parse(values)
            name = _run_name(config, cell)
            if name in runs:
                raise ConfigError(f"grid: two runs would share the folder {name}; give values whose names differ")
            runs[name] = Config.parse({**values, "run-name": name})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    return Study(path.stem, runs, engine, int(workers), float(gpu_fraction))


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
    except yaml.YAMLError:
        parsed = None
    if not separator or not key or not isinstance(parsed, bool | int | float | str):
        raise ConfigError(f"--set {text}: must be key=value, for example --set overlap=0")
    return key.strip(), parsed


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a study file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = str(error).splitlines()[0]
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: is not YAML ({getattr(error, 'problem', None) or line})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys, among them config")
    for key in content:
        if key not in _KEYS:
            raise ConfigError(f"{path}: unknown key {key!r}; the keys are {', '.join(_KEYS)}")
    return content


def _mapping(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    value = {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{path}: {name}: must hold configuration keys")
    return value


def _number(
    path: Path, name: str, option: float | None, content: Mapping[str, Any], default: float, *, low: float
) -> float:
    value = option if option is not None else content.get(name, default)
    if type(value) not in (type(default), int) or not math.isfinite(value) or value < low:
        kind = "whole number" if isinstance(default, int) else "number"
        raise ConfigError(f"{path}: {name} = {value!r}: must be a {kind} >= {low:g}")
    return float(value)


def _run_name(config: Config, cell: Mapping[str, Any]) -> str:
    """Method, what the grid varies, and the seed."""
    varied = [f"{key}-{value}" for key, value in cell.items() if key not in ("method", "seed")]
    return "_".join([config.method, *varied, f"seed-{config.run.seed}"]).replace("/", "-")
