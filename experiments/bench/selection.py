"""Time and memory of buffer selection by capacity, with and without landmarks."""

import statistics
from functools import partial

import torch

from fedkace_flwr.algorithms.fedkace_buffer import score_candidates, select
from fedkace_flwr.experiments.bench.measure import Figures, interleaved, peak_memory, ratio, spread
from fedkace_flwr.experiments.bench.training import BUFFER, CHUNK, CLASSES, EPOCHS, Setting
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.training.loop import predict

_WHOLE = (500, 1000, 2000, 5000)
_BY_LANDMARKS = (5_000, 50_000, 100_000)
_LANDMARKS = 1000


def selection(repeats: int) -> Figures:
    """Time scoring and selection from given logits, and the whole selection as a share of a round's training."""
    setting = Setting.draw()
    whole, epoch = interleaved(
        [lambda: _forward_and_choose(setting), lambda: setting.train(setting.balanced())], repeats
    )
    chosen, found = statistics.median(whole), statistics.median(epoch)
    figures: Figures = {
        "selection with its forward pass at M = 1000, seconds": spread(whole),
        "selection with its forward pass at M = 1000, share of a round's training": {
            "median": chosen / (EPOCHS * found),
            "aim": "<= 0.01",
        },
    }
    for capacity in _WHOLE:
        (seconds,) = interleaved([partial(choose, capacity, 0)], repeats)
        figures[f"scores and choice, M = {capacity:,}, seconds"] = spread(seconds)
        if capacity == BUFFER:
            share = statistics.median(seconds) / (EPOCHS * found)
            figures["the same, share of a round's training"] = {"median": share, "aim": "<= 0.01"}
    times = interleaved([partial(choose, capacity, _LANDMARKS) for capacity in _BY_LANDMARKS], repeats)
    for capacity, seconds in zip(_BY_LANDMARKS, times, strict=True):
        figures[f"scores and choice, M = {capacity:,}, {_LANDMARKS} landmarks, seconds"] = spread(seconds)
        memory = {"median": peak_memory(choose, capacity, _LANDMARKS), "aim": "< 500"}
        figures[f"peak memory, M = {capacity:,}, {_LANDMARKS} landmarks, MiB"] = memory
    figures["M = 50,000 against M = 5,000, landmarks"] = ratio(times[1], times[0], "<= 11")
    return figures


def choose(capacity: int, landmarks: int) -> None:
    """Score and select from a full buffer and a chunk of 500 samples, with random logits of 100 classes."""
    generator = generator_for(0, "bench-selection", capacity)
    total = capacity + CHUNK
    logits = torch.randn(total, CLASSES, generator=generator)
    labels = torch.randint(0, CLASSES, (total,), generator=generator)
    met = torch.ones(CLASSES, dtype=torch.bool)
    scores = score_candidates(logits, labels, capacity, met, met, landmarks=landmarks)
    select(scores, labels, capacity, met, met, generator)


def _forward_and_choose(setting: Setting) -> None:
    candidates = torch.arange(CHUNK + BUFFER).roll(BUFFER)
    setting.net.precision = torch.float32
    logits = predict(setting.net, lambda ids: setting.images[ids], candidates, setting.preprocess)
    labels = setting.labels[candidates]
    active = setting.old | setting.current
    scores = score_candidates(logits, labels, BUFFER, setting.old, active)
    select(scores, labels, BUFFER, setting.old, active, generator_for(0, "select"))
