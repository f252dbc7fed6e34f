"""Holistic buffer maintenance (paper, section 4.3 and appendix B.4).

Pure tensor mathematics, in float64 and log space, so that no score is NaN. Shapes: N candidates (the
m samples of the old buffer first, then the chunk), C classes, d active classes, r centres (the old buffer,
or landmarks drawn from it).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkace_flwr.algorithms.class_balance import drawn, water_filling_quotas
from fedkace_flwr.compute.memory import at_home
from fedkace_flwr.seeding import generator_for

_BLOCK_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class Scores:
    """Scores of N candidates, each float64 (N,).

    Attributes
    ----------
    diversity : Tensor
        DS: squared distance to the nearest sample of the old buffer.
    information : Tensor
        IDV: information of the sample given the old buffer, plus weighted diversity.
    consistency : Tensor
        CDV: agreement of the sample with its neighbourhood, plus weighted diversity; 0 for new classes.
    """

    diversity: Tensor
    information: Tensor
    consistency: Tensor


def score_candidates(
    logits: Tensor,
    labels: Tensor,
    buffer_size: int,
    old: Tensor,
    active: Tensor,
    *,
    self_distance: str = "include",
    landmarks: int | None = None,
    generator: torch.Generator | None = None,
    block_elements: int = _BLOCK_ELEMENTS,
) -> Scores:
    """Score the candidates for the new buffer, on the device of the logits.

    Parameters
    ----------
    logits : Tensor
        Float (N, C), of the local model in evaluation mode; the first ``buffer_size`` rows are the old buffer.
    labels : Tensor
        int64 (N,).
    buffer_size : int
        m, samples in the old buffer; 0 in the first round.
    old, active : Tensor
        bool (C,): classes of earlier chunks, and of all chunks including the current one.
    self_distance : {"include", "exclude"}
        Whether a buffered sample counts as its own nearest neighbour.
    landmarks : int, optional
        Compare with this many uniformly drawn buffer samples if the buffer is larger; None or 0: with all.
    generator : torch.Generator, optional
        Draws the landmarks; a fixed stream if None.
    block_elements : int
        Distances held at once; limits the memory and does not change the scores.

    Returns
    -------
    Scores
        In the order of the candidates, on the CPU.
    """
    device = logits.device
    x = logits.detach().double()[:, _chosen(active).to(device)]
    labels, old, active = labels.to(device), old.to(device), active.to(device)
    direction = _directions(x)
    log_probability = x.log_softmax(dim=1)
    column = (active.long().cumsum(0) - 1)[labels]
    own = log_probability.gather(1, column.unsqueeze(1)).squeeze(1)
    if buffer_size == 0:
        return _scores(torch.zeros_like(own), -own, torch.zeros_like(own))

    centres = _centres(buffer_size, landmarks, generator).to(device)
    beta = kernel_beta(buffer_size, x.shape[1])
    diversity, log_a, log_b = torch.empty_like(own), torch.empty_like(own), torch.empty_like(own)
    rows_at_once = max(1, block_elements // len(centres))
    for start in range(0, len(x), rows_at_once):
        rows = slice(start, start + rows_at_once)
        itself = torch.arange(len(x), device=device)[rows].unsqueeze(1) == centres
        distance = _squared_distances(direction[rows], direction[centres]).masked_fill_(itself, 0.0)
        log_kernel = -beta * distance
        log_b[rows] = log_kernel.logsumexp(dim=1)
        log_a[rows] = (log_kernel + log_probability[centres][:, column[rows]].T).logsumexp(dim=1)
        if self_distance == "exclude":
            distance.masked_fill_(itself, math.inf)
        nearest = distance.amin(dim=1)
        diversity[rows] = torch.where(nearest.isinf(), 0.0, nearest)

    zero = torch.zeros_like(own)
    log_before = log_a - log_b
    log_after = torch.logaddexp(log_a, own) - torch.logaddexp(log_b, zero)
    weight_1 = math.log(buffer_size) / math.sqrt(buffer_size)
    weight_2 = 1 / math.sqrt(buffer_size)
    met = old[labels]
    information = torch.where(met, -log_before, -own) + weight_1 * diversity
    consistency = torch.where(met, own - log_after + weight_2 * diversity, zero)
    return _scores(diversity, information, consistency)


def _scores(diversity: Tensor, information: Tensor, consistency: Tensor) -> Scores:
    found = {"diversity": diversity, "information": information, "consistency": consistency}
    return Scores(**at_home(found))


def select(
    scores: Scores,
    labels: Tensor,
    capacity: int,
    old: Tensor,
    active: Tensor,
    generator: torch.Generator,
    *,
    quota: str = "met",
    leftover: str = "drop",
    rule: str = "hbms",
) -> Tensor:
    """Choose the new buffer from the candidates, class by class, in two stages.

    A class seen before keeps the q candidates of highest consistency among the 2q of highest information. A new
    class keeps q candidates drawn without replacement with probability proportional to exp(information). A class with
    at most q candidates keeps them all. Ties go to the lower position.

    Parameters
    ----------
    scores : Scores
        Of N candidates.
    labels : Tensor
        int64 (N,).
    capacity : int
        M, places in the buffer.
    old, active : Tensor
        bool (C,), as in :func:`score_candidates`.
    generator : torch.Generator
        CPU generator for the draws of new classes.
    quota : {"met", "all"}
        Divide the places among the active classes, or among all C.
    leftover : {"drop", "fill"}
        Leave places that floor(M / classes) does not cover empty, or distribute them among the active classes.
    rule : {"hbms", "information", "random"}
        Both stages; or every class drawn by information, like new classes (ablation AS6), or uniformly
        (ablation AS7).

    Returns
    -------
    Tensor
        int64, ascending and distinct positions among the candidates, at most ``capacity``.
    """
    labels = labels.cpu()
    classes = [int(label) for label in active.nonzero()]
    members = [(labels == label).nonzero().squeeze(1) for label in classes]
    available = [len(positions) for positions in members]
    if leftover == "fill":
        quotas = water_filling_quotas(available, capacity)
    else:
        quotas = [capacity // (len(active) if quota == "all" else len(classes)) for _ in classes]
    kept = [torch.empty(0, dtype=torch.int64)]
    for label, positions, places in zip(classes, members, quotas, strict=True):
        if rule == "random" or len(positions) <= places:
            kept.append(drawn(positions, places, generator))
        elif rule == "hbms" and bool(old[label]):
            informative = _highest(positions, scores.information, 2 * places)
            kept.append(_highest(informative, scores.consistency, places))
        else:
            kept.append(sample_by_information(positions, scores.information, places, generator))
    return torch.cat(kept).sort().values


def sample_by_information(positions: Tensor, information: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` positions without replacement, with probability proportional to exp(information).

    Taking the highest scores after adding independent Gumbel noise draws from exactly this distribution, without
    any exponential of the scores.
    """
    exponential = torch.empty(len(positions), dtype=torch.float64).exponential_(generator=generator)
    keys = information[positions] - exponential.log()
    return positions[keys.argsort(descending=True, stable=True)[:count]].sort().values


def kernel_beta(buffer_size: int, active_classes: int) -> float:
    """Decay rate of the kernel: m^(2/d), or 1 for an empty buffer."""
    return float(buffer_size) ** (2 / active_classes) if buffer_size else 1.0


def kernel_condition_number(logits: Tensor, active: Tensor, beta: float) -> float:
    """Condition number of the kernel matrix of a buffer (paper, Table 3).

    Parameters
    ----------
    logits : Tensor
        Float (m, C), m >= 1.
    active : Tensor
        bool (C,).
    beta : float
        Decay rate of the kernel.

    Returns
    -------
    float
        Ratio of the largest to the smallest eigenvalue; infinite if the matrix is singular in float64.
    """
    x = logits.detach().double()[:, _chosen(active).to(logits.device)]
    (number,) = _condition_numbers(x.unsqueeze(0), beta)
    return number


def class_condition_number(logits: Tensor, labels: Tensor, active: Tensor, beta: float) -> float:
    """Mean over classes of the condition number of each class's own kernel matrix (paper, section B.4).

    Parameters
    ----------
    logits, active, beta
        As in :func:`kernel_condition_number`.
    labels : Tensor
        int64 (m,): class of each sample.

    Returns
    -------
    float
        Infinite if any of the matrices is singular in float64; a class with a single sample counts as 1.
    """
    x = logits.detach().double()[:, _chosen(active).to(logits.device)]
    members: dict[int, list[Tensor]] = {}  # of classes with as many samples as each other
    for label in sorted(set(labels.tolist())):
        rows = (labels == label).nonzero().squeeze(1)
        members.setdefault(len(rows), []).append(rows)
    alike = (x[torch.stack(rows).to(x.device)] for rows in members.values())
    numbers = [number for each in alike for number in _condition_numbers(each, beta)]
    return math.fsum(numbers) / len(numbers)


def _condition_numbers(x: Tensor, beta: float) -> list[float]:
    """Condition numbers of the kernel matrices of several sets of samples, float64 (k, m, d).

    On a GPU all at once; on a CPU one by one, since PyTorch rounds differently for several.
    """
    parts = x.unbind() if x.device.type == "cpu" else [x]
    eigenvalues = torch.cat([_extreme_eigenvalues(part, beta).view(-1, 2) for part in parts])
    least = x.shape[1] * torch.finfo(torch.float64).eps
    return [math.inf if low <= high * least else high / low for low, high in eigenvalues.tolist()]


def _extreme_eigenvalues(x: Tensor, beta: float) -> Tensor:
    """Smallest and largest eigenvalue of the kernel matrix of samples, float64 (..., m, d) to (..., 2)."""
    direction = _directions(x)
    # Unlike _squared_distances, exactly 0 between duplicates, which a large beta requires.
    distance = torch.cdist(direction, direction, compute_mode="donot_use_mm_for_euclid_dist").square()
    eigenvalues = torch.linalg.eigvalsh(torch.exp(-beta * distance))
    return torch.stack([eigenvalues[..., 0], eigenvalues[..., -1]], dim=-1)


def _chosen(classes: Tensor) -> Tensor:
    """The classes of a mask, int64, on the mask's device."""
    return classes.nonzero().squeeze(1)


def _directions(x: Tensor) -> Tensor:
    """Rows scaled to unit length; rows of zeros stay. Scaling by the largest entry first avoids overflow."""
    tiny = torch.finfo(torch.float64).tiny
    x = x / x.abs().amax(dim=-1, keepdim=True).clamp_min(tiny)
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min(tiny)


def _squared_distances(x: Tensor, centres: Tensor) -> Tensor:
    squares = x.square().sum(dim=1, keepdim=True) + centres.square().sum(dim=1)
    return torch.addmm(squares, x, centres.T, alpha=-2.0).clamp_min_(0.0)


def _centres(buffer_size: int, landmarks: int | None, generator: torch.Generator | None) -> Tensor:
    if not landmarks or landmarks >= buffer_size:
        return torch.arange(buffer_size)
    generator = generator or generator_for(0, "landmarks")
    return torch.randperm(buffer_size, generator=generator)[:landmarks].sort().values


def _highest(positions: Tensor, score: Tensor, count: int) -> Tensor:
    order = score[positions].argsort(descending=True, stable=True)[:count]
    return positions[order].sort().values
