"""FLwF: distillation from the received model."""

from collections.abc import Callable

import numpy as np
import pytest
from support.systems.in_process import Federation

from fedkace_flwr.clients import flwf
from fedkace_flwr.config import Config

Make = Callable[..., Config]


def test_round_one_is_federated_averaging_and_later_rounds_distil(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(method: str, weight: float = flwf.LAMBDA) -> list[np.ndarray]:
        monkeypatch.setattr(flwf, "LAMBDA", weight)
        federation = Federation(small(method=method, run_name=f"{method}-{weight}"))
        return [federation.train(0, number).weights["output.weight"] for number in (1, 2)]

    averaging, distilling, heavily = outcome("fedavg"), outcome("flwf"), outcome("flwf", 9.0)
    assert np.array_equal(averaging[0], distilling[0]) and np.array_equal(averaging[0], heavily[0])
    assert not np.array_equal(averaging[1], distilling[1]) and not np.array_equal(distilling[1], heavily[1])
    assert np.array_equal(averaging[1], outcome("flwf", 0.0)[1])
