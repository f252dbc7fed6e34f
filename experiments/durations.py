"""Durations in words."""


def span(seconds: float) -> str:
    """Return a duration in a suitable unit, for example ``2.5 hours``."""
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds" if seconds >= 1 else "less than a second"


def about(seconds: float) -> str:
    """Return an estimated duration, for example ``about 2.5 hours`` or ``less than a second``."""
    return f"about {span(seconds)}" if seconds >= 1 else span(seconds)
