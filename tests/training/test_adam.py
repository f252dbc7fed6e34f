"""The optimiser equals PyTorch's, and spares each process PyTorch's compiler."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fedkace_flwr.training.adam import Adam

PARAMETERS = ((3, 4), (5,), (2, 3, 3, 3))


def parameters(seed: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, generator=draws) for shape in PARAMETERS]
    made[2] = made[2].contiguous(memory_format=torch.channels_last)
    return [each.requires_grad_() for each in made]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_weights_and_moments_equal_pytorchs_bit_for_bit(decay: float, as_tensor: bool) -> None:
    """Over steps with changing rates, in some of which a parameter has no gradient."""
    mine, theirs = parameters(1), parameters(1)
    rate = torch.tensor(0.01, dtype=torch.float64) if as_tensor else 0.01
    adam = Adam(mine, rate, weight_decay=decay)
    reference = torch.optim.AdamW(theirs, lr=0.01, weight_decay=decay, fused=True)
    draws = torch.Generator().manual_seed(2)
    for number in range(7):
        adam.set_rate(0.01 / (1 + number))
        reference.param_groups[0]["lr"] = 0.01 / (1 + number)
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            gradient = torch.empty_like(one, requires_grad=False).copy_(torch.randn(one.shape, generator=draws))
            one.grad, other.grad = (None, None) if (index, number % 3) == (1, 0) else (gradient, gradient.clone())
        adam.step()
        reference.step()
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
            if one in adam.moments:
                moments, state = adam.moments[one], reference.state[other]
                assert torch.equal(moments.first, state["exp_avg"])
                assert torch.equal(moments.second, state["exp_avg_sq"])
                assert float(moments.steps) == float(state["step"])


def test_gradients_in_another_order_of_memory_move_the_same_weights() -> None:
    """Some layers' gradients do not lie in memory as their parameters do, which PyTorch's kernel for CPUs ignores."""
    apart, alike = parameters(1), parameters(1)
    optimisers = [Adam(apart, 0.1), Adam(alike, 0.1)]
    for seed in range(3):
        gradient = torch.randn(PARAMETERS[2], generator=torch.Generator().manual_seed(seed))
        apart[2].grad, alike[2].grad = gradient, gradient.contiguous(memory_format=torch.channels_last)
        for optimiser in optimisers:
            optimiser.step()
    assert torch.equal(apart[2], alike[2])


ROUND = """
import sys, tempfile
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.config import Config
small = {"clients": 2, "rounds": 2, "epochs": 1, "width": 2, "samples-per-class": 2, "capacity": 10, "threads": 1}
with tempfile.TemporaryDirectory() as folder:
    for method in ("fedkace", "tfcl"):
        run_inline(Config.parse({**small, "method": method, "results-dir": folder, "run-name": method}))
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_process_that_trains_does_not_load_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", ROUND], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout
