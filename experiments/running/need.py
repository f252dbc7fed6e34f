"""What one worker needs: memory, and memory of a GPU if it computes there.

Nothing is computed on a GPU to find out: the activations are counted on the CPU.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fedkace_flwr.compute.memory import PASS_BYTES
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment

CONTEXT = 600 * 2**20
"""GPU memory that CUDA and its libraries take for each process, in bytes."""

_PROCESS = 450 * 2**20  # Python with PyTorch, Flower and Ray, before any data
_WORKSPACES = 2 * 32 * 2**20  # cuBLAS's, on the ordinary stream and on that of recordings (Hopper: 32 MiB each)
_WEIGHT_COPIES = 8  # network, gradient, two moments, message and reply, and stored copies of the last two
_STEP = 1.5  # memory of a training step as a multiple of its activations; a test batch takes no more
_SAMPLED = 2  # images in the batch that measures activations


@dataclass(frozen=True)
class Need:
    """The most that one worker takes: bytes of memory, and of GPU memory if it computes there."""

    memory: int
    gpu: int

    @classmethod
    def of(cls, config: Config) -> "Need":
        """Estimate the need from the network, the batch, and the samples that a client trains on.

        The data set itself does not count, because the workers share its pages. A recorded step keeps the memory of a
        step to itself, beside that of the steps taken eagerly before it is recorded.
        """
        experiment = Experiment(config)
        size = experiment.dataset.image_size
        image = 3 * size * size
        weights = sum(tensor.numel() * tensor.element_size() for tensor in experiment.initial_weights().values())
        step = _STEP * activations(experiment.network_on_cpu(), size) * config.training.batch_size
        samples = config.stream.largest_chunk + config.buffer.capacity
        work = int(_WEIGHT_COPIES * weights + step + 2 * samples * image)
        recorded = 0 if config.run.cuda_graphs == "off" else int(step)
        return cls(_PROCESS + work, CONTEXT + _WORKSPACES + work + recorded + PASS_BYTES)


def largest_need(configs: Iterable[Config]) -> Need:
    """The largest need among configurations; that of a bare process if there are none."""
    needs: dict[tuple[object, ...], Need] = {}
    for config in configs:
        training, run = config.training, config.run
        key = (
            config.data,
            config.model,
            training.batch_size,
            config.stream.largest_chunk,
            config.buffer.capacity,
            run.cuda_graphs,
        )
        if key not in needs:
            needs[key] = Need.of(config)
    found = needs.values()
    return Need(
        max((need.memory for need in found), default=_PROCESS), max((need.gpu for need in found), default=CONTEXT)
    )


def activations(net: torch.nn.Module, size: int) -> int:
    """Return the bytes that the forward pass of one image keeps for the backward pass; ``net`` is on the CPU."""
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel() * tensor.element_size()
        return tensor

    net.train()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        net(torch.zeros(_SAMPLED, 3, size, size))
    return kept // _SAMPLED
