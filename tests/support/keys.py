"""Every configuration key, by name."""

from dataclasses import fields, is_dataclass
from typing import Any

from fedkace_flwr.config import Config, Key


def _keys() -> dict[str, tuple[Any, Key]]:
    """Every key with its default and meaning, read off the dataclasses."""
    found: dict[str, tuple[Any, Key]] = {}
    for part in (Config(), *(getattr(Config(), f.name) for f in fields(Config))):
        if is_dataclass(part):
            found |= {f.name.replace("_", "-"): (f.default, f.metadata["key"]) for f in fields(part) if f.metadata}
    return found


KEYS = _keys()
