"""Scales down what a client moved farther than others, layer by layer.

The length of an update bounds a client's influence on the mean. It is compared for each layer by itself, because a
short update of the output layer alone can do more harm than a long one of all layers. AdamW moves each weight by about
its learning rate per step, so honest clients move a layer about equally far. A layer's batch statistics are compared
apart from its parameters, and its bias together with its weights: there are too few biases to be compared alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedkace_flwr.messaging import validation as plausibility
from fedkace_flwr.messaging.records import NumpyArray, Reply, Weights
from fedkace_flwr.messaging.validation import Yardstick
from fedkace_flwr.privacy.noise import MEAN, VARIANCE

Floats = npt.NDArray[np.float64]


class Clipping:
    """Clips updates at a multiple of the usual length of each layer's update.

    The usual length is the median over the replies, whatever the number of samples that a client says it trained on.
    Variances are compared and scaled as standard deviations, and integer counters are left alone. A layer that most
    clients did not move is set back.

    Parameters
    ----------
    bound : float
        Multiple of the usual length, at least 1; 0: nothing is clipped.

    Attributes
    ----------
    usual : dict of str to Yardstick
        What was usual in the latest round with three replies or more, by layer.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self.usual: dict[str, Yardstick] = {}

    def __call__(self, replies: Sequence[Reply], origins: Mapping[int, Weights]) -> tuple[list[Reply], dict[int, int]]:
        """Clip a round's updates.

        Parameters
        ----------
        replies : sequence of Reply
            Replies with a model.
        origins : mapping of int to mapping
            The model that each client was sent.

        Returns
        -------
        replies : list of Reply
            The same replies, with clipped models.
        clipped : dict of int to int
            Number of layers that were scaled down, by client; clients without any are absent.
        """
        models: dict[int, dict[str, NumpyArray]] = {}
        counts: dict[int, int] = {}
        if not self._bound or not replies:
            return list(replies), counts
        samples = [reply.examples for reply in replies]
        for layer, names in layers(replies[0].weights).items():
            lengths = [_length(reply.weights, origins[reply.client], names) for reply in replies]
            usual = plausibility.yardstick(lengths, samples, self.usual.get(layer))
            if usual is None:
                continue
            self.usual[layer] = usual
            for reply, length in zip(replies, lengths, strict=True):
                largest = self._bound * usual.distance
                if length > largest:
                    shorter = _shortened(reply.weights, origins[reply.client], names, largest / length)
                    models.setdefault(reply.client, {}).update(shorter)
                    counts[reply.client] = counts.get(reply.client, 0) + 1
        return [replace(each, weights={**each.weights, **models.get(each.client, {})}) for each in replies], counts


def set_to_middle(replies: Sequence[Reply], bound: float) -> tuple[list[Reply], dict[int, int]]:
    """Replace batch statistics that lie far from the others' by their middle.

    Between two rounds honest clients take their statistics back to what their images give, however far the global
    model's have been moved. Their updates then are long, and so is what counts as usual: bounded by the length of its
    updates alone, one client could move the statistics farther in each round. Where honest statistics lie does not
    depend on that. Their middle is the median of each number over the replies, of standard deviations for variances.

    Parameters
    ----------
    replies : sequence of Reply
        Replies of clients that were sent the same model; with fewer than three there is no middle.
    bound : float
        Multiple of the median distance from the middle, for each layer; 0: nothing is replaced.

    Returns
    -------
    replies, replaced
        As :meth:`Clipping.__call__`.
    """
    models: dict[int, dict[str, NumpyArray]] = {}
    counts: dict[int, int] = {}
    if not bound or len(replies) < plausibility.FEWEST_COMPARED:
        return list(replies), counts
    for names in (names for names in layers(replies[0].weights).values() if names[0].endswith((MEAN, VARIANCE))):
        places = {name: np.stack([_place(name, reply.weights[name]) for reply in replies]) for name in names}
        middle = {name: np.median(each, axis=0) for name, each in places.items()}
        away = [
            plausibility.length([places[name][index] - middle[name] for name in names]) for index in range(len(replies))
        ]
        largest = bound * float(np.median(away))
        for reply, distance in zip(replies, away, strict=True):
            if distance > largest:
                for name in names:
                    value = np.square(middle[name]) if name.endswith(VARIANCE) else middle[name]
                    models.setdefault(reply.client, {})[name] = value.astype(reply.weights[name].dtype)
                counts[reply.client] = counts.get(reply.client, 0) + 1
    return [replace(each, weights={**each.weights, **models.get(each.client, {})}) for each in replies], counts


def layers(model: Weights) -> dict[str, list[str]]:
    """Names of a model's arrays by layer; batch statistics are a layer of their own, counters belong to none."""
    found: dict[str, list[str]] = {}
    for name, array in model.items():
        if np.issubdtype(array.dtype, np.floating):
            statistics = name.endswith((MEAN, VARIANCE))
            found.setdefault(name.rpartition(".")[0] + " statistics" * statistics, []).append(name)
    return found


def _length(model: Weights, origin: Weights, names: Sequence[str]) -> float:
    return plausibility.length([_update(name, model[name], origin[name]) for name in names])


def _update(name: str, array: NumpyArray, origin: NumpyArray) -> Floats:
    return _place(name, array) - _place(name, origin)


def _place(name: str, array: NumpyArray) -> Floats:
    """An array's numbers; standard deviations for variances."""
    numbers = array.astype(np.float64)
    return np.sqrt(np.maximum(numbers, 0)) if name.endswith(VARIANCE) else numbers


def _shortened(model: Weights, origin: Weights, names: Sequence[str], factor: float) -> dict[str, NumpyArray]:
    shorter = {}
    for name in names:
        old = origin[name].astype(np.float64)
        update = factor * _update(name, model[name], origin[name])
        new = np.square(np.sqrt(np.maximum(old, 0)) + update) if name.endswith(VARIANCE) else old + update
        shorter[name] = new.astype(origin[name].dtype)
    return shorter
