"""Number of places of each class in a buffer."""

from collections.abc import Sequence


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
