"""Noise for differential privacy by Flower's functions, from a stream that we choose.

Flower draws from NumPy's global generator. A process that was forked from another, or a library that seeds that
generator, would make it predictable; so each draw has a seed of its own here: 256 bits that nobody else can know, or
with ``dp-seeded`` the run's seed. It stays a Mersenne Twister and adds floating-point numbers: docs/privacy.md says
what that leaves open.
"""

import hashlib
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from flwr.supercore.differential_privacy import add_gaussian_noise_inplace, compute_stdv

from fedkace_flwr.messaging.records import NumpyArray, Weights
from fedkace_flwr.sections import PrivacyConfig
from fedkace_flwr.seeding import seed_for

VARIANCE, COUNTER = ".running_var", ".num_batches_tracked"
SECRET_BYTES = 32
_FLOOR = 0.25
_one_at_a_time = threading.Lock()


def fresh_secret() -> bytes:
    """Bytes of the operating system that nobody else knows."""
    return secrets.token_bytes(SECRET_BYTES)


def seeded_secret(seed: int, *labels: str | int) -> bytes:
    """Bytes that everyone knows who knows the seed."""
    return seed_for(seed, "privacy noise", *labels).to_bytes(8, "big")


def fingerprint(secret: bytes, *models: Weights) -> bytes:
    """32 bytes that depend on all of the secret and the models, and tell nothing of them."""
    digest = hashlib.blake2b(key=secret, digest_size=32)
    for model in models:
        for name, array in sorted(model.items()):
            digest.update(f"{name} {array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


@contextmanager
def numpy_noise(seed: bytes) -> Iterator[None]:
    """Seed NumPy's global generator, from which Flower draws, for the length of the block; 4 n bytes."""
    with _one_at_a_time:
        kept = np.random.get_state()  # noqa: NPY002
        np.random.seed(np.frombuffer(seed, dtype=np.uint32))  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(kept)  # noqa: NPY002


def travelling(
    settings: PrivacyConfig, names: Mapping[str, object] | list[str], parameters: frozenset[str]
) -> list[str]:
    """Names of the arrays that leave a client, in the model's order.

    Counters of batches never do: nothing is computed from them, they would be larger than all that is learned, and
    they tell how many samples there were.
    """
    shared = settings.statistics == "shared"
    return [name for name in names if name in parameters or (shared and not name.endswith(COUNTER))]


def noised_mean(
    mean: Weights, before: Weights, names: list[str], clients: int, settings: PrivacyConfig, seed: bytes
) -> Weights:
    """The mean of clipped models with the noise of central differential privacy.

    Parameters
    ----------
    mean : mapping
        The mean of ``clients`` models, each at most ``dp-clip`` from ``before``.
    before : mapping
        The global model that they started from.
    names : list of str
        What takes noise; of the rest ``before`` stays.
    clients : int
        How many.
    settings : PrivacyConfig
        Clip and noise.
    seed : bytes
        Where the noise comes from.
    """
    arrays = [np.array(mean[name]) for name in names]
    with numpy_noise(seed):
        add_gaussian_noise_inplace(arrays, compute_stdv(settings.dp_noise, settings.dp_clip, clients))
    return {**before, **with_floor(dict(zip(names, arrays, strict=True)), before)}


def with_floor(noised: Weights, before: Weights) -> dict[str, NumpyArray]:
    """Variances that noise has made small or negative are a quarter of what they were.

    It looks at nothing but the noised values and what the server sent, so it costs no privacy.
    """
    return {
        name: np.maximum(array, _FLOOR * before[name]).astype(array.dtype) if name.endswith(VARIANCE) else array
        for name, array in noised.items()
    }
