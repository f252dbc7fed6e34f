"""Leverage scores of features that never leave their client unmasked (FedCBDR; Qi et al., NeurIPS 2025, Eqs. 1 to 6).

Pure tensor mathematics in float64. Shapes: n samples of a client, N samples of all clients, F features, r the
rank of the stacked features.

The leverage of row j of a matrix X is ||row j of U||^2, U the left singular vectors of X; equally
x_j (X^T X)^+ x_j^T. It measures how much of X only that row can explain, and does not change when X is multiplied
by an invertible matrix from the right. A rotation P of a client's rows does change it, so the client removes P before
it computes its scores.
"""

import torch
from torch import Tensor

from fedkace_flwr.algorithms.class_balance import water_filling_quotas

_FLOOR = 1e-12  # so that a sample without leverage is drawn last rather than never


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """Draw a rotation or reflection from the uniform (Haar) distribution.

    Parameters
    ----------
    size : int
        Rows and columns.
    generator : torch.Generator
        CPU generator.

    Returns
    -------
    Tensor
        float64 (size, size).
    """
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    signed: Tensor = q * r.diagonal().sign()  # without the signs, QR's convention would bias the distribution
    return signed


def mask(features: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """P X Q.

    Parameters
    ----------
    features : Tensor
        X, float64 (n, F).
    left : Tensor
        P, orthogonal, float64 (n, n), the client's secret.
    right : Tensor
        Q, orthogonal, float64 (F, F), the same for all clients.
    """
    return left @ features @ right


def left_factor(stacked: Tensor) -> Tensor:
    """Left singular vectors of nonzero singular values, float64 (N, r).

    r counts the singular values above max(N, F) * eps * the largest. The remaining vectors are arbitrary;
    with all N vectors, every leverage would be 1.

    Parameters
    ----------
    stacked : Tensor
        Finite, float64 (N, F).
    """
    scale = stacked.abs().max()
    if scale == 0:
        return stacked[:, :0]
    u: Tensor
    u, values, _ = torch.linalg.svd(stacked / scale, full_matrices=False)
    tolerance = max(stacked.shape) * torch.finfo(torch.float64).eps * values[0]
    rank = int((values > tolerance).sum())
    return u.narrow(1, 0, rank)


def unmask(rows: Tensor, left: Tensor) -> Tensor:
    """Remove a client's rotation from its rows of U: P^T U, float64 (n, r)."""
    return left.T @ rows


def leverage(rows: Tensor) -> Tensor:
    """Squared lengths of the rows of U: float64 (n,), in [0, 1]; their sum over all clients is r."""
    return rows.square().sum(dim=1)


def draw(scores: Tensor, labels: Tensor, capacity: int, generator: torch.Generator) -> Tensor:
    """Draw within each class without replacement, with probability proportional to the score.

    Places are distributed over the classes as evenly as their samples allow; places that cannot be divided go to
    classes in random order. This order is drawn first, so the places per class depend on labels and generator only.
    Dividing weights by independent exponential variables and keeping the largest is sequential weighted
    drawing without replacement (Efraimidis and Spirakis, 2006).

    Parameters
    ----------
    scores : Tensor
        float64 (n,), not negative.
    labels : Tensor
        int64 (n,).
    capacity : int
        Total number of places, M.
    generator : torch.Generator
        CPU generator.

    Returns
    -------
    Tensor
        int64 (min(M, n),): distinct positions, ascending.
    """
    classes = torch.bincount(labels).nonzero().squeeze(1)
    classes = classes[torch.randperm(len(classes), generator=generator)]
    weights = scores + _FLOOR
    priority = weights / torch.empty_like(weights).exponential_(generator=generator)
    members = [(labels == label).nonzero().squeeze(1) for label in classes]
    quotas = water_filling_quotas([len(positions) for positions in members], capacity)
    kept = [
        positions[priority[positions].argsort(descending=True, stable=True)[:places]]
        for positions, places in zip(members, quotas, strict=True)
    ]
    return torch.cat(kept).sort().values if kept else torch.empty(0, dtype=torch.int64)
