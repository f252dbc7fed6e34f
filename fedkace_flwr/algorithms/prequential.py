"""The local model's weight among a client's models, by how well they predict each new chunk before it is trained on.

Neither model can be judged by what a client holds: the local one has learned its chunk and its buffer, and through it
so has the global one. The next chunk is new to both. Testing first and training then is Dawid's prequential principle
("The Prequential Approach", 1984), as is usual in data streams (Gama et al., 2013); it costs no image.

A new chunk is not like the test, which is of all classes met. It holds few classes, often again those that the local
model has learned last and answers best. Images of these classes and of the others are therefore kept apart, and each
kind counts by its share of the classes met.
"""

import torch
from torch import Tensor

WEIGHTS = tuple(step / 20 for step in range(1, 20))
"""The weights of the local model that are compared."""

_DECAY = 0.5  # of earlier chunks, with each new one
_PRIOR_IMAGES = 20.0  # that the usual weight counts as
_FLOOR = 1e-3  # added to each probability: a single image must not decide


def no_evidence() -> Tensor:
    """What is known before the first chunk: float64 (2, 20), zero."""
    return torch.zeros(2, len(WEIGHTS) + 1, dtype=torch.float64)


def with_chunk(evidence: Tensor, local: Tensor, received: Tensor, latest: Tensor) -> Tensor:
    """Add a chunk to the evidence; what was there before counts half.

    Parameters
    ----------
    evidence : Tensor
        float64 (2, 20): for images of the classes that the local model was trained on last, and for the others, the sum
        of log-likelihoods under each of :data:`WEIGHTS`, and the number of images.
    local, received : Tensor
        float64 (n,): probability of each image's label, by the local model, and by the mean of the received ones.
    latest : Tensor
        bool (n,): whether the image is of a class that the local model was trained on last.
    """
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)[:, None]
    likelihood = (weights * local + (1 - weights) * received + _FLOOR).log()
    added = torch.cat([likelihood, torch.ones(1, len(local), dtype=torch.float64)])
    return _DECAY * evidence + torch.stack([added[:, latest].sum(dim=1), added[:, ~latest].sum(dim=1)])


def best_weight(evidence: Tensor, latest_share: float, usual: float) -> float:
    """The weight of the local model under which a client's newest chunks were likeliest.

    Parameters
    ----------
    evidence : Tensor
        As from :func:`with_chunk`.
    latest_share : float
        Share of the classes met that the local model was trained on last, from 0 to 1.
    usual : float
        The weight without evidence, from 0 to 1; it counts as much as 20 images.
    """
    images = evidence[:, -1]
    if not bool(images.any()):
        return usual
    share = torch.tensor([latest_share, 1 - latest_share], dtype=torch.float64)
    known = images > 0
    means = evidence[known, :-1] / images[known, None]
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    prior = usual * weights.log() + (1 - usual) * (1 - weights).log()
    found = images.sum() * (share[known, None] * means).sum(dim=0) + _PRIOR_IMAGES * prior
    return WEIGHTS[int(found.argmax())]
