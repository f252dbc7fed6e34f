"""Durations in words."""


def span(seconds: float) -> str:
    """Return a duration in a suitable unit, for example ``2.5 hours``."""
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds" if seconds >= 1 else "less than a second"
