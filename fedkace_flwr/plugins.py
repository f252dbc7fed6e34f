"""Networks, data sets, methods and simulated attacks of other packages, found by their entry points.

A package declares what it adds in its ``pyproject.toml``, for instance in ``[project.entry-points."fedkace_flwr.networks"]``.
Its code is imported only if a configuration names what it adds, so that a broken package harms no other run.
"""

import logging
import sys
from collections.abc import Collection
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import is_plain_name

logger = logging.getLogger(__name__)

Kind = Literal["network", "dataset", "method", "attack"]
"""What a package may add; also the key that names it."""


def found(kind: Kind) -> list[str]:
    """Return the names that other packages add, sorted; none of them is imported."""
    return sorted(_entries(kind, tuple(sys.path)))


def loaded(kind: Kind, name: str) -> object | None:
    """Import what another package adds under a name; None if there is no such entry point.

    Raises
    ------
    ConfigError
        It cannot be imported, or several packages use the name.
    """
    entries = _entries(kind, tuple(sys.path)).get(name, ())
    if not entries:
        return None
    if len(entries) > 1:
        packages = ", ".join(_package(entry) for entry in entries)
        raise ConfigError(
            f"{kind} = {name!r}: is an entry point of several packages, {packages}; one must be uninstalled"
        )
    (entry,) = entries
    try:
        return entry.load()  # type: ignore[no-any-return]
    except (Exception, SystemExit) as fault:  # another package's code may raise anything
        raise broken(kind, name, f"cannot be loaded ({type(fault).__name__}: {fault})") from fault


def broken(kind: Kind, name: str, fault: str) -> ConfigError:
    """Return the error for an entry point that cannot be used, which names its package."""
    entries = _entries(kind, tuple(sys.path)).get(name, ())
    value, package = (entries[0].value, _package(entries[0])) if entries else ("?", "an unknown package")
    return ConfigError(f"{kind} = {name!r}: entry point {value} of {package} {fault}")


def warn_of_replacements(kind: Kind, name: str, own: Collection[str]) -> None:
    """Log a warning if another package adds something under a name of this package, which is not replaced."""
    for entry in _entries(kind, tuple(sys.path)).get(name, ()) if name in own else ():
        logger.warning(
            "%s = %r: is fedkace_flwr's own; the entry point of the same name of %s is ignored",
            kind,
            name,
            _package(entry),
        )


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"


@lru_cache(maxsize=16)
def _entries(kind: Kind, path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """The entry points by name; those whose names could lead out of a folder do not count."""
    entries: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=f"fedkace_flwr.{kind}s"):
        if is_plain_name(entry.name) and entry not in entries.get(entry.name, ()):
            entries[entry.name] = (*entries.get(entry.name, ()), entry)
    return entries
