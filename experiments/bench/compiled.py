"""What ``torch.compile`` would give on this machine, and what it takes first; the project does not use it."""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from experiments.bench.measure import Figures, interleaved, ratio
from experiments.bench.training import BATCH, Setting

_STEPS = 8
Forward = Callable[[Tensor], Tensor]


def compiled(repeats: int) -> Figures:
    """Steps of training, forward and backward compiled, against eager ones; ragged last batches aside."""
    figures: Figures = {}
    for name, precision in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        setting = Setting.draw(chunk=_STEPS * BATCH, buffer=0)
        net = setting.net.train()
        net.precision = precision
        inputs, labels = torch.split(setting.preprocess(setting.images), BATCH), torch.split(setting.labels, BATCH)
        optimiser = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.001, fused=True)

        def steps(
            forward: Forward,
            inputs: tuple[Tensor, ...] = inputs,
            labels: tuple[Tensor, ...] = labels,
            optimiser: torch.optim.Optimizer = optimiser,
        ) -> None:
            for images, truth in zip(inputs, labels, strict=True):
                loss = functional.cross_entropy(forward(images), truth)
                optimiser.zero_grad(set_to_none=True)
                torch.autograd.backward(loss)
                optimiser.step()

        torch.compiler.reset()
        fast: Forward = torch.compile(net)
        begun = time.perf_counter()
        steps(fast)
        figures[f"compiling, {name}, seconds"] = {"median": time.perf_counter() - begun}
        eager, quick = interleaved([lambda net=net: steps(net), lambda fast=fast: steps(fast)], 4 * repeats)  # type: ignore[misc]
        figures[f"compiled step against eager, {name}"] = ratio(eager, quick)
    return figures
