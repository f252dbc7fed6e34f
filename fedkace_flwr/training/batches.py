"""The samples of each step of an epoch (Reading ``batching``, or a method's own way).

Positions number the chunk's samples first, then the buffer's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Batching = Literal["union", "paired", "random-replay"]


@dataclass(frozen=True)
class Epoch:
    """The steps of one epoch.

    Attributes
    ----------
    batches : list of Tensor
        int64 positions of each step; at least two, since batch normalisation needs more than one sample.
    task_draws, replay_draws : float
        Mean number of draws of each sample of chunk and buffer; 0 for an empty buffer.
    """

    batches: list[Tensor]
    task_draws: float
    replay_draws: float


def union_epoch(chunk: int, buffer: int, batch_size: int, generator: torch.Generator) -> Epoch:
    """One shuffled pass over chunk and buffer together, with ``batch_size`` samples per step."""
    batches = _split(torch.randperm(chunk + buffer, generator=generator), batch_size)
    return Epoch(batches, 1.0, 1.0 if buffer else 0.0)


def paired_epoch(chunk: int, buffer: int, batch_size: int, generator: torch.Generator) -> Epoch:
    """``batch_size`` samples of each side per step; one pass over the longer side, the shorter one is cycled."""
    if buffer == 0:
        return union_epoch(chunk, 0, batch_size, generator)
    steps_over = max(chunk, buffer)
    new = _cycled(chunk, steps_over, generator)
    held = _cycled(buffer, steps_over, generator) + chunk
    pairs = zip(torch.split(new, batch_size), torch.split(held, batch_size), strict=True)
    return Epoch([torch.cat(pair) for pair in pairs], steps_over / chunk, steps_over / buffer)


def random_replay_epoch(chunk: int, buffer: int, batch_size: int, generator: torch.Generator) -> Epoch:
    """One shuffled pass over the chunk; each step adds as many uniform, distinct draws from the buffer.

    A step draws at most the whole buffer.
    """
    new = _split(torch.randperm(chunk, generator=generator), batch_size)
    batches = [torch.cat([part, chunk + torch.randperm(buffer, generator=generator)[: len(part)]]) for part in new]
    drawn = sum(len(batch) for batch in batches) - chunk
    return Epoch(batches, 1.0, drawn / buffer if buffer else 0.0)


EPOCHS: Mapping[Batching, Callable[[int, int, int, torch.Generator], Epoch]] = {
    "union": union_epoch,
    "paired": paired_epoch,
    "random-replay": random_replay_epoch,
}
"""An epoch's steps from the sizes of chunk and buffer, the batch size and a CPU generator."""


def samples_in_epoch(batching: Batching, chunk: int, buffer: int) -> int:
    """Count the samples that the steps of an epoch draw, from the sizes of chunk and buffer.

    For ``random-replay``, the buffer is assumed to hold at least as many samples as a step takes of the chunk.
    """
    if batching == "union" or not buffer:
        return chunk + buffer
    return 2 * (max(chunk, buffer) if batching == "paired" else chunk)


def _split(order: Tensor, batch_size: int) -> list[Tensor]:
    batches = list(torch.split(order, batch_size))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def _cycled(size: int, length: int, generator: torch.Generator) -> Tensor:
    passes = [torch.randperm(size, generator=generator) for _ in range(-(-length // size))]
    return torch.cat(passes)[:length]
