"""Compares a round's local models with each other and with earlier models: the defence against hostile clients.

In this order:

1. A copy of a model of an earlier round is rejected (:mod:`fedkace_flwr.rounds.robustness.earlier_models`).
2. A model that moved more than ``norm-bound`` times the usual distance is rejected
   (:class:`fedkace_flwr.rounds.vetting.Vetting`).
3. A model that undoes a layer of the global one is rejected (``retention-bound``;
   :mod:`fedkace_flwr.rounds.robustness.retention`).
4. Layers that moved more than ``clip-bound`` times the usual distance are scaled down
   (:mod:`fedkace_flwr.rounds.robustness.clipping`).
5. An update that points against the others' is rejected, by its trained parameters (``direction-bound``) or by its
   running means (``statistics-bound``; :mod:`fedkace_flwr.rounds.robustness.directions`).
6. Batch-norm statistics of a layer that lie more than ``clip-bound`` times the usual distance from the middle are
   replaced by it (:func:`fedkace_flwr.rounds.robustness.clipping.set_to_middle`).

What is usual is a median over the round's replies, so the checks hold while more than half of the replies are honest.
The last two steps compare clients that were sent the same model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord

from fedkace_flwr.algorithms.robust_aggregation import cosines_to_others, gram_matrix
from fedkace_flwr.config import Config
from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging import validation as plausibility
from fedkace_flwr.messaging.records import NumpyArray, Reply, Weights
from fedkace_flwr.messaging.validation import Yardstick
from fedkace_flwr.privacy.central import CentralNoise
from fedkace_flwr.privacy.noise import MEAN
from fedkace_flwr.rounds.robustness.clipping import Clipping, set_to_middle
from fedkace_flwr.rounds.robustness.directions import FEWEST, Directions, equal_starts
from fedkace_flwr.rounds.robustness.earlier_models import EarlierModels, Sketch
from fedkace_flwr.rounds.robustness.retention import retentions, undoing
from fedkace_flwr.rounds.round_report import RoundReport
from fedkace_flwr.rounds.vetting import Vetting

Rejects = dict[int, tuple[str, str]]
"""Reason and kind by client."""

_SKETCHES = "sketches"


class Comparison:
    """Compares the local models of one run, round by round.

    Parameters
    ----------
    config : Config
        The configuration: bounds, and the seed of the random projections by which earlier models are recognised.
    vetting : Vetting
        The check of distances.
    parameters : frozenset of str
        Names of the model's arrays that are trained by gradient.
    noise : CentralNoise
        Clips at ``dp-clip`` instead of comparing clients, if ``dp = central``: what one client sends must not change
        what becomes of another's model.
    """

    def __init__(self, config: Config, vetting: Vetting, parameters: frozenset[str], noise: CentralNoise) -> None:
        settings = config.aggregation
        self._vetting = vetting
        self._parameters = parameters
        self._noise = noise
        self._retention_bound = settings.retention_bound
        self._clip_bound = settings.clip_bound
        self._clipping = Clipping(settings.clip_bound)
        self._earlier = EarlierModels(parameters, config.run.seed)
        self._directions = {
            "update": Directions(settings.direction_bound),
            "running means": Directions(settings.statistics_bound),
        }
        self._sketches: dict[int, Sketch] = {}  # by client, of the latest attempt at a round
        self._sent: dict[int, Sketch] = {}

    def __call__(
        self, replies: Sequence[Reply], sent: Mapping[int, ArrayRecord], report: RoundReport, *, aggregated: bool = True
    ) -> tuple[list[Reply], Rejects]:
        """Choose the models that count, and clip them.

        Parameters
        ----------
        replies : sequence of Reply
            Replies with a model, in the order of client numbers.
        sent : mapping of int to ArrayRecord
            The model that each client was sent.
        report : RoundReport
            Receives the lengths and directions of the updates.
        aggregated : bool
            Whether the models are aggregated. If each goes back to its own client only, no harm can be done to others:
            only distances are checked.

        Returns
        -------
        replies : list of Reply
            The replies that count, with clipped models.
        rejects : dict
            The others.
        """
        origins = _unpacked(replies, sent)
        for directions in self._directions.values():
            directions.begin()
        if self._noise.is_on:
            return self._clipped_for_noise(replies, origins)
        if not aggregated:
            rejects = self._vetting.too_far(replies, origins)
            return [reply for reply in replies if reply.client not in rejects], rejects
        rejects = self._copies(replies, origins, report.number)
        rejects = self._vetting.too_far([each for each in replies if each.client not in rejects], origins) | rejects
        new = [reply for reply in replies if reply.client not in rejects]
        report.updates = {
            each.client: {"update_length": plausibility.distance(each.weights, origins[each.client], self._parameters)}
            for each in new
        }
        rejects |= self._undoing(new, origins, report)
        new = [reply for reply in new if reply.client not in rejects]
        clipped, layers = self._clipping(new, origins)
        for group in equal_starts([id(sent[reply.client]) for reply in clipped]):
            rejects |= self._opposed([clipped[position] for position in group], origins, report)
        left = [reply for reply in clipped if reply.client not in rejects]
        for group in equal_starts([id(sent[reply.client]) for reply in left]):
            settled, more = set_to_middle([left[position] for position in group], self._clip_bound)
            for position, reply in zip(group, settled, strict=True):
                left[position] = reply
            layers |= {client: layers.get(client, 0) + count for client, count in more.items()}
        for client, count in layers.items():
            report.updates[client]["clipped_layers"] = count
        return left, rejects

    def remember(self, replies: Sequence[Reply], number: int) -> None:
        """Remember the models of a round that have been aggregated, those that were sent, and the directions."""
        for directions in self._directions.values():
            directions.remember()
        if self._sketches:
            sent = {id(self._sent[reply.client]): self._sent[reply.client] for reply in replies}
            self._earlier.remember([*sent.values(), *(self._sketches[reply.client] for reply in replies)], number)
        self._sketches, self._sent = {}, {}

    def state(self) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
        """Arrays, and a JSON-ready record, that later rounds need."""
        sketches, rounds = self._earlier.state()
        usual = {name: [stick.distance, stick.per_sample] for name, stick in self._clipping.usual.items()}
        standings = {what: directions.state() for what, directions in self._directions.items()}
        return {_SKETCHES: sketches}, {"usual": usual, "rounds": rounds, "standings": standings}

    def restore(self, arrays: Mapping[str, NumpyArray], record: Mapping[str, Any]) -> None:
        """Continue with what :meth:`state` gave."""
        self._earlier.restore(arrays[_SKETCHES], record["rounds"])
        for what, directions in self._directions.items():
            directions.restore(record["standings"][what])
        self._clipping.usual = {name: Yardstick(*stick) for name, stick in record["usual"].items()}

    def _clipped_for_noise(
        self, replies: Sequence[Reply], origins: Mapping[int, Weights]
    ) -> tuple[list[Reply], Rejects]:
        rejects: Rejects = {}
        for reply in replies:
            try:
                plausibility.check_statistics(reply.weights, origins[reply.client], self._vetting.limits)
            except MessageError as error:
                rejects[reply.client] = str(error), error.kind
        left = [reply for reply in replies if reply.client not in rejects]
        clipped = [replace(each, weights=self._noise.clipped(each.weights, origins[each.client])) for each in left]
        return clipped, rejects

    def _copies(self, replies: Sequence[Reply], origins: Mapping[int, Weights], number: int) -> Rejects:
        starts = {id(origin): self._earlier.sketch(origin) for origin in origins.values()}
        models = {reply.client: self._earlier.sketch(reply.weights) for reply in replies}
        self._sketches, self._sent = models, {reply.client: starts[id(origins[reply.client])] for reply in replies}
        copies: Rejects = {}
        for client, model in models.items():
            if (origin := self._earlier.origin_of(model, starts[id(origins[client])])) is not None:
                copies[client] = f"the model is that of round {origin}", "copy"
        return copies

    def _undoing(self, replies: Sequence[Reply], origins: Mapping[int, Weights], report: RoundReport) -> Rejects:
        kept = retentions(replies, origins, self._parameters)
        for client, layers in kept.items():
            if layers:
                report.updates[client]["retention"] = min(each.share for each in layers.values())
        return {
            client: (f"{layer}: keeps {share:.2f} of the global model's, far less than others do", "retention")
            for client, (layer, share) in undoing(kept, self._retention_bound).items()
        }

    def _opposed(self, group: Sequence[Reply], origins: Mapping[int, Weights], report: RoundReport) -> Rejects:
        if len(group) < 2:
            return {}
        means = frozenset(name for name in group[0].weights if name.endswith(MEAN))
        clients, starts = [reply.client for reply in group], [origins[reply.client] for reply in group]
        rejects: Rejects = {}
        for what, names in (("update", self._parameters), *([("running means", means)] if means else [])):
            gram = gram_matrix([reply.weights for reply in group], names, starts)
            for client, cosine in zip(clients, cosines_to_others(gram).tolist(), strict=True):
                report.updates[client][f"{what.replace(' ', '_')}_cosine"] = cosine
            opposed = self._directions[what].opposed(clients, gram) if len(group) >= FEWEST else {}
            for client, cosine in opposed.items():
                reason = f"{what}: its cosine to the others' mean, {cosine:.3f}, is below the bound, also over rounds"
                rejects.setdefault(client, (reason, "direction"))
        return rejects


def _unpacked(replies: Sequence[Reply], sent: Mapping[int, ArrayRecord]) -> dict[int, Weights]:
    """The model that each client was sent; one object for clients that were sent the same."""
    models: dict[int, Weights] = {}
    for reply in replies:
        record = sent[reply.client]
        if id(record) not in models:
            models[id(record)] = keys.unpack(record)
    return {reply.client: models[id(sent[reply.client])] for reply in replies}
