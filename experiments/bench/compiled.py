"""The gain and the compile time of ``torch.compile`` on this machine; the project does not use it."""

import time
from functools import partial

import torch

from experiments.bench.measure import Figures, interleaved, ratio
from experiments.bench.training import BATCH, Setting, bare_steps

_STEPS = 8


def compiled(repeats: int) -> Figures:
    """Compare compiled training steps, forward and backward, with eager ones; full batches only."""
    figures: Figures = {}
    for name, precision in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        setting = Setting.draw(chunk=_STEPS * BATCH, buffer=0)
        net = setting.net.train()
        net.precision = precision
        inputs = setting.preprocess(setting.images)
        torch.compiler.reset()
        slow, fast = (
            partial(bare_steps, net, forward, inputs, setting.labels) for forward in (net, torch.compile(net))
        )
        begun = time.perf_counter()
        fast()
        figures[f"compiling, {name}, seconds"] = {"median": time.perf_counter() - begun}
        eager, quick = interleaved([slow, fast], 4 * repeats)
        figures[f"compiled step against eager, {name}"] = ratio(eager, quick)
    return figures
