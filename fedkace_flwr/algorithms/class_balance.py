"""A buffer with equally many samples of each class."""

from collections.abc import Sequence

import torch
from torch import Tensor


def class_balanced(labels: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    """Choose candidates for a buffer uniformly, with as equal numbers of each class as there are candidates for.

    Parameters
    ----------
    labels : Tensor
        int64 (N,), on the CPU: the candidates' classes.
    capacity : int
        M, places in the buffer.
    generator : torch.Generator
        CPU generator.

    Returns
    -------
    Tensor
        int64, min(N, M) positions among the candidates, ascending.
    """
    members = [(labels == label).nonzero().squeeze(1) for label in sorted(set(labels.tolist()))]
    quotas = water_filling_quotas([len(positions) for positions in members], capacity)
    kept = [drawn(positions, places, generator) for positions, places in zip(members, quotas, strict=True)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *kept]).sort().values


def drawn(positions: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` of some positions uniformly without replacement; all of them, undrawn, if there are no more."""
    if len(positions) <= count:
        return positions
    return positions[torch.randperm(len(positions), generator=generator)[:count]]


def water_filling_quotas(available: Sequence[int], capacity: int) -> list[int]:
    """Distribute all places as evenly as the candidates allow.

    A class with fewer candidates than its share leaves the rest to the others; places that cannot be divided evenly
    go to the first classes in order.

    Parameters
    ----------
    available : sequence of int
        Candidates of each class.
    capacity : int
        Places in all.

    Returns
    -------
    list of int
        Places of each class: at most its candidates, and min(capacity, sum(available)) in total.
    """
    quotas = [0] * len(available)
    left = capacity
    open_classes = [index for index, count in enumerate(available) if count > 0]
    while left > 0 and open_classes:
        share = max(1, left // len(open_classes))
        for index in open_classes:
            given = min(share, available[index] - quotas[index], left)
            quotas[index] += given
            left -= given
        open_classes = [index for index in open_classes if quotas[index] < available[index]]
    return quotas
