"""Central differential privacy: noise that the server adds to the mean of clipped models."""

from fedkace_flwr.messaging.records import Weights
from fedkace_flwr.privacy import noise
from fedkace_flwr.sections import PrivacyConfig


class CentralNoise:
    """Adds the noise of ``dp = central`` to a round's mean; with any other ``dp`` the mean stays as it is.

    Parameters
    ----------
    settings : PrivacyConfig
        The keys of privacy.
    seed : int
        The run's seed, from which noise comes with ``dp-seeded`` alone.
    parameters : frozenset of str
        Names of the arrays that are trained by gradient.
    """

    def __init__(self, settings: PrivacyConfig, seed: int, parameters: frozenset[str]) -> None:
        self._settings = settings
        self._seed = seed
        self._parameters = parameters

    @property
    def is_on(self) -> bool:
        """Whether ``dp = central``."""
        return self._settings.dp == "central"

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
        names = noise.travelling(self._settings, mean, self._parameters)
        return noise.noised_mean(mean, before, names, clients, self._settings, seed)
