"""Rejects models that undo a layer of the global one.

Training adds to a layer's weights; it hardly takes away what is there, whatever classes a client has. A layer that was
replaced, or whose rows were exchanged, has lost its part along the global layer. Neither its length nor its direction
need be odd for that: the attack that gives each class the output weights of another one passes as ordinary training.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedkace_flwr.messaging.records import NumpyArray, Reply, Weights

FEWEST = 3
"""Smallest number of models that are compared; of two, nobody could say which is odd."""

_DEVIATIONS = 3.0


@dataclass(frozen=True)
class Retention:
    """What a client keeps of a layer.

    Attributes
    ----------
    share : float
        <V, W> / <W, W> for the layer's weights W in the model that was sent and the new ones V; 1 without training.
    chance : float
        Standard deviation of the share if V - W had a random direction: |V - W| / (|W| sqrt(n)) for n weights.
    """

    share: float
    chance: float


Retentions = dict[str, Retention]
"""By the name of the layer's weights."""


def retentions(
    replies: Sequence[Reply], origins: Mapping[int, Weights], parameters: Collection[str]
) -> dict[int, Retentions]:
    """What each client keeps of each layer.

    Parameters
    ----------
    replies : sequence of Reply
        Replies with a model.
    origins : mapping of int to mapping
        The model that each client was sent.
    parameters : collection of str
        Names of the arrays that are trained. Those with two dimensions or more count, unless they were sent as zeros.
    """
    squares: dict[int, dict[str, float]] = {}
    found: dict[int, Retentions] = {}
    for reply in replies:
        sent = origins[reply.client]
        names = [name for name in sent if name in parameters and sent[name].ndim > 1]
        square = squares.setdefault(id(sent), {name: _product(sent[name], sent[name]) for name in names})
        found[reply.client] = {
            name: _retention(reply.weights[name], sent[name], square[name]) for name in names if square[name]
        }
    return found


def undoing(kept: Mapping[int, Retentions], bound: float) -> dict[int, tuple[str, float]]:
    """The clients that keep less of some layer than ``bound`` times the median, by more than chance explains.

    Chance matters where updates are longer than the layer: in small layers that have hardly been trained, and under the
    noise of differential privacy. Three standard deviations are granted, by the median of :attr:`Retention.chance`.

    Parameters
    ----------
    kept : mapping of int to dict
        As :func:`retentions` returns it; of fewer than three clients none is rejected.
    bound : float
        Between 0 and 1; 0: nobody is rejected.

    Returns
    -------
    dict of int to (str, float)
        By client, the name of the layer that it keeps least, and the share that it keeps.
    """
    if not bound or len(kept) < FEWEST:
        return {}
    least = {}
    for name in {name for layers in kept.values() for name in layers}:
        held = [layers[name] for layers in kept.values() if name in layers]
        usual, chance = (float(np.median([getattr(each, part) for each in held])) for part in ("share", "chance"))
        least[name] = bound * usual - _DEVIATIONS * chance
    rejected = {}
    for client, layers in kept.items():
        worst = min(layers, key=lambda each: layers[each].share - least[each], default=None)
        if worst is not None and layers[worst].share < least[worst]:
            rejected[client] = worst, layers[worst].share
    return rejected


def _retention(new: NumpyArray, sent: NumpyArray, square: float) -> Retention:
    update = new.astype(np.float64) - sent
    share = 1.0 + _product(update, sent) / square
    return Retention(share, math.sqrt(_product(update, update) / square / update.size))


def _product(first: NumpyArray, second: NumpyArray) -> float:
    return float(np.vdot(first.astype(np.float64, copy=False), second.astype(np.float64, copy=False)))
