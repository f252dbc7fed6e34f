"""FLwF: distillation from the received model."""

from collections.abc import Callable

import numpy as np
from support.systems.in_process import Federation

from fedkace_flwr.config import Config

Make = Callable[..., Config]


def test_round_one_is_federated_averaging_and_later_rounds_distil(small: Make) -> None:
    def outcome(method: str, **changes: float) -> list[np.ndarray]:
        federation = Federation(small(method=method, run_name=f"{method}-{len(changes)}", **changes))
        return [federation.train(0, number).weights["output.weight"] for number in (1, 2)]

    averaging, distilling, heavily = outcome("fedavg"), outcome("flwf"), outcome("flwf", flwf_lambda=9.0)
    assert np.array_equal(averaging[0], distilling[0]) and np.array_equal(averaging[0], heavily[0])
    assert not np.array_equal(averaging[1], distilling[1]) and not np.array_equal(distilling[1], heavily[1])
    assert np.array_equal(averaging[1], outcome("flwf", flwf_lambda=0.0)[1])
