"""The names of methods, cells and configuration keys in a report, and the order and colours of its lines."""

from collections.abc import Iterable, Mapping
from typing import Any

from fedkace_flwr.data.readers.mnist import EMNIST
from fedkace_flwr.registry import METHODS, Role
from fedkace_flwr.sections import DataConfig

COLOURS = (
    *("#c2410c", "#0b63a5", "#00755a", "#a83c78", "#806000"),
    *("#5a4fc0", "#0e7f8a", "#9c4a2a", "#5c6470", "#3d7a1f"),
)
"""Colours of lines; the first belongs to FedKACE where it takes part."""

INK, MUTED = "#16202b", "#8a8f98"
"""Colours of the reference (Centralized) and of chance."""

_ROLES: tuple[Role, ...] = ("method", "rival", "ablation", "reference")
_SYMBOLS = {"overlap": "O", "epochs": "J", "clients": "K", "capacity": "M", "rounds": "T", "window": "W"}
_DATA = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "imagenet100": "ImageNet100",
    "mnist": "MNIST",
    **{f"emnist-{split}": f"EMNIST {split}" for split in EMNIST},
    "folder": "folder of images",
}


def method_name(method: str) -> str:
    """Return a method's name as reports spell it."""
    return (METHODS[method].label if method in METHODS else "") or method


def variant_name(method: str, values: Iterable[Any]) -> str:
    """Return the name of a method's variant: ``FedKACE-parts`` for ``fedkace-parts``, ``FedKACE`` for ``fedkace``.

    A value that does not begin with the method's own name follows in brackets: ``FedKACE (wide)``.
    """
    name = method_name(method)
    for value in map(str, values):
        if value.startswith(f"{method}-"):
            name += value.removeprefix(method)
        elif value != method:
            name += f" ({value})"
    return name


def role(method: str) -> Role:
    """Return a method's role in a comparison; an unregistered method is a rival."""
    return METHODS[method].role if method in METHODS else "rival"


def method_rank(method: str) -> tuple[int, int, str]:
    """Return a sort key: by role, then in the registry's order, with unregistered methods last and by name."""
    order = list(METHODS)
    return _ROLES.index(role(method)), order.index(method) if method in METHODS else len(order), method


def ranked(lines: Mapping[str, str]) -> list[str]:
    """Return the names of lines, of which the mapping gives the methods, in the order of their methods."""
    return sorted(lines, key=lambda name: (method_rank(lines[name]), name))


def colours(lines: Mapping[str, str]) -> dict[str, str]:
    """Return each line's colour, given its method; colours repeat from the eleventh line on."""
    return {
        name: INK if role(lines[name]) == "reference" else COLOURS[index % len(COLOURS)]
        for index, name in enumerate(ranked(lines))
    }


def data_of(run: Mapping[str, Any]) -> str:
    """Return the name of the data that a run learned, given its configuration keys."""
    return DataConfig(dataset=run["dataset"]).name


def data_name(data: str) -> str:
    """Return a data set's name as reports spell it."""
    return _DATA.get(data, data)


def axis_label(axis: str, value: Any) -> str:
    """Return a value on an axis: ``CIFAR-100``, ``O=4``, ``batching=paired``."""
    if axis == "data":
        return data_name(str(value))
    if axis == "method":
        return method_name(str(value))
    return f"{_SYMBOLS.get(axis, axis)}={value}"


def labelled(values: Mapping[str, Any]) -> str:
    """Return the values on several axes: ``CIFAR-100, O=4``."""
    return ", ".join(axis_label(axis, value) for axis, value in values.items())


def symbols_note(texts: Iterable[str]) -> str:
    """Return what the letters in labels stand for, such as ``O: overlap, J: epochs.``; empty if there are none."""
    words = {word.partition("=")[0] for text in texts for word in text.split(", ") if "=" in word}
    known = ", ".join(f"{symbol}: {axis}" for axis, symbol in _SYMBOLS.items() if symbol in words)
    return f"{known}." if known else ""
