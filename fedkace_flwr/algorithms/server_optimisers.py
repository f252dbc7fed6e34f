"""Optimisers of the server (Reddi et al., ICLR 2021, "Adaptive Federated Optimization", algorithm 2).

In place of the aggregate of the clients' models, the server takes a step towards it. Its distance from the global model
counts as a gradient, D:

- ``momentum`` (FedAvgM; Hsu et al., 2019): m <- beta1 m + D, and the model moves by eta m;
- ``adam`` (FedAdam): m <- beta1 m + (1 - beta1) D and v <- beta2 v + (1 - beta2) D^2, and the model moves by
  eta m / (sqrt(v) + tau), without Adam's correction of the first steps, which the algorithm leaves out;
- ``yogi`` (FedYogi): the same with v <- v - (1 - beta2) D^2 sign(v - D^2).

m starts at 0, and v at tau^2.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

BETA1, BETA2, TAU = 0.9, 0.99, 1e-3
"""The publication's; tau, which it tunes too, is the value that it recommends."""

_STATE = "server-optimiser."


class ServerOptimiser:
    """Takes the steps of one run.

    Parameters
    ----------
    name : str
        ``none``, ``momentum``, ``adam`` or ``yogi``.
    rate : float
        The server's learning rate, eta.
    """

    def __init__(self, name: str, rate: float) -> None:
        self._name, self._rate = name, rate
        self._state: dict[str, Array] = {}

    @property
    def is_on(self) -> bool:
        """Whether there are steps to take."""
        return self._name != "none"

    def step(
        self, model: Mapping[str, Array], aggregate: Mapping[str, Array], parameters: Collection[str]
    ) -> dict[str, Array]:
        """The new global model; what is no parameter is the aggregate's.

        A variance among batch-norm statistics could become negative if it went further than the aggregate.

        Parameters
        ----------
        model, aggregate : mapping
            The global model, and the aggregate of the clients' models; arrays by name, computed with in float64.
        parameters : collection of str
            Names of the arrays that are trained by gradient.
        """
        return {
            name: self._moved(name, model[name], array) if name in parameters else array
            for name, array in aggregate.items()
        }

    def state(self) -> dict[str, Array]:
        """What later steps need; its arrays are replaced, not changed."""
        return {f"{_STATE}{name}": array for name, array in self._state.items()}

    def restored(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Continue with what :meth:`state` gave, among other arrays, and return the others."""
        own = [name for name in arrays if name.startswith(_STATE)]
        self._state = {name.removeprefix(_STATE): arrays[name] for name in own}
        return {name: array for name, array in arrays.items() if name not in own}

    def _moved(self, name: str, old: Array, new: Array) -> Array:
        distance = new.astype(np.float64) - old
        first = BETA1 * self._recalled("first", name, distance, 0.0)
        first += distance if self._name == "momentum" else (1 - BETA1) * distance
        self._state[f"first.{name}"] = np.asarray(first, dtype=old.dtype)
        if self._name == "momentum":
            return np.asarray(old + self._rate * first, dtype=old.dtype)
        second, square = self._recalled("second", name, distance, TAU**2), np.square(distance)
        towards = np.sign(second - square) * square if self._name == "yogi" else second - square
        second = second - (1 - BETA2) * towards
        self._state[f"second.{name}"] = np.asarray(second, dtype=old.dtype)
        return np.asarray(old + self._rate * first / (np.sqrt(second) + TAU), dtype=old.dtype)

    def _recalled(self, kind: str, name: str, like: Floats, start: float) -> Floats:
        found = self._state.get(f"{kind}.{name}")
        return np.full_like(like, start) if found is None else found.astype(np.float64)
