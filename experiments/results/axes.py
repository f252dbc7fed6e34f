"""What varies between a study's runs: the axes that it names, and what else its runs turn out to differ in.

Several commands may have put runs into one folder, with other axes or with other values of keys that are on no axis.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fedkace_flwr.config import Config, keys_affecting, keys_of_other_methods
from fedkace_flwr.experiments.results.reading import Record
from fedkace_flwr.keys import kebab, keys_of
from fedkace_flwr.registry import METHODS

# These keys affect numbers only through rounding, a run that stops, or values that are not recorded; none is an axis.
_NOT_AXES = frozenset({"device", "deterministic", "quorum", "diagnostics", "evaluate", "report-classes"})
_UNKNOWN = "-"
_SHORT = 8  # figures of a digest
_NAMED = 4  # repeated runs that are named


@dataclass(frozen=True)
class Axes:
    """What varies between the runs of a study.

    Attributes
    ----------
    names : tuple of str
        The axes; ``seed`` is last.
    labels : mapping
        Maps each listed run to its values on the axes.
    notes : tuple of str
        What the reader of the results must know of how they were put together.
    repeats : frozenset of str
        Runs with the configuration of an earlier one, which means must not count twice.
    """

    names: tuple[str, ...]
    labels: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...] = ()
    repeats: frozenset[str] = frozenset()


def axes_of(
    configs: Mapping[str, Record],
    told: Record | None,
    finished: Iterable[str] = (),
    digests: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Axes:
    """Return the axes of a study.

    A value that ``study.json`` lacks is that of the run's configuration. A key in which runs differ becomes an axis
    unless an axis decides its value, so that no mean is taken over runs of different configurations. So does the digest
    of data or of a file in which runs differ that have the same values on the axes.

    Parameters
    ----------
    configs : mapping
        The configuration of each run that has begun, by its name.
    told : mapping, optional
        The content of ``study.json``.
    finished : iterable of str
        The finished runs, which are preferred among those of one configuration.
    digests : mapping
        The digests of each run's data and files, by its name and their keys.
    """
    notes = []
    if told is None:
        names = ["data" if key == "dataset" else key for key in _differing(list(configs.values()))]
        order = {"data": 0, "method": 8}
        names.sort(key=lambda axis: order.get(axis, 5))
        labels = {run: {axis: config[_key(axis)] for axis in names} for run, config in configs.items()}
    else:
        every = [told["axes"], *told["runs"].values()]
        names = list(dict.fromkeys(axis for each in every for axis in each))
        labels = _filled(names, told["runs"], configs)
        known = {_key(axis) for axis in names} | {"seed"}
        more = [
            key
            for key in _differing(list(configs.values()))
            if key not in known and not _is_decided(key, labels, configs, told.get("keys") or {})
        ]
        if more:
            names += more
            labels = _filled(names, labels, configs)
            notes.append(
                f"The runs were made with different values of {', '.join(more)}, which the study does not vary; they "
                "are shown apart."
            )
    for key in _of_several_contents(labels, digests):
        names.append(f"{key} digest")
        for run, values in labels.items():
            values[names[-1]] = digests.get(run, {}).get(key, _UNKNOWN)[:_SHORT]
        notes.append(f"The runs were made with different contents of {key}; they are shown apart.")
    names.sort(key=lambda axis: axis == "seed")
    repeats = _repeats(labels, configs, set(finished))
    if repeats:
        words = [f"{run} repeats {first}" for run, first in list(repeats.items())[:_NAMED]]
        words += [f"and {len(repeats) - _NAMED} more"] if len(repeats) > _NAMED else []
        notes.append(f"Runs with the same configuration count once: {', '.join(words)}.")
    return Axes(tuple(names), labels, tuple(notes), frozenset(repeats))


def variant_axes(cells: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the axes that name variants of methods: groups of keys, each of which is of one method.

    Parameters
    ----------
    cells : iterable of mapping
        The values of each run on the axes, ``method`` among them; without it there are no variants.
    """
    every = [cell for cell in cells if "method" in cell]
    if len({cell["method"] for cell in every}) < 2:
        return ()
    keys = Config().flat()
    found = []
    for axis in dict.fromkeys(axis for cell in every for axis in cell if _key(axis) not in keys):
        pairs = {(cell.get(axis), cell["method"]) for cell in every}
        if len(pairs) == len({value for value, _ in pairs}):
            found.append(axis)
    return tuple(found)


def _differing(configs: Sequence[Record]) -> list[str]:
    """Return the keys in which runs differ whose numbers they affect, but for what the methods themselves set."""
    presets = {(name, key) for name, method in METHODS.items() for key in method.preset}
    own = {
        kebab(name)
        for method in METHODS.values()
        if method.role == "reference"
        for each in method.keys
        for name in keys_of(each)
    }
    affecting = keys_affecting("numbers") - _NOT_AXES - own
    unread = {config["method"]: keys_of_other_methods(config["method"]) for config in configs}
    found = []
    for key in affecting.intersection(*configs):
        pairs = {(config["method"], repr(config[key])) for config in configs if key not in unread[config["method"]]}
        chosen = {value for method, value in pairs if (method, key) not in presets}
        if len(chosen) > 1 or len(pairs) > len({method for method, _ in pairs}):
            found.append(key)
    return sorted(found, key=list(Config().flat()).index)


def _key(axis: str) -> str:
    return "dataset" if axis == "data" else axis


def _filled(
    names: Sequence[str], runs: Mapping[str, Mapping[str, Any]], configs: Mapping[str, Record]
) -> dict[str, dict[str, Any]]:
    """Return the runs' values on the axes; those that are missing are taken from their configurations."""
    named = {axis: [labels[axis] for labels in runs.values() if axis in labels] for axis in names}

    def value(run: str, axis: str) -> Any:
        found = configs.get(run, {}).get(_key(axis), _UNKNOWN)
        return next((label for label in named[axis] if label == found), found)  # 1 where others have 1, not 1.0

    return {
        run: {axis: labels[axis] if axis in labels else value(run, axis) for axis in names}
        for run, labels in runs.items()
    }


def _is_decided(
    key: str,
    labels: Mapping[str, Mapping[str, Any]],
    configs: Mapping[str, Record],
    keys: Mapping[str, Sequence[str]],
) -> bool:
    """Return whether a run's value on one axis tells its value of the key.

    ``keys`` has the keys that an axis sets. Files of earlier versions lack it; any of their axes may set the key but
    the seed and, as its presets have been left out, the method.
    """
    reading = (run for run, config in configs.items() if key not in keys_of_other_methods(config["method"]))
    values = {run: repr(configs[run][key]) for run in reading}
    axes = next(iter(labels.values()), {})
    setting = [axis for axis in axes if (key in keys[axis] if axis in keys else axis not in ("seed", "method"))]
    return any(
        len({(repr(labels[run][axis]), value) for run, value in values.items()})
        == len({repr(labels[run][axis]) for run in values})
        for axis in setting
    )


def _of_several_contents(
    labels: Mapping[str, Mapping[str, Any]], digests: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Return the keys whose digests differ between runs with the same values on all axes but method and seed."""
    contents: dict[tuple[str, str], set[str]] = {}
    for run, values in labels.items():
        place = repr(sorted((axis, repr(value)) for axis, value in values.items() if axis not in ("method", "seed")))
        for key, digest in digests.get(run, {}).items():
            contents.setdefault((key, place), set()).add(digest)
    return list(dict.fromkeys(key for (key, _), found in contents.items() if len(found) > 1))


def _repeats(
    labels: Mapping[str, Mapping[str, Any]], configs: Mapping[str, Record], finished: set[str]
) -> dict[str, str]:
    """Return each run that has the configuration of another one, and the name of that."""
    first: dict[str, str] = {}
    repeats = {}
    begun = (run for run in labels if run in configs)
    for run in sorted(begun, key=lambda run: run not in finished):
        config = configs[run]
        place = repr((config["method"], config["seed"], sorted((axis, repr(v)) for axis, v in labels[run].items())))
        if place in first:
            repeats[run] = first[place]
        else:
            first[place] = run
    return repeats
