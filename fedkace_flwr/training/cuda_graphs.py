"""A training step over tensors that stay where they are, so that CUDA can record it once and play it back.

At batch 32 a network of width 16 is done with a step long before Python has asked for it: what costs time is
launching its few hundred kernels. A step that reads and writes the same memory each time, and never waits for the
device, can be recorded in a CUDA graph and launched as a whole. Elsewhere the same step over the same tensors is
called as it is. Shapes: n samples of a pool, B samples of a batch, H and W image height and width.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkace_flwr.training.losses import Batch, Objective
from fedkace_flwr.training.model import ResNet18

_WARM_UP_STEPS = 3  # cuDNN and cuBLAS choose and allocate in the first ones, which a recording must not see


@dataclass(frozen=True)
class Pool:
    """The samples of a round, resident on the device.

    Attributes
    ----------
    images : Tensor
        uint8 (n, H, W, 3): the chunk's, followed by the buffer's.
    labels : Tensor
        int64 (n,).
    replayed : Tensor
        bool (n,): from the buffer.
    preprocess : callable
        Maps uint8 (B, 3, H, W) to normalised float (B, 3, H, W).
    """

    images: Tensor
    labels: Tensor
    replayed: Tensor
    preprocess: Callable[[Tensor], Tensor]

    def batch(self, positions: Tensor) -> Batch:
        """Gather samples by position, int64 on the device, of any shape; images always come as (B, 3, H, W)."""
        images = self.preprocess(self.images.index_select(0, positions.flatten()).permute(0, 3, 1, 2))
        return Batch(images, self.labels[positions], self.replayed[positions], positions)


def take_step(
    net: ResNet18, pool: Pool, objective: Objective, optimiser: torch.optim.Optimizer, positions: Tensor
) -> Tensor:
    """Forward, backward, update on the samples at ``positions``, int64 (B,); returns the detached scalar loss."""
    batch = pool.batch(positions)
    features = net.features(batch.images)
    loss = objective.loss(net.output(features), features, batch)
    optimiser.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    optimiser.step()
    return loss.detach()


class StaticSteps:
    """Steps whose every tensor keeps its place from step to step.

    On CUDA the step is recorded once for each shape of batch (a ragged last batch has a recording of its own) and
    played back from then on; within an epoch nothing waits for the device. On a CPU the step is called.

    Recording has been written to PyTorch's rules but has not been run on a GPU yet.

    Parameters
    ----------
    take : callable
        A step: from positions, int64 on the device, to a detached loss. What it changes it changes in place.
    changed : callable
        Lists all that a step changes and that outlives it: weights, statistics, the optimiser's and the objective's
        memory. What first appears in a step starts from zero.
    total : Tensor
        Float on the device, of the loss's shape: an epoch's losses are added up here.
    """

    def __init__(
        self, take: Callable[[Tensor], Tensor], changed: Callable[[], Iterable[Tensor]], total: Tensor
    ) -> None:
        self._take = take
        self._changed = changed
        self._total = total
        self._steps: dict[torch.Size, tuple[Tensor, Callable[[], None]]] = {}

    def epoch(self, batches: Sequence[Tensor]) -> Tensor:
        """Take a step for each batch of positions, int64 on the CPU; returns the sum of the losses, not to be kept."""
        self._total.zero_()
        for order in self._placed(batches):
            if order.shape not in self._steps:
                positions = order.clone()
                self._steps[order.shape] = positions, self._prepared(positions)
            positions, step = self._steps[order.shape]
            positions.copy_(order)
            step()
        return self._total

    def _placed(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """All of an epoch's positions on the device, by one transfer."""
        device = self._total.device
        flat = torch.cat([order.flatten() for order in batches])
        if device.type == "cuda":
            flat = flat.pin_memory().to(device, non_blocking=True)
        parts = torch.split(flat, [order.numel() for order in batches])
        return [part.view(order.shape) for part, order in zip(parts, batches, strict=True)]

    def _step(self, positions: Tensor) -> None:
        # Autocast keeps the weights that it has converted; a recording must convert them anew each time.
        with torch.autocast(positions.device.type, enabled=False, cache_enabled=False):
            self._total.add_(self._take(positions))

    def _prepared(self, positions: Tensor) -> Callable[[], None]:
        """What takes the step over whatever ``positions`` then holds."""
        if positions.device.type != "cuda":
            return lambda: self._step(positions)
        with torch.cuda.device(positions.device):
            return self._recorded(positions)

    def _recorded(self, positions: Tensor) -> Callable[[], None]:
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), undone(lambda: [self._total, *self._changed()]), warnings.catch_warnings():
            # An optimiser made for recordings warns of each step outside of one.
            warnings.filterwarnings("ignore", message=".*capturable=True")
            for _ in range(_WARM_UP_STEPS):
                self._step(positions)
        torch.cuda.current_stream().wait_stream(side)
        # Only this thread's mistakes may spoil a recording: Flower and Ray have threads of their own.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self._step(positions)
        return graph.replay


@contextmanager
def undone(tensors: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
    """Put tensors back in place to what they held before the block; those that appeared in it become zero."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors()]
    yield
    known = {id(tensor) for tensor, _ in before}
    with torch.no_grad():
        for tensor, value in before:
            tensor.copy_(value)
        for tensor in tensors():
            if id(tensor) not in known:
                tensor.zero_()


def memory_of(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that an optimiser remembers from step to step."""
    return [value for state in optimiser.state.values() for value in state.values() if isinstance(value, Tensor)]
