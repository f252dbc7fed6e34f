"""Noise for differential privacy: Flower's functions, with seeds of our own.

Flower draws from NumPy's global generator, which is predictable in a forked process, or after a library has seeded it.
Each draw is therefore seeded here: with 256 secret bits, or with ``dp-seeded`` from the run's seed. The generator
remains a Mersenne Twister and the noise floating-point numbers; docs/privacy.md explains what this leaves open.
"""

import hashlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from fedkace_flwr.flower.internals import add_gaussian_noise_inplace, compute_stdv
from fedkace_flwr.messaging.travelling import VARIANCE
from fedkace_flwr.messaging.wire import NumpyArray, Weights
from fedkace_flwr.sections import PrivacyConfig
from fedkace_flwr.seeding import seed_for

SECRET_BYTES = 32
_FLOOR = 0.25
_one_at_a_time = threading.Lock()


def fresh_secret() -> bytes:
    """Secret bytes from the operating system."""
    return secrets.token_bytes(SECRET_BYTES)


def seeded_secret(seed: int, *labels: str | int) -> bytes:
    """Bytes derived from the seed: not secret from anyone who knows it."""
    return seed_for(seed, "privacy noise", *labels).to_bytes(8, "big")


def fingerprint(secret: bytes, *models: Weights) -> bytes:
    """Keyed hash (32 bytes) of models, which reveals neither the secret nor the models."""
    digest = hashlib.blake2b(key=secret, digest_size=32)
    for model in models:
        for name, array in sorted(model.items()):
            digest.update(f"{name} {array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


@contextmanager
def numpy_noise(seed: bytes) -> Iterator[None]:
    """Seed NumPy's global generator, from which Flower draws, inside the block; ``seed`` has 4 n bytes."""
    with _one_at_a_time:
        kept = np.random.get_state()  # noqa: NPY002
        np.random.seed(np.frombuffer(seed, dtype=np.uint32))  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(kept)  # noqa: NPY002


def noised_mean(
    mean: Weights, before: Weights, names: Sequence[str], clients: int, settings: PrivacyConfig, seed: bytes
) -> Weights:
    """The mean of clipped models with the noise of central differential privacy.

    Parameters
    ----------
    mean : mapping
        The mean of ``clients`` models, each at most ``dp-clip`` from ``before``.
    before : mapping
        The global model from which they started.
    names : sequence of str
        Arrays that get noise; the others stay as in ``before``.
    clients : int
        Number of models.
    settings : PrivacyConfig
        Clip and noise.
    seed : bytes
        Seed of the noise.
    """
    arrays = [np.array(mean[name]) for name in names]
    with numpy_noise(seed):
        add_gaussian_noise_inplace(arrays, compute_stdv(settings.dp_noise, settings.dp_clip, clients))
    return {**before, **with_floor(dict(zip(names, arrays, strict=True)), before)}


def with_floor(noised: Weights, before: Weights) -> dict[str, NumpyArray]:
    """Raise variances that noise has made small or negative to a quarter of their earlier value.

    This uses only the noised values and what the server sent, so it costs no privacy.
    """
    return {
        name: np.maximum(array, _FLOOR * before[name]).astype(array.dtype) if name.endswith(VARIANCE) else array
        for name, array in noised.items()
    }
