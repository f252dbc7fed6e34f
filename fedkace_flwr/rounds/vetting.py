"""Whether a reply can be true: its numbers one by one, and how far its model went, by the measure of the others.

A local model is compared with the one that its client was sent, so personal models are compared each with its own:
the distances over the trained parameters, and over the running means and deviations, must be within ``norm-bound``
times what is usual among the round's replies, as :class:`fedkace_flwr.messaging.validation.Yardstick` has it. With fewer than
three replies the last round with three gives the measure; at the beginning of a run, none. The bound holds while more
than half of the replies are honest. AdamW moves each weight by about its learning rate a step, so honest clients of a
round go equally far. Batch statistics vary more, which is why they are compared apart, and why the default is as large
as 10.
"""

from collections.abc import Mapping, Sequence

from flwr.app import ArrayRecord

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging import validation as plausibility
from fedkace_flwr.messaging.records import Reply, Weights
from fedkace_flwr.messaging.validation import Limits, Yardstick

TRAINING, EVALUATION = "training", "evaluation"


class Vetting:
    """Checks of one run's replies, with the measure of its rounds so far.

    Parameters
    ----------
    limits : Limits
        What a reply's numbers may be.
    parameters : frozenset of str
        The names of the model's arrays that are trained by gradient.
    norm_bound : float
        Times the usual distance that a model may go; 0 for any.
    """

    def __init__(self, limits: Limits, parameters: frozenset[str], norm_bound: float) -> None:
        self.limits = limits
        self._parameters = parameters
        self._norm_bound = norm_bound
        self._usual: dict[str, Yardstick] = {}

    def usual(self) -> dict[str, list[float | None]]:
        """The measures of the rounds so far, JSON-ready."""
        return {name: [stick.distance, stick.per_sample] for name, stick in self._usual.items()}

    def restore(self, usual: Mapping[str, Sequence[float]]) -> None:
        """Go on with what :meth:`usual` gave."""
        self._usual = {name: Yardstick(*stick) for name, stick in usual.items()}

    def check(self, phase: str, reply: Reply) -> None:
        """Look at a well-formed reply's numbers.

        Raises
        ------
        MessageError
            They cannot be true.
        """
        plausibility.check_metrics(reply.metrics, self.limits)
        if phase == TRAINING and not reply.sat_out:
            plausibility.check_examples(reply.examples, self.limits)

    def too_far(self, models: Sequence[Reply], sent: Mapping[int, ArrayRecord]) -> dict[int, tuple[str, str]]:
        """Clients whose model cannot come from honest training; reason and kind of each.

        Parameters
        ----------
        models : sequence of Reply
            Replies that bring a model, in the order of client numbers.
        sent : mapping of int to ArrayRecord
            The model that each client was sent.
        """
        rejects: dict[int, tuple[str, str]] = {}
        measured: dict[int, dict[str, float]] = {}
        origins: dict[int, Weights] = {}  # unpacked once where all were sent the same
        for reply in models:
            record = sent[reply.client]
            if id(record) not in origins:
                origins = {id(record): keys.unpack(record)}
            origin = origins[id(record)]
            try:
                plausibility.check_statistics(reply.weights, origin, self.limits)
            except MessageError as error:
                rejects[reply.client] = str(error), error.kind
                continue
            measured[reply.client] = {
                "parameters": plausibility.distance(reply.weights, origin, self._parameters),
                "running statistics": plausibility.statistics_distance(reply.weights, origin),
            }
        if self._norm_bound > 0:
            samples = {reply.client: reply.examples for reply in models if reply.client in measured}
            rejects |= {client: (reason, "norm") for client, reason in self.far_out(samples, measured).items()}
        return rejects

    def far_out(self, samples: Mapping[int, int], measured: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
        """Clients of which a quantity is beyond ``norm-bound`` times what is usual, and why.

        Parameters
        ----------
        samples : mapping of int to int
            What each client's quantities come from.
        measured : mapping of int to mapping of str to float
            Each client's quantities by name, not negative; the same names for all.
        """
        far: dict[int, str] = {}
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
