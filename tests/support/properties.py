"""Hypothesis profiles, which set the number of examples per property.

``quick``, the default, tries the same few examples in every run, so that a failure is due to a change and not to
chance. ``thorough`` draws many new ones, and is meant to be run before a release::

    python -m pytest -m hypothesis --hypothesis-profile=thorough --timeout=3600

``FEDKACE_HYPOTHESIS_PROFILE`` selects a profile as well.
"""

import os

from hypothesis import HealthCheck, settings

QUICK, THOROUGH = 25, 1000
_SLOW_INPUTS = (HealthCheck.too_slow, HealthCheck.data_too_large)


def load_profile() -> None:
    """Register both profiles and load the one that the environment names."""
    common = settings(deadline=None, database=None, print_blob=True, suppress_health_check=_SLOW_INPUTS)
    settings.register_profile("quick", common, max_examples=QUICK, derandomize=True)
    settings.register_profile("thorough", common, max_examples=THOROUGH)
    settings.load_profile(os.environ.get("FEDKACE_HYPOTHESIS_PROFILE", "quick"))


def examples(factor: float) -> settings:
    """Return settings with a multiple of the profile's number of examples, for especially cheap or costly properties."""
    return settings(max_examples=max(1, round(factor * settings().max_examples)))
