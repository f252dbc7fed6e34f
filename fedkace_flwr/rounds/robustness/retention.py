"""Rejects models that undo a layer of the global one.

Training adds to a layer's weights; it hardly takes away what is there, whatever classes a client has. A layer that was
replaced, or whose rows were exchanged, has lost its part along the global layer. Neither its length nor its direction
need be odd for that: the attack that gives each class the output weights of another one passes as ordinary training.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from fedkace_flwr.messaging.records import NumpyArray, Reply, Weights

FEWEST = 3
"""Smallest number of models that are compared; of two, nobody could say which is odd."""

Shares = dict[str, float]
"""What a model keeps, by the name of the layer's weights."""


def retentions(
    replies: Sequence[Reply], origins: Mapping[int, Weights], parameters: Collection[str]
) -> dict[int, Shares]:
    """How much of each layer's weights W in the model that was sent the new weights V keep: <V, W> / <W, W>.

    Parameters
    ----------
    replies : sequence of Reply
        Replies with a model.
    origins : mapping of int to mapping
        The model that each client was sent.
    parameters : collection of str
        Names of the arrays that are trained. Those with two dimensions or more count, unless they were sent as zeros.

    Returns
    -------
    dict of int to dict
        By client and layer; 1 without training.
    """
    squares: dict[int, Shares] = {}
    found: dict[int, Shares] = {}
    for reply in replies:
        sent = origins[reply.client]
        names = [name for name in sent if name in parameters and sent[name].ndim > 1]
        square = squares.setdefault(id(sent), {name: _product(sent[name], sent[name]) for name in names})
        kept = {name: _product(reply.weights[name], sent[name]) for name in names if square[name]}
        found[reply.client] = {name: part / square[name] for name, part in kept.items()}
    return found


def undoing(kept: Mapping[int, Shares], bound: float) -> dict[int, tuple[str, float]]:
    """The clients that keep less than ``bound`` times the median of some layer.

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
    layers = {name for shares in kept.values() for name in shares}
    least = {name: bound * float(np.median([s[name] for s in kept.values() if name in s])) for name in layers}
    rejected = {}
    for client, shares in kept.items():
        name = min(shares, key=lambda each: shares[each] - least[each], default=None)
        if name is not None and shares[name] < least[name]:
            rejected[client] = name, shares[name]
    return rejected


def _product(first: NumpyArray, second: NumpyArray) -> float:
    return float(np.vdot(first.astype(np.float64), second.astype(np.float64)))
