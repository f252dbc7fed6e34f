"""What a study file takes from others: the keys of its base; and the changes of a scale."""

from collections.abc import Mapping
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
_SCALED_KEYS = ("config", "grid")


@dataclass(frozen=True)
class StudyFile:
    """The path of a study file, and its keys together with those of its bases."""

    path: Path
    content: Mapping[str, Any]


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
            hint = closest(key, _SCALED_KEYS)
            raise ConfigError(f"scales: {scale}: unknown key {key!r:.100}; the keys are config, grid{hint}")
    config, grid = ({**_mapping(content, name), **_mapping(part, name)} for name in _SCALED_KEYS)
    return config, grid


def merged(base: Mapping[str, Any], content: Mapping[str, Any], levels: int = 2) -> dict[str, Any]:
    """A file's keys on top of its base's: ``config``, ``grid`` and each scale are merged key by key."""
    result = {**base, **content}
    for name in base.keys() & content.keys() if levels > 1 else ():
        below, above = base[name], content[name]
        if isinstance(below, dict) and isinstance(above, dict):
            result[name] = merged(below, above, 3 if name == "scales" else levels - 1)
    return result


def read_study_file(path: Path, users: tuple[Path, ...] = ()) -> StudyFile:
    """Read a study file and its bases; ``users`` are the files that it is a base of.

    Raises
    ------
    ConfigError
        A file cannot be read, has an unknown key, or is a base of itself.
    """
    content = read_yaml(path)
    for key in content:
        if key not in _KEYS:
            raise ConfigError(f"{path}: unknown key {key!r:.100}; {_cure(key)}")
    if "base" not in content:
        return StudyFile(path, content)
    base = path.parent / str(content.pop("base"))
    if base in users:
        raise ConfigError(f"{path}: base: the files name each other without end")
    return StudyFile(path, merged(read_study_file(base, (*users, path)).content, content))


def _cure(key: str) -> str:
    if key in {name for _, name, _ in all_keys()}:
        return "it is a configuration key: put it under config:, or under grid: with a list of values"
    return f"the keys are {', '.join(_KEYS)}{closest(key, _KEYS)}"


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: must hold configuration keys")
    return value
