"""Central differential privacy: the server clips models and adds noise to their mean."""

from collections.abc import Sequence

import numpy as np

from fedkace_flwr.algorithms.robust_aggregation import distance
from fedkace_flwr.messaging.wire import Weights
from fedkace_flwr.privacy import noise
from fedkace_flwr.sections import PrivacyConfig

_ROUNDING = 1e-4  # an update that its client has clipped may be longer than the bound by rounding


class CentralNoise:
    """Clips again and adds the noise of ``dp = central`` to a round's mean; with any other ``dp`` nothing changes.

    Parameters
    ----------
    settings : PrivacyConfig
        The keys of privacy.
    seed : int
        The run's seed, from which noise comes with ``dp-seeded`` alone.
    names : sequence of str
        The arrays that leave a client (:attr:`fedkace_flwr.messaging.travelling.Travelling.update`).
    """

    def __init__(self, settings: PrivacyConfig, seed: int, names: Sequence[str]) -> None:
        self._settings = settings
        self._seed = seed
        self._names = names

    @property
    def is_on(self) -> bool:
        """Whether ``dp = central``."""
        return self._settings.dp == "central"

    def clipped(self, model: Weights, before: Weights) -> Weights:
        """The model with its update scaled down to at most ``dp-clip``, whatever its client did.

        The noise is calibrated for this bound. It does not depend on other clients' data, unlike bounds from medians.

        Parameters
        ----------
        model, before : mapping
            The local model, and the global model from which it was trained.
        """
        length = distance(model, before, self._names)
        if length <= self._settings.dp_clip * (1 + _ROUNDING):
            return model
        factor = self._settings.dp_clip / length
        moved = {
            name: (before[name] + factor * (model[name].astype(np.float64) - before[name])).astype(before[name].dtype)
            for name in self._names
        }
        return {**model, **moved}

    def add(self, mean: Weights, before: Weights, clients: int, number: int) -> Weights:
        """The mean with noise.

        Parameters
        ----------
        mean : mapping
            Mean of the local models.
        before : mapping
            Global model from which they were trained.
        clients : int
            Number of local models.
        number : int
            Round t.
        """
        if not self.is_on:
            return mean
        seeded = self._settings.dp_seeded
        seed = noise.seeded_secret(self._seed, "server", number) if seeded else noise.fresh_secret()
        return noise.noised_mean(mean, before, self._names, clients, self._settings, seed)
