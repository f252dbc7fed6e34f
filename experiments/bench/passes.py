"""Passes without training (logits and Re-Fed's scores), compared with a training epoch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from clients.refed import LEARNING_RATE, STEPS
from experiments.bench.measure import Figures, interleaved, ratio, spread
from experiments.bench.training import BUFFER, CHUNK, SIZE, Setting
from fedkace_flwr.algorithms.refed_scores import network_scores
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.training.loop import predict

_LARGER, _FEWER = 2 * SIZE, (CHUNK + BUFFER) // 4  # the same total number of pixels


def passes(repeats: int) -> Figures:
    """Time, in fp32, a forward pass over chunk and buffer, one over images twice as wide and high, and Re-Fed's scores."""
    setting = Setting.draw()
    setting.net.precision = torch.float32
    size = (_FEWER, 3, _LARGER, _LARGER)
    larger = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator_for(0, "bench-passes"))
    epoch, logits, of_larger, scores = interleaved(
        [
            lambda: setting.train(setting.balanced()),
            lambda: _logits(setting, setting.images),
            lambda: _logits(setting, larger),
            lambda: _scores(setting),
        ],
        repeats,
    )
    samples = f"{CHUNK + BUFFER:,} images of {SIZE} pixels"
    return {
        f"logits of {samples}, seconds": spread(logits),
        "the same, epochs of local training": ratio(logits, epoch),
        f"logits of {_FEWER} images of {_LARGER} pixels, seconds": spread(of_larger),
        f"Re-Fed's scores of {samples}, {STEPS} steps, seconds": spread(scores),
        "the same steps, epochs of local training": ratio(scores, epoch),
    }


def _logits(setting: Setting, images: Tensor) -> None:
    predict(setting.net, lambda ids: images[ids], torch.arange(len(images)), setting.preprocess)


def _scores(setting: Setting) -> None:
    def blocks(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in zip(torch.split(setting.images, size), torch.split(setting.labels, size), strict=True):
            yield setting.preprocess(images), labels

    network_scores(setting.net, blocks, setting.old, steps=STEPS, learning_rate=LEARNING_RATE, locality=0.5)
