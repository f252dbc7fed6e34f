"""The defence against hostile clients (``defence = on``): a round's local models are compared before they are merged.

In this order (docs/robustness.md has what each is good for):

1. A model that undoes a layer of the global one, or moved it out of all proportion, is rejected (:data:`RETENTION`,
   :data:`OFF`).
2. A layer that moved too far is scaled down (:data:`FAR`, :data:`DEVIATIONS`).
3. A model whose updates point against the others', over rounds, is rejected (:data:`AGAINST`).
4. Batch statistics that lie far from all others' are replaced by their middle (:data:`FAR`, :data:`DEVIATIONS`).

What is usual is a median over the round's replies, which holds while more than half of the clients are honest. It says
nothing where most clients did not learn: a chunk of one class gives no loss, and hence no update. So each bound also has
a floor that depends on no other client, and below which no update is odd:

- AdamW moves each weight by about the learning rate per step. If its steps were at right angles to each other, they
  would take a weight by the root of the sum of their squared rates. Honest updates are 0.7 to 1.8 times as long, with
  every method and stream (docs/robustness.md), and up to :data:`FAR` times as long is usual.
- Batch statistics of few images are inexact, and those of a client that has trained little lag behind.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord

from fedkace_flwr.algorithms.robust_aggregation import cosines_to_others, distance, gram_matrix, length
from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.travelling import MEAN, VARIANCE
from fedkace_flwr.messaging.wire import NumpyArray, Reply, Weights
from fedkace_flwr.training.loop import learning_rates

if TYPE_CHECKING:
    from fedkace_flwr.rounds.server_round import RoundReport

FAR = 3.0
"""A layer is far if it moved this many times as far as is usual; batch statistics also if they lie so far from the middle."""

DEVIATIONS = 0.5
"""Batch statistics within this many standard deviations, in the root mean square over a layer's features, are not far.

With 1, inflated variances cost a federation of four 9 points, with 0.5 one (docs/robustness.md).
"""

RETENTION = 0.5
"""A model undoes a layer if it keeps less than this part of its weights, by three standard deviations of chance.

Honest training adds to a layer, and keeps 0.9 of it and more.
"""

AGAINST = {"update": -0.04, "running means": -0.2}
"""Mean cosine of a client's updates to the means of the others' below which it works against them.

An update that is longer than usual counts as much more. The bound is lowered by the round's median cosine if that is
negative. Running means, which vary more, are compared by themselves. Single cosines of honest clients fall to -0.3 and -0.9
(FedAVG on 100 classes), so a mean over rounds decides.
"""

DECAY = 0.9
"""Decay of the mean over rounds; it begins with a round of cosine 0, so that nobody is judged by a first round alone."""

OFF = 10.0
"""A layer that moved this many times as far as is usual, or features so many times as large, are not honest."""

FEWEST, FEWEST_DIRECTIONS = 3, 4
"""Replies that a median needs, and updates whose directions are compared; of fewer nobody could say which is odd."""

Rejects = dict[int, tuple[str, str]]
"""Reason and kind by client."""

Layers = dict[str, list[str]]
"""Names of a model's arrays by layer; batch statistics are a layer of their own, counters belong to none."""

Measured = dict[int, dict[str, tuple[float, float]]]
"""By client and layer, how far it moved, and how far it may."""

Floats = npt.NDArray[np.float64]


class Defence:
    """Compares the local models of one run, round by round.

    Parameters
    ----------
    config : Config
        The configuration.
    parameters : frozenset of str
        Names of a reply's arrays that are trained by gradient.
    """

    def __init__(self, config: Config, parameters: frozenset[str]) -> None:
        self.is_on = config.aggregation.defence == "on"
        self._parameters = parameters
        self._batch_size, self._capacity = config.training.batch_size, config.buffer.capacity
        self._squared_rates = sum(rate**2 for rate in learning_rates(config.training, range(config.training.epochs)))
        self._noise = config.privacy.dp_clip * config.privacy.dp_noise if config.privacy.dp == "local" else 0.0
        # For each kind of direction: by client, weighted sum of cosines and sum of weights.
        self._sums: dict[str, dict[int, tuple[float, float]]] = {what: {} for what in AGAINST}
        self._latest: dict[str, dict[int, float]] = {}  # cosines of the latest attempt at a round

    def __call__(
        self, replies: Sequence[Reply], sent: Mapping[int, ArrayRecord], report: "RoundReport"
    ) -> tuple[list[Reply], Rejects]:
        """Choose the models that count, and clip them; all of them, as they are, if the defence is off.

        Parameters
        ----------
        replies : sequence of Reply
            Replies with a model, in the order of client numbers.
        sent : mapping of int to ArrayRecord
            The model that each client was sent.
        report : RoundReport
            Receives the lengths and directions of the updates.

        Returns
        -------
        replies : list of Reply
            The replies that count, with clipped models.
        rejects : dict
            The others.
        """
        self._latest = {}
        if not self.is_on or not replies:
            return list(replies), {}
        origins = _unpacked(replies, sent)
        moved = {each.client: distance(each.weights, origins[each.client], self._parameters) for each in replies}
        report.updates = {client: {"update_length": far} for client, far in moved.items()}
        layers = _layers(replies[0].weights)
        measured = self._measured(replies, origins, layers)
        rejects = self._undoing(replies, origins, layers, measured, report) | _far_off(measured)
        left = [
            _shortened(each, origins[each.client], layers, measured[each.client], report)
            for each in replies
            if each.client not in rejects
        ]
        for group in _of_equal_start(left, origins):
            rejects |= self._opposed(group, origins[group[0].client], report)
        left = [each for each in left if each.client not in rejects]
        settled = [each for group in _of_equal_start(left, origins) for each in _at_the_middle(group, layers, report)]
        return sorted(settled, key=lambda reply: reply.client), rejects

    def far_larger(self, sizes: Mapping[int, float]) -> dict[int, str]:
        """Clients whose features are far larger than the others', and why; none if the defence is off.

        Parameters
        ----------
        sizes : mapping of int to float
            Root mean square length of each client's rows.
        """
        if not self.is_on or len(sizes) < FEWEST or not (most := OFF * median(sizes.values())):
            return {}
        return {
            client: f"{size:.4g} is more than {OFF:g} times the median, {most / OFF:.4g}"
            for client, size in sizes.items()
            if size > most
        }

    def remember(self) -> None:
        """Count the latest attempt at a round in the clients' mean cosines."""
        for what, latest in self._latest.items():
            self._sums[what] |= {client: self._added(what, client, cosine) for client, cosine in latest.items()}
        self._latest = {}

    def state(self) -> dict[str, dict[str, list[float]]]:
        """What later rounds need, JSON-ready."""
        return {
            what: {str(client): list(each) for client, each in by_client.items()}
            for what, by_client in self._sums.items()
        }

    def restore(self, state: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Continue with what :meth:`state` gave."""
        for what, by_client in state.items():
            self._sums[what] = {int(client): (total, weight) for client, (total, weight) in by_client.items()}

    def _measured(self, replies: Sequence[Reply], origins: Mapping[int, Weights], layers: Layers) -> Measured:
        measured: Measured = {reply.client: {} for reply in replies}
        for layer, names in layers.items():
            lengths = [_moved(reply.weights, origins[reply.client], names) for reply in replies]
            usual = FAR * median(lengths) if len(lengths) >= FEWEST else 0.0
            for reply, far in zip(replies, lengths, strict=True):
                floor = self._floor(reply.examples, origins[reply.client], names)
                measured[reply.client][layer] = far, max(usual, floor)
        return measured

    def _floor(self, examples: int, origin: Weights, names: Sequence[str]) -> float:
        size = sum(origin[name].size for name in names if name in self._parameters or _is_statistics(name))
        if _is_statistics(names[0]):
            far = DEVIATIONS * length([_place(name, origin[name]) for name in names if name.endswith(VARIANCE)])
        else:
            steps = math.ceil((examples + self._capacity) / self._batch_size)
            far = FAR * math.sqrt(size * steps * self._squared_rates)
        return math.hypot(far, FAR * self._noise * math.sqrt(size))

    def _undoing(
        self,
        replies: Sequence[Reply],
        origins: Mapping[int, Weights],
        layers: Layers,
        measured: Measured,
        report: "RoundReport",
    ) -> Rejects:
        """Compare the part <V, W> / <W, W> of each layer's weights W that the new ones V keep."""
        rejects: Rejects = {}
        for layer, names in layers.items():
            for name in (name for name in names if name in self._parameters and replies[0].weights[name].ndim > 1):
                shares, chances = dict[int, float](), dict[int, float]()
                for reply in replies:
                    old = origins[reply.client][name].astype(np.float64)
                    if not (square := float(np.vdot(old, old))):
                        continue
                    update = reply.weights[name] - old
                    shares[reply.client] = 1.0 + float(np.vdot(update, old)) / square
                    # The standard deviation of the share, if the update had a random direction.
                    far = min(measured[reply.client][layer])
                    chances[reply.client] = far / math.sqrt(square * old.size)
                usual = min(1.0, median(shares.values())) if len(shares) >= FEWEST else 0.0
                for client, share in shares.items():
                    held = report.updates[client]
                    held["retention"] = min(share, held.get("retention", share))
                    if share < RETENTION * usual - 3 * chances[client] and client not in rejects:
                        reason = f"{name}: keeps {share:.2f} of the global model's, far less than others do"
                        rejects[client] = reason, "retention"
        return rejects

    def _opposed(self, group: Sequence[Reply], origin: Weights, report: "RoundReport") -> Rejects:
        if len(group) < 2:
            return {}
        clients = [reply.client for reply in group]
        means = frozenset(name for name in origin if name.endswith(MEAN))
        rejects: Rejects = {}
        for what, names in (("update", self._parameters), *([("running means", means)] if means else [])):
            gram = gram_matrix([reply.weights for reply in group], names, [origin] * len(group))
            for client, cosine in zip(clients, cosines_to_others(gram).tolist(), strict=True):
                report.updates[client][f"{what.replace(' ', '_')}_cosine"] = cosine
            counts = np.ones(len(group))
            if what == "update":
                lengths = np.sqrt(np.diagonal(gram))
                alone = [self._floor(reply.examples, origin, sorted(names)) / FAR for reply in group]
                counts = np.maximum(1.0, lengths / np.maximum(np.median(lengths), alone))
            for client, cosine in self.opposed(what, clients, gram, counts.tolist()).items():
                reason = f"{what}: works against the others', with a cosine of {cosine:.3f} to their mean"
                rejects.setdefault(client, (reason, "direction"))
        return rejects

    def opposed(
        self, what: str, clients: Sequence[int], gram: Floats, counts: Sequence[float] | None = None
    ) -> dict[int, float]:
        """Clients that work against the others, and each one's cosine when it was rejected.

        Its cosine in this round and its mean over rounds are both too low. The farthest is rejected first, and the
        others are compared anew; more than half are always kept.

        Parameters
        ----------
        what : str
            What is compared, one of :data:`AGAINST`.
        clients : sequence of int
            Each once; of fewer than four none is rejected.
        gram : array
            float64 (m, m), inner products of their updates.
        counts : sequence of float, optional
            How much each update's cosine counts; by default 1.
        """
        left, rejected = list(range(len(clients))), dict[int, float]()
        latest = self._latest.setdefault(what, {})
        while len(left) >= FEWEST_DIRECTIONS:
            cosines = dict(zip(left, cosines_to_others(gram[np.ix_(left, left)]).tolist(), strict=True))
            counted = {at: cosine * (counts[at] if counts else 1.0) for at, cosine in cosines.items()}
            latest |= {clients[at]: each for at, each in counted.items()}
            judged = {at: self._judged(what, clients[at], each) for at, each in counted.items()}
            worst = min(judged, key=lambda at: judged[at])
            low = AGAINST[what] + min(0.0, median(cosines.values()))
            if 2 * (len(left) - 1) <= len(clients) or judged[worst] >= low:
                break
            rejected[clients[worst]] = cosines[worst]
            left.remove(worst)
        return rejected

    def _added(self, what: str, client: int, cosine: float) -> tuple[float, float]:
        total, weight = self._sums[what].get(client, (0.0, 1.0))
        return DECAY * total + cosine, DECAY * weight + 1.0

    def _judged(self, what: str, client: int, cosine: float) -> float:
        total, weight = self._added(what, client, cosine)
        return max(cosine, total / weight)


def _far_off(measured: Measured) -> Rejects:
    rejects: Rejects = {}
    for client, layers in measured.items():
        for layer, (far, allowed) in layers.items():
            if far > OFF / FAR * allowed and client not in rejects:
                rejects[client] = f"{layer}: moved by {far:.4g}, of at most {allowed:.4g} in honest training", "norm"
    return rejects


def _shortened(
    reply: Reply, origin: Weights, layers: Layers, measured: Mapping[str, tuple[float, float]], report: "RoundReport"
) -> Reply:
    """Scale down the layers that moved farther than is allowed; variances as standard deviations."""
    shorter: dict[str, NumpyArray] = {}
    for layer, names in layers.items():
        far, allowed = measured[layer]
        if far <= allowed:
            continue
        _count_clipped(report, reply.client)
        for name in names:
            old = _place(name, origin[name])
            new = old + allowed / far * (_place(name, reply.weights[name]) - old)
            shorter[name] = (np.square(new) if name.endswith(VARIANCE) else new).astype(origin[name].dtype)
    return replace(reply, weights={**reply.weights, **shorter}) if shorter else reply


def _at_the_middle(replies: Sequence[Reply], layers: Layers, report: "RoundReport") -> list[Reply]:
    """Replace batch statistics that lie far from all others' by their middle, the median of each number.

    Honest clients take statistics back to what their images give, so a client that moved them a little farther in each
    round would make long updates usual. Where honest statistics lie does not depend on that.
    """
    settled = list(replies)
    if len(replies) < FEWEST:
        return settled
    for names in (names for names in layers.values() if _is_statistics(names[0])):
        places = {name: np.stack([_place(name, reply.weights[name]) for reply in replies]) for name in names}
        middle = {name: np.median(each, axis=0) for name, each in places.items()}
        away = [length([places[name][at] - middle[name] for name in names]) for at in range(len(replies))]
        floor = DEVIATIONS * length([middle[name] for name in names if name.endswith(VARIANCE)])
        for at, reply in enumerate(settled):
            if away[at] > max(FAR * median(away), floor):
                _count_clipped(report, reply.client)
                new = {name: np.square(middle[name]) if name.endswith(VARIANCE) else middle[name] for name in names}
                same = {name: array.astype(reply.weights[name].dtype) for name, array in new.items()}
                settled[at] = replace(reply, weights={**reply.weights, **same})
    return settled


def _layers(model: Weights) -> Layers:
    found: Layers = {}
    for name, array in model.items():
        if np.issubdtype(array.dtype, np.floating):
            layer = name.rpartition(".")[0] + " statistics" * _is_statistics(name)
            found.setdefault(layer, []).append(name)
    return found


def _is_statistics(name: str) -> bool:
    return name.endswith((MEAN, VARIANCE))


def _place(name: str, array: NumpyArray) -> Floats:
    """An array's numbers; standard deviations for variances."""
    numbers = array.astype(np.float64)
    return np.sqrt(np.maximum(numbers, 0)) if name.endswith(VARIANCE) else numbers


def _moved(model: Weights, origin: Weights, names: Iterable[str]) -> float:
    with np.errstate(over="ignore"):
        return length([_place(name, model[name]) - _place(name, origin[name]) for name in names])


def _count_clipped(report: "RoundReport", client: int) -> None:
    report.updates[client]["clipped_layers"] = report.updates[client].get("clipped_layers", 0) + 1


def _of_equal_start(replies: Sequence[Reply], origins: Mapping[int, Weights]) -> list[list[Reply]]:
    """Replies of clients that were sent the same model."""
    groups: dict[int, list[Reply]] = {}
    for reply in replies:
        groups.setdefault(id(origins[reply.client]), []).append(reply)
    return list(groups.values())


def _unpacked(replies: Sequence[Reply], sent: Mapping[int, ArrayRecord]) -> dict[int, Weights]:
    """The model that each client was sent; one object for clients that were sent the same."""
    models = {id(record): wire.unpack(record) for record in {id(each): each for each in sent.values()}.values()}
    return {reply.client: models[id(sent[reply.client])] for reply in replies}
