"""Privacy accounting: epsilon of differential privacy after a number of rounds."""

import math

from fedkace_flwr.sections import DELTA, PrivacyConfig

_HALVINGS = 200


def spent(settings: PrivacyConfig, rounds: int) -> dict[str, float | None]:
    """Fields for a round's record: epsilon of all rounds so far, for :data:`DELTA`; empty without ``dp``.

    The releases of the rounds in which a client trains compose. With ``fraction-train``, ``rounds`` is the largest
    number of any client; who trains follows from the seed, so there is no amplification by sampling.

    With ``central``, two federations are neighbours if they differ in the presence of one client: its update, of norm
    at most ``dp-clip``, is in the sum or is zero. With ``local``, any two data sets of a client are neighbours: its
    updates may be twice ``dp-clip`` apart, so the same noise protects half as well.
    """
    if settings.dp == "none":
        return {}
    apart = 2.0 if settings.dp == "local" else 1.0
    value = epsilon(settings.dp_noise / apart, rounds, DELTA)
    return {"epsilon": value if math.isfinite(value) else None, "delta": DELTA}


def epsilon(noise: float, rounds: int, delta: float) -> float:
    """Smallest epsilon for which ``rounds`` Gaussian releases are (epsilon, delta)-private; infinite without noise.

    T releases with noise of z sensitivities each are as private as one release with z / sqrt(T) (Dong, Roth and Su,
    "Gaussian Differential Privacy", 2022), whose privacy curve is known exactly (Balle and Wang, "Improving the
    Gaussian Mechanism for Differential Privacy", ICML 2018): the result is exact, not a bound.

    Parameters
    ----------
    noise : float
        Standard deviation of a release's noise, in units of its sensitivity.
    rounds : int
        Number of releases T.
    delta : float
        In (0, 1).
    """
    if noise == 0:
        return math.inf
    mu = math.sqrt(rounds) / noise
    low, high = 0.0, 1.0
    while _log_delta(high, mu) > math.log(delta):
        high *= 2
    if _log_delta(low, mu) <= math.log(delta):
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _log_delta(middle, mu) > math.log(delta):
            low = middle
        else:
            high = middle
    return high


def _log_delta(value: float, mu: float) -> float:
    """Logarithm of delta = Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu)."""
    from scipy.special import log_ndtr  # takes long to import, and most runs need no accounting

    first = float(log_ndtr(mu / 2 - value / mu))
    second = value + float(log_ndtr(-mu / 2 - value / mu))
    return first + math.log1p(-math.exp(second - first)) if second < first else -math.inf
