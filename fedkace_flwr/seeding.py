"""Randomness: one independent stream per seed and purpose.

All random draws are seeded by :func:`seed_for`, so a result does not depend on the order in which clients are
processed, on the number of workers, or on whether a run was interrupted and resumed.
"""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_for(seed: int, *labels: str | int) -> int:
    """Derive an independent 63-bit seed from the experiment's seed and a purpose.

    Parameters
    ----------
    seed : int
        The experiment's seed.
    *labels : str or int
        The purpose, from general to specific, for example ``"train", client, round``.

    Returns
    -------
    int
        In [0, 2**63), the same on every machine and Python version.
    """
    text = repr((int(seed), *((str(label) if isinstance(label, str) else int(label)) for label in labels)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(seed: int, *labels: str | int) -> "torch.Generator":
    """Return a CPU generator seeded with ``seed_for(seed, *labels)``."""
    import torch  # seeds alone need no PyTorch, and the command line checks keys without it

    return torch.Generator().manual_seed(seed_for(seed, *labels))
