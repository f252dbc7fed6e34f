"""What the first optimiser of a new process costs: this project's, and PyTorch's own, which loads PyTorch's compiler."""

import json
import subprocess
import sys

from experiments.bench.measure import Figures, spread

_SCRIPT = """
import json, sys, time
import psutil, torch
from fedkace_flwr.training.adam import Adam
weight = torch.zeros(3, requires_grad=True)
weight.grad = torch.ones(3)
memory, begun = psutil.Process().memory_info().rss, time.process_time()
(Adam([weight], 0.1) if sys.argv[1] == "ours" else torch.optim.AdamW([weight], lr=0.1, fused=True)).step()
seconds = time.process_time() - begun
print(json.dumps([seconds, (psutil.Process().memory_info().rss - memory) / 2**20]))
"""


def optimiser(repeats: int) -> Figures:
    """Measure processor time and growth of resident memory of making an optimiser and taking a step, each in a process of its own."""
    figures: Figures = {}
    for name, kind in (("this project's optimiser", "ours"), ("torch.optim.AdamW", "torch")):
        command = [sys.executable, "-c", _SCRIPT, kind]
        found = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(repeats)
        ]
        figures[f"{name}, first step of a process, processor seconds"] = spread([seconds for seconds, _ in found])
        figures[f"{name}, first step of a process, MiB"] = spread([mebibytes for _, mebibytes in found])
    return figures
