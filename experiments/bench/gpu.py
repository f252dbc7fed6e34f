"""A GPU: the speed of training, testing and selection on it, in one process or in several side by side.

The setting is that of :mod:`fedkace_flwr.experiments.bench.training`: one client's round with batches of 32, but with four of its 20
epochs, since an epoch takes as long as any other. The first training of a process, which records the step, is not
counted. Without CUDA every figure is reported as not measured.
"""

import copy
import multiprocessing
import time
from collections.abc import Callable, Mapping
from threading import BrokenBarrierError
from typing import Any

import torch

from fedkace_flwr.algorithms.fedkace_buffer import kernel_condition_number, score_candidates
from fedkace_flwr.compute.numerics import settle
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.bench.measure import Figures, interleaved, ratio, spread, unmeasured
from fedkace_flwr.experiments.bench.training import BATCH, BUFFER, CHUNK, CLASSES, Setting
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.training import loop
from fedkace_flwr.training.cuda_graphs import KeptSteps

_EPOCHS = 4
_PATIENCE = 600  # seconds until all processes are ready, or one has failed
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "eager": {},
    "captured": {"captured": True},
    "captured, tf32": {"captured": True, "tf32": True},
    "captured, bf16": {"captured": True, "precision": torch.bfloat16},
    "captured, deterministic": {"captured": True, "deterministic": True},
}
_RATIOS = {"captured": ">= 3", "captured, tf32": "", "captured, bf16": "", "captured, deterministic": ""}
AIMS = {
    **{f"training, {kind}, samples per second": "" for kind in _KINDS},
    **{f"{kind} step against eager": aim for kind, aim in _RATIOS.items()},
    "test 2000 images, seconds": "<= 0.1",
    "scores, seconds": "",
    "condition number, seconds": "",
}


def gpu(repeats: int, processes: int = 1) -> Figures:
    """Measure the speed of a client's round and, with several processes, of as many rounds side by side."""
    together = f"training, captured, samples per second in all of {processes} processes side by side"
    if not torch.cuda.is_available():
        return {name: unmeasured(aim) for name, aim in (AIMS if processes == 1 else {together: ""}).items()}
    if processes > 1:
        return {together: spread(side_by_side("cuda:0", processes, repeats))}
    return training_on(torch.device("cuda:0"), repeats)


def training_on(
    device: torch.device, repeats: int, *, epochs: int = _EPOCHS, chunk: int = CHUNK, buffer: int = BUFFER
) -> Figures:
    """Measure the speeds of :func:`gpu` on any device and for rounds of any size."""
    setting = Setting.draw(chunk, buffer, str(device))
    tasks = [_training(setting, epochs, **options) for options in _KINDS.values()]
    seconds = dict(zip(_KINDS, interleaved(tasks, repeats), strict=True))
    settle(device, tf32=False, deterministic=False)
    samples = epochs * (chunk + buffer)
    found = [spread([samples / each for each in times]) for times in seconds.values()]
    found += [ratio(seconds["eager"], seconds[kind], aim) for kind, aim in _RATIOS.items()]
    found += _selecting_on(device, setting, repeats)
    return dict(zip(AIMS, found, strict=True))


def side_by_side(device: str, processes: int, repeats: int, *, epochs: int = _EPOCHS, **sizes: int) -> list[float]:
    """Train with captured steps in several processes that start together; return samples per second in all of them."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes + 1, timeout=_PATIENCE)
    told = (barrier, device, repeats, epochs, sizes)
    workers = [context.Process(target=_trained, args=told, daemon=True) for _ in range(processes)]
    for worker in workers:
        worker.start()
    seconds = []
    try:
        for _ in range(repeats):
            barrier.wait()
            begun = time.perf_counter()
            barrier.wait()
            seconds.append(time.perf_counter() - begun)
    except BrokenBarrierError as error:
        raise RunError(
            f"--processes {processes}: one of them failed, for the reason above; must fit the GPU"
        ) from error
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    samples = processes * epochs * (sizes.get("chunk", CHUNK) + sizes.get("buffer", BUFFER))
    return [samples / each for each in seconds]


def _trained(barrier: Any, device: str, repeats: int, epochs: int, sizes: Mapping[str, int]) -> None:
    """Train once alone, which records the step, and then as often as all others do."""
    try:
        torch.set_num_threads(1)
        task = _training(Setting.draw(**sizes, device=device), epochs, captured=True)
        task()
        for _ in range(repeats):
            barrier.wait()
            task()
            barrier.wait()
    except BaseException:
        barrier.abort()  # nobody waits for this one
        raise


def _training(
    setting: Setting,
    epochs: int,
    *,
    captured: bool = False,
    precision: torch.dtype = torch.float32,
    tf32: bool = False,
    deterministic: bool = False,
) -> Callable[[], object]:
    """Return a task that trains a network of its own, each time from the same weights, and waits for the device."""
    device = setting.old.device
    net, kept = copy.deepcopy(setting.net), KeptSteps(len(setting.labels))
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.precision = precision

    def task() -> None:
        settle(device, tf32=tf32, deterministic=deterministic)
        net.load_state_dict(start)
        settings = TrainingConfig(epochs=epochs, batch_size=BATCH)
        order = generator_for(0, "epoch")
        options: dict[str, Any] = {"captured": captured, "kept": kept}
        loop.train(net, *setting.samples, setting.balanced(), settings, setting.preprocess, order, **options)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return task


def _selecting_on(device: torch.device, setting: Setting, repeats: int) -> list[dict[str, Any]]:
    images = setting.images[torch.arange(2000) % len(setting.images)]
    count = len(setting.images)
    logits = torch.randn(count, CLASSES, generator=generator_for(0, "logits")).to(device)
    seen, held = setting.old | setting.current, count - setting.chunk
    tasks: list[Callable[[], object]] = [
        lambda: loop.predict(setting.net, torch.Tensor.clone, images, setting.preprocess),
        lambda: score_candidates(logits, setting.labels, held, setting.old, seen),
        lambda: kernel_condition_number(logits, seen, 1.1),
    ]
    times = interleaved(tasks, repeats)
    return [spread(each, aim) for each, aim in zip(times, ("<= 0.1", "", ""), strict=True)]
