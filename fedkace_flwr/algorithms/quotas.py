"""How many places of a buffer each class gets."""

from collections.abc import Sequence


def floor_quotas(available: Sequence[int], capacity: int) -> list[int]:
    """Give every class floor(capacity / classes) places (paper, section 4.3); what is left over stays empty."""
    return [capacity // len(available)] * len(available) if available else []


def water_filling_quotas(available: Sequence[int], capacity: int) -> list[int]:
    """Share all places as evenly as the candidates allow.

    A class with fewer candidates than its share gives the rest to the others; places that cannot be split
    evenly go to the first classes in order.

    Parameters
    ----------
    available : sequence of int
        Candidates of each class.
    capacity : int
        Places in all.

    Returns
    -------
    list of int
        Places of each class: at most its candidates, in all min(capacity, sum(available)).
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
