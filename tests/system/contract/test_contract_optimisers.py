"""Every method trains with every optimiser, and its server's model takes an optimiser's step if it is a mean."""

import numpy as np
import pytest
from support.systems.contract import DISTINCT_METHODS, SHAPE, Make
from support.systems.runs import last, ran

from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError


@pytest.mark.matrix
@pytest.mark.parametrize("method", DISTINCT_METHODS)
def test_each_optimiser_trains_and_leaves_a_model_of_its_own(small: Make, method: str) -> None:
    found = []
    for word in ("adamw", "sgd", "nesterov"):
        lines = ran(small(run_name=word, **SHAPE, method=method, optimiser=word, learning_rate=0.02))
        assert len(lines) == 3 and not any(line["failures"] for line in lines)
        assert all(accuracy is not None for accuracy in lines[-1]["client_accuracy"])
        found.append([line["client_accuracy"] for line in lines])
    assert (found[0] in found[1:]) == (method == "afl"), "AFL takes no steps"


@pytest.mark.matrix
@pytest.mark.parametrize("method", DISTINCT_METHODS)
def test_a_server_optimiser_works_with_the_method_or_is_refused(small: Make, method: str) -> None:
    keys = {**SHAPE, "method": method, "server_optimiser": "momentum"}
    try:
        configured(small(**keys))
    except ConfigError:
        assert method in ("tfcl", "afl", "fed-talora", "dcfcl", "lkc", "centralized")
        return
    plain, moved = (small(run_name=name, **{**keys, "server_optimiser": name}) for name in ("none", "momentum"))
    first, second = ran(plain), ran(moved)
    assert not any(line["failures"] for line in second)
    assert first[0]["client_accuracy"] == second[0]["client_accuracy"], "momentum's first step ends at the mean"
    assert not np.array_equal(last(plain).weights["output.weight"], last(moved).weights["output.weight"])
