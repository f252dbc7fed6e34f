"""The optimisers equal PyTorch's, and spare each process PyTorch's compiler."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkace_flwr.training.optimisers import Adam, Optimiser, Sgd

PARAMETERS = ((3, 4), (5,), (2, 3, 3, 3))


def parameters(seed: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, generator=draws) for shape in PARAMETERS]
    made[2] = made[2].contiguous(memory_format=torch.channels_last)
    return [each.requires_grad_() for each in made]


def adamw(mine: list[Tensor], theirs: list[Tensor], rate: float | Tensor) -> tuple[Optimiser, Any]:
    return Adam(mine, rate, weight_decay=0.1), torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, fused=True)


def adam(mine: list[Tensor], theirs: list[Tensor], rate: float | Tensor) -> tuple[Optimiser, Any]:
    return Adam(mine, rate), torch.optim.Adam(theirs, lr=0.01, fused=True)


def plain(mine: list[Tensor], theirs: list[Tensor], rate: float | Tensor) -> tuple[Optimiser, Any]:
    return Sgd(mine, rate, weight_decay=0.1), torch.optim.SGD(theirs, lr=0.01, weight_decay=0.1, fused=True)


def momentum(mine: list[Tensor], theirs: list[Tensor], rate: float | Tensor) -> tuple[Optimiser, Any]:
    reference = torch.optim.SGD(theirs, lr=0.01, momentum=0.8, weight_decay=0.1, fused=True)
    return Sgd(mine, rate, weight_decay=0.1, momentum=0.8), reference


def nesterov(mine: list[Tensor], theirs: list[Tensor], rate: float | Tensor) -> tuple[Optimiser, Any]:
    reference = torch.optim.SGD(theirs, lr=0.01, momentum=0.8, weight_decay=0.1, nesterov=True, fused=True)
    return Sgd(mine, rate, weight_decay=0.1, momentum=0.8, nesterov=True), reference


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("pair", [adamw, adam, plain, momentum, nesterov])
def test_weights_and_means_equal_pytorchs_bit_for_bit(pair: Callable[..., Any], as_tensor: bool) -> None:
    """Over steps with changing rates, in some of which a parameter has no gradient."""
    mine, theirs = parameters(1), parameters(1)
    optimiser, reference = pair(mine, theirs, torch.tensor(0.01, dtype=torch.float64) if as_tensor else 0.01)
    draws = torch.Generator().manual_seed(2)
    for number in range(7):
        optimiser.set_rate(0.01 / (1 + number))
        reference.param_groups[0]["lr"] = 0.01 / (1 + number)
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            gradient = torch.empty_like(one, requires_grad=False).copy_(torch.randn(one.shape, generator=draws))
            one.grad, other.grad = (None, None) if (index, number % 3) == (1, 1) else (gradient, gradient.clone())
        optimiser.step()
        reference.step()
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
            if one in optimiser.memory:
                memory, state = optimiser.memory[one], reference.state[other]
                known = [state[name] for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in state]
                assert len(memory.means) == len(known) == optimiser.means
                assert all(torch.equal(mean, each) for mean, each in zip(memory.means, known, strict=True))
                assert float(memory.steps) == float(state.get("step", 0))


@pytest.mark.parametrize("optimiser_of", [Adam, partial(Sgd, momentum=0.9)])
def test_gradients_in_another_order_of_memory_move_the_same_weights(optimiser_of: Callable[..., Optimiser]) -> None:
    """Some layers' gradients do not lie in memory as their parameters do, which PyTorch's kernel for CPUs ignores."""
    apart, alike = parameters(1), parameters(1)
    optimisers = [optimiser_of(apart, 0.1), optimiser_of(alike, 0.1)]
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
        for optimiser in ("adamw", "nesterov"):
            told = {"method": method, "optimiser": optimiser, "results-dir": folder, "run-name": method + optimiser}
            run_inline(Config.parse(small | told))
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_process_that_trains_does_not_load_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", ROUND], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout
