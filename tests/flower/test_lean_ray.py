"""How long Ray may take to start."""

import time

import pytest

from fedkace_flwr.flower import lean_ray


def test_a_ray_that_starts_slowly_is_waited_for_and_one_that_never_starts_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def get_node(address: str, number: str) -> str:
        if now[0] < ready:
            raise RuntimeError("not there yet")
        return f"{number} at {address}"

    ready = 100.0
    assert lean_ray.patient(get_node)("here", "7") == "7 at here"
    now[0], ready = 0.0, 1000.0
    with pytest.raises(RuntimeError, match="not there yet"):
        lean_ray.patient(get_node)("here", "7")
