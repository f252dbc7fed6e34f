"""Regret: how far a run falls short of the Centralized run that it is compared with (paper, section 5.1)."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedkace_flwr.metrics import average_regret
from fedkace_flwr.registry import METHODS
from fedkace_flwr.results.reference_cache import reference_keys


def is_reference(method: str) -> bool:
    """Return whether regret is measured against the method."""
    return method in METHODS and METHODS[method].role == "reference"


def stream_of(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values that a run shares with its reference: those of the keys that the reference depends on.

    Parameters
    ----------
    config : mapping
        A run's configuration keys; others are ignored.
    """
    return tuple(config[name] for name in reference_keys())


def regrets(reference: Sequence[float | None], accuracies: Sequence[float | None]) -> list[float | None]:
    """Return the regret of each round that both have; None if either has no accuracy in it."""
    return [
        None if upper is None or own is None else upper - own for upper, own in zip(reference, accuracies, strict=False)
    ]


def regret(reference: Sequence[float | None], accuracies: Sequence[float | None]) -> float | None:
    """Return AR, the mean regret; None unless both have the same rounds and an accuracy in each."""
    upper = [value for value in reference if value is not None]
    own = [value for value in accuracies if value is not None]
    whole = len(upper) == len(reference) == len(accuracies) == len(own) > 0
    return average_regret(upper, own) if whole else None
