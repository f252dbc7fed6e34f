"""Every choice of a method's own keys: it runs, sends the documented bytes, and survives lost replies and restarts."""

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import pytest
from support.common import SMALL, rounds_of
from support.made.keys import KEYS
from support.systems.contract import (
    SHAPE,
    Make,
    Watched,
    assert_a_client_drops_out_and_comes_back,
    assert_a_run_in_pieces_equals,
    assert_bytes_are_as_declared,
    watch,
)

from fedkace_flwr.config import Config
from fedkace_flwr.registry import METHODS

# Keys that begin with a method's name are its own; these are all their values but the defaults.
OWN_CHOICES = [
    (name.split("-")[0], name, value)
    for name, (default, key) in KEYS.items()
    if name.split("-")[0] in METHODS
    for value in (key.choices or ((True, False) if isinstance(default, bool) else ()))
    if value != default
]
# Readings of a publication: even the small run here must differ from the default's.
READINGS = [
    *("fedcbdr-temperatures", "fedcbdr-scores", "fedcbdr-replacement"),
    *("ofcl-merge", "ofcl-aggregation", "refed-start", "refed-anchor"),
]
# These change what a client computes from a round's samples and nothing that is stored or sent, so that a lost reply or
# a restart means to them what it means to the default.
STATELESS = {
    *("fedcbdr-new-columns", "fedcbdr-temperatures", "ofcl-views", "ofcl-rescore", "refed-reduction"),
    *("refed-gradient", "tfcl-loss", "tfcl-prune", "dcfcl-distil-classes"),
}
# The second round's classes are the first one's, the third one's are new; every sample fits in the first round's
# buffer and in no later one.
CHOICE_SHAPE = {**SHAPE, "overlap": 2, "capacity": 20}

pytestmark = pytest.mark.slow

Choice = dict[str, Any]


def choices(*, left_out: Collection[str] = ()) -> pytest.MarkDecorator:
    """Parametrise a test by choice; one worker runs all choices of a method, so that runs are shared."""
    return pytest.mark.parametrize(
        "choice",
        [
            pytest.param(
                {"method": method, name.replace("-", "_"): value},
                id=f"{name}={value}",
                marks=pytest.mark.xdist_group(f"choices of {method}"),
            )
            for method, name, value in OWN_CHOICES
            if name not in left_out
        ],
    )


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Choice], Watched]:
    """The undisturbed run of a choice, made once."""

    @cache
    def watched(*choice: tuple[str, Any]) -> Watched:
        values = {name.replace("_", "-"): value for name, value in {**CHOICE_SHAPE, **dict(choice)}.items()}
        root = str(tmp_path_factory.mktemp("choice"))
        return watch(Config.parse({**SMALL, **values, "results-dir": root, "run-name": "run"}))

    return lambda choice: watched(*choice.items())


@choices()
def test_a_choice_runs_with_the_documented_bytes(run_of: Callable[[Choice], Watched], choice: Choice) -> None:
    run = run_of(choice)
    assert_bytes_are_as_declared(run)
    records = rounds_of(run.folder)
    assert all(record["accuracy"] is not None for record in records)
    assert all(size is None or size <= 20 for record in records for size in record["buffer_size"])
    if any(name.replace("_", "-") in READINGS for name in choice):
        assert records != rounds_of(run_of({"method": choice["method"]}).folder)


@choices(left_out=STATELESS)
def test_a_client_that_drops_out_comes_back_under_every_choice(small: Make, choice: Choice) -> None:
    assert_a_client_drops_out_and_comes_back(small(deadline=0.05, **choice, **CHOICE_SHAPE))


@choices(left_out=STATELESS)
def test_a_run_in_pieces_equals_an_undisturbed_one_under_every_choice(
    small: Make, run_of: Callable[[Choice], Watched], choice: Choice
) -> None:
    pieces = small(run_name="pieces", resume=True, **choice, **CHOICE_SHAPE)
    assert_a_run_in_pieces_equals(run_of(choice).folder, pieces)
