"""A GPU: the speed of training, testing and selection on it, the tests that need one, and a complete run.

The setting is that of :mod:`fedkace_flwr.experiments.bench.training`: one client's round with batches of 32, but with four of its 20
epochs, since an epoch takes as long as any other. The first training of a process, which records the step, is not
counted. Without CUDA every figure is reported as not measured.
"""

import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from fedkace_flwr.algorithms.fedkace_buffer import kernel_condition_number, score_candidates
from fedkace_flwr.compute.numerics import settle
from fedkace_flwr.config import Config
from fedkace_flwr.experiments.bench.measure import Figures, interleaved, ratio, spread, unmeasured
from fedkace_flwr.experiments.bench.training import BATCH, BUFFER, CHUNK, CLASSES, EPOCHS, Setting
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.processes import CHECKOUT
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.training import loop
from fedkace_flwr.training.cuda_graphs import KeptSteps

_CLIENTS, _EPOCHS = 10, 4
_TESTS = "tests that need a GPU: failed"
_KINDS: Mapping[str, Mapping[str, object]] = {
    "eager": {},
    "captured": {"captured": True},
    "captured, tf32": {"captured": True, "tf32": True},
    "captured, bf16": {"captured": True, "precision": torch.bfloat16},
    "captured, deterministic": {"captured": True, "deterministic": True},
}
_RATIOS = {"captured": ">= 3", "captured, tf32": "", "captured, bf16": "", "captured, deterministic": ""}
_PREDICTED, _SCORED, _CONDITION = "test 2000 images, seconds", "scores, seconds", "condition number, seconds"
_MINUTES, _ACCURACY = "complete run on CIFAR-100, minutes", "complete run on CIFAR-100, accuracy of the last round"
_AIMS = {
    **{f"training, {kind}, samples per second": "" for kind in _KINDS},
    **{f"{kind} step against eager": aim for kind, aim in _RATIOS.items()},
    _PREDICTED: "<= 0.1",
    _SCORED: "",
    _CONDITION: "",
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
    "diagnostics": False,
    "run-name": "complete",
}


def gpu(repeats: int) -> Figures:
    """Measure the speed of a client's round."""
    if not torch.cuda.is_available():
        return {name: unmeasured(aim) for name, aim in _AIMS.items()}
    return training_on(torch.device("cuda:0"), repeats)


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


def gpu_tests(repeats: int) -> Figures:
    """Run the tests marked ``gpu``, once: the number that failed, and for each test 1 if it did."""
    if not torch.cuda.is_available():
        return {_TESTS: unmeasured("<= 0")}
    with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder:
        path = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", f"--junitxml={path}"]
        subprocess.run(command, cwd=CHECKOUT, capture_output=True, check=False)
        return outcomes(path.read_text(encoding="utf-8")) if path.exists() else {_TESTS: unmeasured("<= 0")}


def outcomes(report: str) -> Figures:
    """The figures of a report of tests in JUnit's format: the number that failed, and for each test 1 if it did.

    A test that was skipped was not measured.
    """
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    found: Figures = {_TESTS: {"median": None, "aim": "<= 0"}}
    for case in cases:
        failed = (
            None
            if case.find("skipped") is not None
            else int(any(case.find(kind) is not None for kind in ("failure", "error")))
        )
        found[f"{case.get('name')}: failed"] = {"median": failed, "aim": "<= 0"}
    known = [figure["median"] for figure in found.values() if figure["median"] is not None]
    found[_TESTS]["median"] = sum(known) if known else None
    return found


def training_on(
    device: torch.device,
    repeats: int,
    *,
    epochs: int = _EPOCHS,
    chunk: int = CHUNK,
    buffer: int = BUFFER,
) -> Figures:
    """Measure the speeds of :func:`gpu` on any device and for rounds of any size."""
    setting = Setting.draw(chunk, buffer, str(device))
    settings = TrainingConfig(epochs=epochs, batch_size=BATCH)
    start = {name: tensor.clone() for name, tensor in setting.net.state_dict().items()}
    new, held = slice(0, setting.chunk), slice(setting.chunk, None)

    def train(
        *,
        captured: bool = False,
        precision: torch.dtype = torch.float32,
        tf32: bool = False,
        deterministic: bool = False,
    ) -> Callable[[], object]:
        net, kept = copy.deepcopy(setting.net), KeptSteps(chunk + buffer)
        net.precision = precision

        def task() -> None:
            settle(device, tf32=tf32, deterministic=deterministic)
            net.load_state_dict(start)
            loop.train(
                net,
                (setting.images[new], setting.labels[new]),
                (setting.images[held], setting.labels[held]),
                setting.balanced(),
                settings,
                setting.preprocess,
                generator_for(0, "epoch"),
                captured=captured,
                kept=kept,
            )
            _wait_for(device)

        return task

    tasks = [train(**options) for options in _KINDS.values()]  # type: ignore[arg-type]
    seconds = dict(zip(_KINDS, interleaved(tasks, repeats), strict=True))
    settle(device, tf32=False, deterministic=False)
    samples = epochs * (chunk + buffer)
    found = [spread([samples / each for each in times]) for times in seconds.values()]
    found += [ratio(seconds["eager"], seconds[kind], aim) for kind, aim in _RATIOS.items()]
    found += _selecting_on(device, setting, repeats)
    return dict(zip(_AIMS, found, strict=True))


def _selecting_on(device: torch.device, setting: Setting, repeats: int) -> list[dict[str, Any]]:
    images = setting.images[torch.arange(2000) % len(setting.images)]
    count = len(setting.images)
    logits = torch.randn(count, CLASSES, generator=generator_for(0, "logits")).to(device)
    seen, held = setting.old | setting.current, count - setting.chunk

    def predict() -> object:
        return loop.predict(setting.net, torch.Tensor.clone, images, setting.preprocess)

    def score() -> object:
        return score_candidates(logits, setting.labels, held, setting.old, seen)

    def condition() -> object:
        return kernel_condition_number(logits, seen, 1.1)

    times = interleaved([predict, score, condition], repeats)
    return [spread(each, aim) for each, aim in zip(times, ("<= 0.1", "", ""), strict=True)]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
