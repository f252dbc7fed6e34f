"""Training on a GPU: the captured step against the eager one, and a complete run.

The setting is that of :mod:`experiments.bench.training`: one client's round of 20 epochs with batches of 32. Times
include the capture. Without CUDA every figure is reported as not measured.
"""

import copy
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from experiments.bench.measure import Figures, interleaved, ratio, spread, unmeasured
from experiments.bench.training import BATCH, BUFFER, CHUNK, EPOCHS, Setting
from experiments.running.inline import run_inline
from fedkace_flwr.config import Config
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.training import loop

_CLIENTS = 10
_KINDS = ("eager", "captured", "captured, bf16")
_CAPTURED, _CAPTURED_BF16 = "captured step against eager", "captured step in bf16 against eager"
_MINUTES, _ACCURACY = "complete run on CIFAR-100, minutes", "complete run on CIFAR-100, accuracy of the last round"
_AIMS = {
    **{f"training, {kind}, samples per second": "" for kind in _KINDS},
    _CAPTURED: ">= 3",
    _CAPTURED_BF16: "",
}
_RUN = {
    "method": "fedkace",
    "dataset": "cifar100",
    "clients": _CLIENTS,
    "rounds": 100,
    "window": 5,
    "overlap": 5,
    "samples-per-class": 100,
    "width": 16,
    "epochs": EPOCHS,
    "capacity": BUFFER,
    "precision": "auto",
    "step": "captured",
    "diagnostics": False,
    "run-name": "complete",
}


def gpu(repeats: int) -> Figures:
    """Measure rates and ratios of a client's training."""
    if not torch.cuda.is_available():
        return {name: unmeasured(aim) for name, aim in _AIMS.items()}
    return training_on(torch.device("cuda"), repeats)


def gpu_run(repeats: int) -> Figures:
    """Time one complete FedKACE run with the paper's settings; the images are read from ``data``."""
    if not torch.cuda.is_available():
        return {_MINUTES: unmeasured("< 20"), _ACCURACY: unmeasured()}
    with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder:
        begun = time.perf_counter()
        run_inline(Config.parse({**_RUN, "results-dir": folder}))
        minutes = (time.perf_counter() - begun) / 60
        last = json.loads((Path(folder) / "complete" / "rounds.jsonl").read_text().splitlines()[-1])
    return {_MINUTES: {"median": minutes, "aim": "< 20"}, _ACCURACY: {"median": last["accuracy"]}}


def training_on(
    device: torch.device,
    repeats: int,
    *,
    epochs: int = EPOCHS,
    chunk: int = CHUNK,
    buffer: int = BUFFER,
) -> Figures:
    """Measure the figures of :func:`gpu` on any device and for rounds of any size."""
    setting = Setting.draw(chunk, buffer, str(device))
    settings = TrainingConfig(epochs=epochs, batch_size=BATCH)

    new, held = slice(0, setting.chunk), slice(setting.chunk, None)

    def train(*, captured: bool, precision: torch.dtype = torch.float32) -> Callable[[], object]:
        def task() -> None:
            net = copy.deepcopy(setting.net)
            net.precision = precision
            loop.train(
                net,
                (setting.images[new], setting.labels[new]),
                (setting.images[held], setting.labels[held]),
                setting.balanced(),
                settings,
                setting.preprocess,
                generator_for(0, "epoch"),
                captured=captured,
            )
            _wait_for(device)

        return task

    tasks = [train(captured=False), train(captured=True), train(captured=True, precision=torch.bfloat16)]
    eager, captured, captured_bf16 = interleaved(tasks, repeats)
    samples = epochs * (chunk + buffer)
    rates = [[samples / each for each in seconds] for seconds in (eager, captured, captured_bf16)]
    found = [*map(spread, rates), ratio(eager, captured, _AIMS[_CAPTURED]), ratio(eager, captured_bf16)]
    return dict(zip(_AIMS, found, strict=True))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
