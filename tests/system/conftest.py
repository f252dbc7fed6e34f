"""Runs that several files of this folder look at."""

from collections.abc import Callable
from functools import cache

import pytest
from support.common import SMALL
from support.systems.contract import SHAPE, Watched, watch

from fedkace_flwr.config import Config


@pytest.fixture(scope="session")
def watched_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Watched]:
    """The undisturbed run of a method, made once; tests look at its folder and messages and change nothing."""
    shape = {name.replace("_", "-"): value for name, value in SHAPE.items()}

    @cache
    def watched(method: str) -> Watched:
        root = str(tmp_path_factory.mktemp("watched"))
        return watch(Config.parse({**SMALL, **shape, "method": method, "results-dir": root, "run-name": "run"}))

    return watched
