"""Recognises a model that was sent in an earlier round, exactly or with small changes.

A client that returns an old model takes part of the others' progress back. Its model is far from the one that it was
sent, but not farther than an honest one may be. It is much nearer to the old model, though, and distances to all
earlier models can be estimated from short random projections of them (AMS sketches; Alon, Matias and Szegedy, 1999).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedkace_flwr.messaging.records import Weights
from fedkace_flwr.seeding import seed_for

Sketch = npt.NDArray[np.float32]

LENGTH = 64
"""Numbers in a sketch: squared distances are estimated within about a fifth (standard deviation)."""

_NEAR = 0.1  # an honest model is never ten times nearer to an earlier model than to the one that it was trained from


class EarlierModels:
    """Sketches of all models that were sent in earlier rounds, by the server and by clients.

    Parameters
    ----------
    parameters : frozenset of str
        Names of the arrays that are trained by gradient; the others are not compared.
    seed : int
        The run's seed, from which the projection is drawn.
    """

    def __init__(self, parameters: frozenset[str], seed: int) -> None:
        self._parameters = sorted(parameters)
        self._seed = seed
        self._signs: dict[str, npt.NDArray[np.int8]] = {}
        self._sketches = np.empty((0, LENGTH), dtype=np.float32)
        self._rounds: list[int] = []

    def sketch(self, weights: Weights) -> Sketch:
        """Random projection of a model, float32 (64,); the same projection for all models."""
        total = np.zeros(LENGTH)
        for name in self._parameters:
            values = np.ravel(weights[name]) * self._sign(name, weights[name].size)
            whole = values.size // LENGTH * LENGTH
            total += values[:whole].reshape(-1, LENGTH).sum(axis=0, dtype=np.float64)
            total[: values.size - whole] += values[whole:]
        with np.errstate(over="ignore"):
            return total.astype(np.float32)

    def origin_of(self, model: Sketch, sent: Sketch) -> int | None:
        """Round of an earlier model of which ``model`` is a copy, or None.

        Parameters
        ----------
        model, sent : array
            Sketches of the model that a client returned, and of the one that it was sent.
        """
        if not self._rounds:
            return None
        with np.errstate(over="ignore", invalid="ignore"):  # such a model is not near to any
            moved = float(np.square(model - sent).sum())
            distances = np.square(self._sketches - model).sum(axis=1)
        if not np.isfinite(moved):
            return None
        nearest = int(distances.argmin())
        return self._rounds[nearest] if distances[nearest] < _NEAR**2 * moved else None

    def remember(self, sketches: Sequence[Sketch], number: int) -> None:
        """Remember the sketches of a round's models, of the server's and the clients'."""
        self._sketches = np.concatenate([self._sketches, np.stack(sketches)]) if sketches else self._sketches
        self._rounds += [number] * len(sketches)

    def state(self) -> tuple[Sketch, list[int]]:
        """Sketches, float32 (n, 64), and the round of each."""
        return self._sketches, list(self._rounds)

    def restore(self, sketches: Sketch, rounds: Sequence[int]) -> None:
        """Continue with what :meth:`state` gave."""
        self._sketches, self._rounds = np.array(sketches, dtype=np.float32).reshape(-1, LENGTH), list(rounds)

    def _sign(self, name: str, size: int) -> npt.NDArray[np.int8]:
        if name not in self._signs:
            draws = np.random.default_rng(seed_for(self._seed, "model sketch", name))
            self._signs[name] = 2 * draws.integers(0, 2, size, dtype=np.int8) - 1
        return self._signs[name]
