"""What a client's process has cost its machine so far."""

import os
import resource
from collections.abc import Callable

_KIB = 1024  # of which Linux counts memory in


def cpu_meter() -> Callable[[], float]:
    """Return a function that gives the CPU seconds of this process since its last call, at first since the process began.

    Those of processes that it started and that have ended count as well.
    """
    reported = 0.0

    def spent() -> float:
        nonlocal reported
        now = sum(os.times()[:4])
        before, reported = reported, now
        return now - before

    return spent


def peak_memory() -> float:
    """Return the most memory, in MiB, that this process has held so far, or a larger one that it started."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(each).ru_maxrss for each in whose) / _KIB
