"""Plausibility checks on replies: ranges of their numbers, and distances compared across the clients of a round.

A local model is compared with the model that its client was sent, so personal models are each compared with their
own start. Distances are measured over all trained parameters, over each layer's weights, and over the running means and standard
deviations. Each must be within ``norm-bound`` times what is usual among the round's replies, as
:class:`fedkace_flwr.messaging.validation.Yardstick` defines it. With fewer than three replies, the latest round with
three is used instead; at the beginning of a run there is none. The bound holds while more than half of the replies
are honest. AdamW moves each weight by about its learning rate per step, so the honest clients of a round move about
equally far. Batch statistics vary more, which is why they are compared separately. What passes is compared further
(:mod:`fedkace_flwr.rounds.robustness.comparison`).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import validation as plausibility
from fedkace_flwr.messaging.records import Reply, Weights
from fedkace_flwr.messaging.validation import Limits, Yardstick
from fedkace_flwr.rounds.round_report import TRAINING


class Vetting:
    """Checks the replies of one run, and remembers which distances are usual.

    Parameters
    ----------
    limits : Limits
        Largest values of a reply's numbers.
    parameters : frozenset of str
        Names of the model's arrays that are trained by gradient.
    norm_bound : float
        How many times the usual distance a model may move; 0 for no bound.
    """

    def __init__(self, limits: Limits, parameters: frozenset[str], norm_bound: float) -> None:
        self.limits = limits
        self._parameters = parameters
        self._norm_bound = norm_bound
        self._usual: dict[str, Yardstick] = {}

    def usual(self) -> dict[str, list[float | None]]:
        """Usual distances of the rounds so far, JSON-ready."""
        return {name: [stick.distance, stick.per_sample] for name, stick in self._usual.items()}

    def restore(self, usual: Mapping[str, Sequence[float]]) -> None:
        """Continue with what :meth:`usual` gave."""
        self._usual = {name: Yardstick(*stick) for name, stick in usual.items()}

    def check(self, phase: str, reply: Reply) -> None:
        """Check the numbers of a well-formed reply.

        Raises
        ------
        MessageError
            One is impossible.
        """
        plausibility.check_metrics(reply.metrics, self.limits)
        if phase == TRAINING and not reply.sat_out:
            plausibility.check_examples(reply.examples, self.limits)

    def too_far(self, models: Sequence[Reply], origins: Mapping[int, Weights]) -> dict[int, tuple[str, str]]:
        """Clients whose model cannot be the result of honest training, with reason and kind.

        Parameters
        ----------
        models : sequence of Reply
            Replies with a model, in the order of client numbers.
        origins : mapping of int to mapping
            The model that each client was sent.
        """
        rejects: dict[int, tuple[str, str]] = {}
        measured: dict[int, dict[str, float]] = {}
        for reply in models:
            origin = origins[reply.client]
            try:
                plausibility.check_statistics(reply.weights, origin, self.limits)
            except MessageError as error:
                rejects[reply.client] = str(error), error.kind
                continue
            measured[reply.client] = {
                "parameters": plausibility.distance(reply.weights, origin, self._parameters),
                "running statistics": plausibility.statistics_distance(reply.weights, origin),
                **{name: plausibility.distance(reply.weights, origin, [name]) for name in self._matrices(origin)},
            }
        samples = {reply.client: reply.examples for reply in models if reply.client in measured}
        return rejects | {client: (reason, "norm") for client, reason in self.far_out(samples, measured).items()}

    def _matrices(self, model: Weights) -> list[str]:
        """Names of the weights of layers; biases are too short to be compared alone."""
        return [name for name in sorted(self._parameters) if np.ndim(model[name]) > 1]

    def far_out(self, samples: Mapping[int, int], measured: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
        """Clients with a quantity beyond ``norm-bound`` times the usual value, and why; none without a bound.

        Parameters
        ----------
        samples : mapping of int to int
            Number of samples from which each client's quantities come.
        measured : mapping of int to mapping of str to float
            Each client's quantities by name, not negative; the same names for all.
        """
        far: dict[int, str] = {}
        if self._norm_bound == 0:
            return far
        order = sorted(samples)
        for name in next(iter(measured.values()), {}):
            values = [measured[client][name] for client in order]
            usual = plausibility.yardstick(values, [samples[client] for client in order], self._usual.get(name))
            if usual is None:
                continue
            self._usual[name] = usual
            for client, value in zip(order, values, strict=True):
                bound = usual.bound(samples[client], self._norm_bound)
                if value > bound and client not in far:
                    far[client] = f"{name}: {value:.4g} is more than norm-bound allows, {bound:.4g}"
        return far
