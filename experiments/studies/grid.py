"""A study's grid: from axes to the configuration and the name of each run."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.studies.yaml_file import typed
from fedkace_flwr.keys import Scalar

_MOST_RUNS = 100_000


@dataclass(frozen=True)
class Axis:
    """One axis of a grid.

    Attributes
    ----------
    name : str
        A configuration key, or a name of its own where the points are named groups of keys.
    points : mapping
        From each point's label to the configuration keys that it sets.
    grouped : bool
        Whether the points are named groups.
    """

    name: str
    points: Mapping[Scalar, Mapping[str, Any]]
    grouped: bool

    @classmethod
    def parse(cls, name: str, values: Any) -> "Axis":
        """Read an axis: a list of different values, or a mapping of named groups.

        Raises
        ------
        ConfigError
            The values are neither.
        """
        if isinstance(values, list):
            points = {_label(value): {name: value} for value in (typed(name, value) for value in values)}
            if 0 < len(values) == len(points):
                return cls(name, points, grouped=False)
        if isinstance(values, dict) and values and all(isinstance(group or {}, dict) for group in values.values()):
            groups = {
                label: {key: typed(key, value) for key, value in (group or {}).items()}
                for label, group in values.items()
            }
            return cls(name, groups, grouped=True)
        raise ConfigError(
            f"grid: {name:.100} = {values!r:.200}: must be a list of different values, or named groups of keys"
        )

    @property
    def keys(self) -> set[str]:
        """All configuration keys that its points set."""
        return {key for values in self.points.values() for key in values}


def parse_grid(grid: Mapping[str, Any], overridden: Sequence[str]) -> list[Axis]:
    """Read the axes of a grid; those without values and those that the command line overrides are dropped.

    Raises
    ------
    ConfigError
        An axis is malformed, two axes set one key, or the grid makes too many runs.
    """
    axes = [Axis.parse(name, values) for name, values in grid.items() if name not in overridden and values != ""]
    for key, count in Counter(key for axis in axes for key in axis.keys).items():
        if count > 1:
            raise ConfigError(f"grid: {key} is on two axes")
    size = math.prod(len(axis.points) for axis in axes)
    if size > _MOST_RUNS:
        raise ConfigError(f"grid: makes {size} runs, more than {_MOST_RUNS}")
    return axes


def combinations(axes: Sequence[Axis]) -> Iterator[tuple[dict[str, Scalar], dict[str, Any]]]:
    """All combinations of the axes' points; the last axis varies fastest.

    Yields
    ------
    labels : dict
        The label of the chosen point on each axis.
    values : dict
        The configuration keys that the chosen points set.
    """
    for chosen in itertools.product(*(axis.points.items() for axis in axes)):
        labels = {axis.name: label for axis, (label, _) in zip(axes, chosen, strict=True)}
        yield labels, {key: value for _, values in chosen for key, value in values.items()}


def run_name(config: Config, axes: Sequence[Axis], labels: Mapping[str, Scalar]) -> str:
    """Method, the labels of the other axes (a group's without the axis's name), and the seed."""
    varied = [
        str(labels[axis.name]) if axis.grouped else f"{axis.name}-{labels[axis.name]}"
        for axis in axes
        if axis.name not in ("method", "seed")
    ]
    return "_".join([config.method, *varied, f"seed-{config.run.seed}"]).replace("/", "-")


def _label(value: Any) -> Scalar:
    return value if isinstance(value, Scalar) else repr(value)
