"""Aggregation rules that bound the influence of single clients, and distances of models.

Two kinds of rules. Coordinate-wise rules (:func:`coordinate_median`, :func:`trimmed_mean`; Yin et al., ICML 2018)
treat every number of the models by itself. The others (:func:`multi_krum`, Blanchard et al., NeurIPS 2017;
:func:`geometric_median`, Pillutla et al., IEEE TSP 2022) give a weight to each model as a whole. Their result is a
weighted mean, and the weights depend on inner products of the models alone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

_COLUMNS = 1 << 18  # numbers of each model that are held in float64 at a time
_SMOOTHING = 1e-6  # smallest distance in Weiszfeld's iteration, relative to the largest one
_ITERATIONS = 100
_TOLERANCE = 1e-10


def gram_matrix(
    models: Sequence[Mapping[str, Array]],
    names: Iterable[str],
    origins: Sequence[Mapping[str, Array]] | None = None,
) -> Floats:
    """Inner products of models, or of their differences from their origins, summed in float64.

    Parameters
    ----------
    models : sequence of mapping
        m models by array name.
    names : iterable of str
        The arrays to include.
    origins : sequence of mapping, optional
        m models, subtracted from ``models`` one by one.

    Returns
    -------
    array
        float64 (m, m).
    """
    total = np.zeros((len(models), len(models)))
    for name in sorted(names):
        rows = [np.ravel(model[name]) for model in models]
        bases = None if origins is None else [np.ravel(origin[name]) for origin in origins]
        for begin in range(0, rows[0].size, _COLUMNS):
            part = slice(begin, begin + _COLUMNS)
            block = np.stack([row[part].astype(np.float64) for row in rows])
            if bases is not None:
                block -= np.stack([base[part] for base in bases])
            total += block @ block.T
    return total


def coordinate_median(values: Floats) -> Floats:
    """Median of each column of ``values``, float64 (m, d); shape (d,)."""
    return np.asarray(np.median(values, axis=0), dtype=np.float64)


def trimmed_mean(values: Floats, hostile: int) -> Floats:
    """Mean of each column without its ``hostile`` largest and smallest values.

    Parameters
    ----------
    values : array
        float64 (m, d), m greater than twice ``hostile``.
    hostile : int
        Number of models f that may be hostile.

    Returns
    -------
    array
        float64 (d,).
    """
    kept = np.sort(values, axis=0)[hostile : len(values) - hostile]
    return np.asarray(kept.mean(axis=0), dtype=np.float64)


def squared_distances(gram: Floats) -> Floats:
    """Squared distances, float64 (m, m), of m vectors with the given inner products; rounding below zero is cut off."""
    squares = np.diagonal(gram)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0)
    np.fill_diagonal(distances, 0)
    return np.asarray(distances, dtype=np.float64)


def multi_krum(gram: Floats, hostile: int) -> list[int]:
    """Choose the m - f models whose neighbours are nearest.

    The score of a model is the sum of its squared distances to its m - f - 2 nearest neighbours, at least one.

    Parameters
    ----------
    gram : array
        float64 (m, m), inner products of the updates.
    hostile : int
        Number of models f that may be hostile; less than m.

    Returns
    -------
    list of int
        The chosen models in ascending order; of two with the same score, the first is preferred.
    """
    models = len(gram)
    if models == 1:
        return [0]
    neighbours = max(1, models - hostile - 2)
    distances = squared_distances(gram)
    np.fill_diagonal(distances, np.inf)
    scores = np.sort(distances, axis=1)[:, :neighbours].sum(axis=1)
    return sorted(np.argsort(scores, kind="stable")[: models - hostile].tolist())


def geometric_median(gram: Floats, weights: Sequence[float]) -> Floats:
    """Weights of the models in their geometric median, which minimises the weighted sum of distances.

    Weiszfeld's iteration from the weighted mean. It stays within combinations of the models, so it needs their inner
    products alone.

    Parameters
    ----------
    gram : array
        float64 (m, m), inner products of the updates.
    weights : sequence of float
        Positive, one per model.

    Returns
    -------
    array
        float64 (m,), not negative, with sum 1.
    """
    given: Floats = np.array(weights, dtype=np.float64)
    shares: Floats = given / given.sum()
    smallest = _SMOOTHING * float(np.sqrt(squared_distances(gram).max(initial=0.0)))
    if smallest == 0:
        return shares
    squares = np.diagonal(gram)
    for _ in range(_ITERATIONS):
        products = gram @ shares
        distances = np.sqrt(np.maximum(squares - 2 * products + shares @ products, 0))
        nearer = given / np.maximum(distances, smallest)
        new = nearer / nearer.sum()
        moved = float(np.abs(new - shares).max())
        shares = new
        if moved < _TOLERANCE:
            break
    return shares


def cosines_to_others(gram: Floats) -> Floats:
    """Cosine between each vector and the mean of the others, after scaling all to the same length.

    Parameters
    ----------
    gram : array
        float64 (m, m), inner products of m vectors, m at least 2.

    Returns
    -------
    array
        float64 (m,); 0 for a vector of length zero, and where the others cancel out.
    """
    lengths = np.sqrt(np.maximum(np.diagonal(gram), 0))
    scale = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    unit = gram * scale[:, None] * scale[None, :]
    own = np.diagonal(unit)
    towards = unit.sum(axis=1) - own
    others = unit.sum() - 2 * unit.sum(axis=1) + own  # squared length of the others' sum
    length = np.sqrt(np.maximum(others, 0))
    cosines = np.divide(towards, length, out=np.zeros_like(towards), where=length > 1e-12)
    return np.asarray(np.clip(cosines, -1, 1), dtype=np.float64)


def distance(weights: Mapping[str, Array], origin: Mapping[str, Array], names: Iterable[str]) -> float:
    """Return the Euclidean distance over the named arrays, in float64; infinite only if it exceeds float64's range.

    Squares of large differences would overflow, so the differences are first divided by the largest.
    """
    with np.errstate(over="ignore"):
        differences = [weights[name].astype(np.float64) - origin[name] for name in sorted(names)]
    return length(differences)


def root_mean_square(rows: Array) -> float:
    """Return the root mean square length of the rows of a client's matrix (n, F)."""
    return length([rows.astype(np.float64)]) / math.sqrt(max(1, len(rows)))


def length(parts: Sequence[Array]) -> float:
    """Return the Euclidean length of float64 arrays, taken as one vector."""
    largest = max((float(np.abs(part).max(initial=0.0)) for part in parts), default=0.0)
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(sum(float(np.square(part / largest).sum()) for part in parts))
