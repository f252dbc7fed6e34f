"""Regret: how far a run falls short of the Centralized run that it is compared with (paper, section 5.1)."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkace_flwr.experiments.results.folders import is_set_aside
from fedkace_flwr.experiments.results.recorded import Run
from fedkace_flwr.metrics import average_regret
from fedkace_flwr.registry import METHODS
from fedkace_flwr.results.digests import DATA
from fedkace_flwr.results.reference_cache import reference_keys, stream_keys


class References:
    """The Centralized runs among some runs: those that have all their rounds and were not set aside.

    Parameters
    ----------
    runs : iterable of (Run, mapping)
        The runs, with their configuration keys; other keys are ignored.

    Raises
    ------
    ResultsError
        A file of a Centralized run is damaged.
    """

    def __init__(self, runs: Iterable[tuple[Run, Mapping[str, Any]]]) -> None:
        self._known = defaultdict[tuple[Any, ...], list[tuple[Run, Any, Mapping[str, str]]]](list)
        for run, config in runs:
            if is_reference(config["method"]) and run.is_complete(config["rounds"]) and not is_set_aside(_place(run)):
                self._known[_stream(config)].append((run, config["precision"], run.digests()))

    def nearest(self, run: Run, config: Mapping[str, Any]) -> Run | None:
        """Return the reference of a run, which has the same data, stream, training and seed; None if there is none.

        If possible, it is of the same study; then, of the same precision. Data and weights files whose digests are not
        known, as those of earlier versions, count as the same.

        Raises
        ------
        ResultsError
            The run's environment is damaged.
        """
        study, digests = _place(run).parent, run.digests()
        found = [
            (_place(other).parent != study, precision != config["precision"], _place(other).name, other)
            for other, precision, others in self._known.get(_stream(config), ())
            if _same_files(digests, others)
        ]
        return min(found, key=lambda each: each[:3])[-1] if found else None


def is_reference(method: str) -> bool:
    """Return whether regret is measured against the method."""
    return method in METHODS and METHODS[method].role == "reference"


def same_stream(one: tuple[Run, Mapping[str, Any]], other: tuple[Run, Mapping[str, Any]]) -> bool:
    """Return whether two runs, given with their configuration keys, have the same data and stream."""
    data = {run.digests().get(DATA) for run, _ in (one, other)} - {None}
    return len(data) < 2 and all(one[1][key] == other[1][key] for key in stream_keys())


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


def _place(run: Run) -> Path:
    return run.folder.resolve()


def _stream(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of the keys that a run's reference depends on."""
    return tuple(config[name] for name in reference_keys())


def _same_files(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether the data and the files of two runs are the same, as far as both have digests of them."""
    return all(one[key] == other[key] for key in one.keys() & other.keys())
