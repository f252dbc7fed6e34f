"""What a study file takes from others: the keys of its base, the runs of another study, the changes of a scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkace_flwr.config import all_keys
from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.experiments.studies.yaml_file import read_yaml
from fedkace_flwr.keys import PLAIN_NAME, is_plain_name

FULL = "full"
"""The scale at which a file stands as it is written."""

_KEYS = ("title", "note", "config", "grid", "scales", "paper", "base", "engine", "workers", "gpu-fraction")
_BORROWER_KEYS = ("same-runs-as", "only")
_SCALED_KEYS = ("config", "grid")
_MOST_BASES = 20
_MOST_PATTERNS = 100


@dataclass(frozen=True)
class StudyFile:
    """A study file with everything that it inherits.

    Attributes
    ----------
    path : Path
        The file that defines the runs: another one than was asked for where that says ``same-runs-as``.
    content : mapping
        The file's keys, together with those of its bases.
    only : sequence of str
        Patterns that select the runs; empty selects all of them.
    """

    path: Path
    content: Mapping[str, Any]
    only: Sequence[str] = ()


def read_study_file(path: Path) -> StudyFile:
    """Read a study file, its bases, and the file named by ``same-runs-as``.

    Raises
    ------
    ConfigError
        A file cannot be read, has an unknown key, or refers to others without end.
    """
    content = _with_bases(path)
    if "same-runs-as" not in content:
        return StudyFile(path, content)
    lender, patterns = content["same-runs-as"], content.get("only", ["*"])
    if not isinstance(lender, str) or not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise ConfigError(f"{path}: same-runs-as must name a study file, only must be a list of patterns")
    if len(patterns) > _MOST_PATTERNS:
        raise ConfigError(f"{path}: only has {len(patterns)} patterns; must be at most {_MOST_PATTERNS}")
    lent = path.parent / lender
    content = _with_bases(lent)
    if "same-runs-as" in content:
        raise ConfigError(f"{lent}: same-runs-as: must name a study with runs of its own")
    return StudyFile(lent, content, patterns)


def at_scale(content: Mapping[str, Any], scale: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``config`` and ``grid`` of a study at one of its scales.

    Raises
    ------
    ConfigError
        The file has no such scale, or holds something other than keys there.
    """
    scales = _mapping(content, "scales")
    if scale != FULL and scale not in scales:
        known = [FULL, *scales]
        raise ConfigError(f"--scale {scale}: the file has {', '.join(known)}{closest(scale, known)}")
    if not is_plain_name(scale):  # it becomes a part of the folder's name
        raise ConfigError(f"scales: {scale!r:.200}: must be {PLAIN_NAME}")
    part = _mapping(scales, scale)
    for key in part:
        if key not in _SCALED_KEYS:
            hint = closest(str(key), _SCALED_KEYS)
            raise ConfigError(
                f"scales: {scale}: unknown key {key!r:.100}; the keys are {', '.join(_SCALED_KEYS)}{hint}"
            )
    config, grid = ({**_mapping(content, name), **_mapping(part, name)} for name in _SCALED_KEYS)
    return config, grid


def merged(base: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """A file's keys on top of its base's: ``config``, ``grid`` and each scale are merged key by key."""
    result = {**base, **content}
    for name in _SCALED_KEYS:
        if isinstance(base.get(name), dict) and isinstance(content.get(name), dict):
            result[name] = {**base[name], **content[name]}
    if isinstance(base.get("scales"), dict) and isinstance(content.get("scales"), dict):
        ours, theirs = content["scales"], base["scales"]
        result["scales"] = {scale: _merged_scale(theirs, ours, scale) for scale in {**theirs, **ours}}
    return result


def _merged_scale(theirs: Mapping[str, Any], ours: Mapping[str, Any], scale: str) -> Any:
    below, above = theirs.get(scale), ours.get(scale)
    if isinstance(below, dict | None) and isinstance(above, dict | None):
        return merged(below or {}, above or {})
    return ours.get(scale, below)


def _with_bases(path: Path, users: tuple[Path, ...] = ()) -> dict[str, Any]:
    content = read_yaml(path)
    known = _BORROWER_KEYS if "same-runs-as" in content else _KEYS
    for key in content:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r:.100}; {_cure(key, known)}")
    if "base" not in content:
        return content
    base, users = path.parent / str(content.pop("base")), (*users, path)
    if len(users) > _MOST_BASES:
        raise ConfigError(f"{path}: base: the files name each other without end")
    return merged(_with_bases(base, users), content)


def _cure(key: Any, known: Sequence[str]) -> str:
    if key in {name for _, name, _ in all_keys()}:
        return "it is a configuration key: put it under config:, or under grid: with a list of values"
    return f"the keys are {', '.join(known)}{closest(str(key), known)}"


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    value = {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name}: must hold configuration keys")
    return value
