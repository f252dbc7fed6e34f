"""The server's optimisers, by numbers worked by hand from algorithm 2 of Reddi et al. (ICLR 2021)."""

from collections.abc import Mapping

import numpy as np
import pytest

from fedkace_flwr.algorithms.server_optimisers import Array, ServerOptimiser


def model(*weights: float, statistic: float = 5.0) -> dict[str, Array]:
    return {"w": np.array(weights, np.float32), "bn.running_var": np.array([statistic], np.float32)}


def stepped(optimiser: ServerOptimiser, before: Mapping[str, Array], distance: float) -> dict[str, Array]:
    """The model after a round whose aggregate lies at a distance."""
    target = {**before, "w": before["w"] + np.float32(distance)}
    return optimiser.step(before, target, frozenset({"w"}))


@pytest.mark.parametrize(
    ("name", "rate", "expected"),
    [
        # m = 0.5, then 0.9 * 0.5 + 0.2 = 0.65, then 0.9 * 0.65 + 0.01 = 0.595
        ("momentum", 1.0, [0.5, 1.15, 1.745]),
        ("momentum", 0.1, [0.05, 0.115, 0.1745]),
        # m = 0.05, 0.065, 0.0595; v = 0.00250099, 0.00287598, 0.00284822; m / (sqrt(v) + 0.001) = 0.980202, ...
        ("adam", 0.1, [0.0980202, 0.2170064, 0.3264444]),
        # v = 0.000001 + 0.0025, then + 0.0004, then - 0.000001, since 0.01^2 is less than v
        ("yogi", 0.1, [0.0980200, 0.2165014, 0.3249759]),
    ],
)
def test_three_steps_worked_by_hand(name: str, rate: float, expected: list[float]) -> None:
    optimiser, now = ServerOptimiser(name, rate), model(0.0)
    for distance, place in zip((0.5, 0.2, 0.01), expected, strict=True):
        now = stepped(optimiser, now, distance)
        assert now["w"] == pytest.approx([place], abs=2e-7)


def test_what_is_no_parameter_is_the_aggregates() -> None:
    optimiser = ServerOptimiser("momentum", 3.0)
    before, target = model(1.0, statistic=2.0), model(0.0, statistic=0.5)
    after = optimiser.step(before, target, frozenset({"w"}))
    assert after["w"].tolist() == [-2.0] and after["bn.running_var"] is target["bn.running_var"]
    assert not any("running" in name for name in optimiser.state())


@pytest.mark.parametrize("name", ["momentum", "adam", "yogi"])
def test_it_goes_on_from_its_state_as_if_it_had_never_stopped(name: str) -> None:
    draws = np.random.default_rng(0)
    distances = draws.normal(0, 0.1, 6)
    whole, part, now = ServerOptimiser(name, 0.1), ServerOptimiser(name, 0.1), model(*draws.normal(size=50))
    there = now
    for number, distance in enumerate(distances):
        now, there = stepped(whole, now, distance), stepped(part, there, distance)
        assert now["w"].dtype == np.float32 and now["w"].tobytes() == there["w"].tobytes(), number
        others = {"own": np.zeros(1)}
        kept = part.state()
        part = ServerOptimiser(name, 0.1)
        assert part.restored({**others, **kept}) == others
    assert whole.state().keys() == part.state().keys()
    whole.restored({})
    assert whole.state() == {}
