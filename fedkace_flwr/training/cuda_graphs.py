"""Training steps over tensors that stay in place, which CUDA can record once and replay.

At batch 32 a network of width 16 computes a step faster than Python can request it: most of the time goes into
launching a few hundred kernels. A step that reads and writes the same memory each time, and never waits for the device,
can be recorded in a CUDA graph and launched as a whole. On a CPU the same step over the same tensors is simply called.

Losses need to know nothing of this. The tensors that a step changes are found by walking through the attributes of
network, optimiser and loss; a loss only has to keep in tensors what changes from step to step or from epoch to epoch,
and to change them in place. A step that cannot be recorded, for instance because it waits for the device, is taken
eagerly. Shapes: n samples of a pool, B samples of a batch, H and W image height and width.
"""

import logging
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkace_flwr.training.adam import Adam
from fedkace_flwr.training.augmentation import FlipShift
from fedkace_flwr.training.losses import Batch, Objective
from fedkace_flwr.training.model import ResNet18

logger = logging.getLogger(__name__)

_WARM_UP_STEPS = 3  # cuDNN and cuBLAS choose algorithms and allocate in the first steps, which must not be recorded


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
        bool (n,): whether the sample is from the buffer.
    preprocess : callable
        Maps uint8 (B, 3, H, W) to normalised float (B, 3, H, W).
    augment : FlipShift, optional
        Changes the images of a batch.
    adjustment : Tensor, optional
        As in :class:`~fedkace_flwr.training.losses.Batch`.
    """

    images: Tensor
    labels: Tensor
    replayed: Tensor
    preprocess: Callable[[Tensor], Tensor]
    augment: FlipShift | None = None
    adjustment: Tensor | None = None

    def batch(self, positions: Tensor) -> Batch:
        """Gather samples by position, int64 on the device, of any shape; images always have shape (B, 3, H, W)."""
        flat = positions.flatten()
        images = self.images.index_select(0, flat) if self.augment is None else self.augment(self.images, flat)
        images = self.preprocess(images.permute(0, 3, 1, 2))
        return Batch(images, self.labels[positions], self.replayed[positions], positions, self.adjustment)


def take_step(net: ResNet18, pool: Pool, objective: Objective, optimiser: Adam, positions: Tensor) -> Tensor:
    """Forward, backward and update on the samples at ``positions``, int64 (B,); return the detached scalar loss."""
    batch = pool.batch(positions)
    features = net.features(batch.images)
    loss = objective.loss(net.output(features), features, batch)
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    optimiser.step()
    return loss.detach()


def can_record(device: torch.device) -> bool:
    """Whether steps on a device can be recorded."""
    return device.type == "cuda"


class StaticSteps:
    """Steps whose tensors all keep their place from step to step.

    On CUDA the step is recorded once for each shape of batch (a ragged last batch has its own recording) and replayed
    from then on; within an epoch nothing waits for the device. If a recording fails, all further steps are taken
    eagerly, with one warning. On a CPU the step is called.

    Recording follows PyTorch's rules but has not been run on a GPU yet.

    Parameters
    ----------
    take : callable
        A step: from positions, int64 on the device, to a detached loss. It changes tensors in place.
    changed : callable
        Lists the tensors that a step may change and that outlive it: weights, statistics, the optimiser's and the
        loss's memory. A tensor that first appears during a step is taken to start from zero.
    total : Tensor
        Float on the device, of the loss's shape: the sum of an epoch's losses.
    """

    def __init__(
        self, take: Callable[[Tensor], Tensor], changed: Callable[[], Iterable[Tensor]], total: Tensor
    ) -> None:
        self._take = take
        self._changed = changed
        self._total = total
        self._steps: dict[torch.Size, tuple[Tensor, Callable[[], None]]] = {}
        self._records = can_record(total.device)

    def epoch(self, batches: Sequence[Tensor]) -> Tensor:
        """Take a step for each batch of positions, int64 on the CPU; return the sum of the losses.

        The next epoch overwrites the returned tensor.
        """
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
        """Move all positions of an epoch to the device in one transfer."""
        device = self._total.device
        flat = torch.cat([order.flatten() for order in batches])
        if device.type == "cuda":
            flat = flat.pin_memory().to(device, non_blocking=True)
        parts = torch.split(flat, [order.numel() for order in batches])
        return [part.view(order.shape) for part, order in zip(parts, batches, strict=True)]

    def _step(self, positions: Tensor) -> None:
        # Autocast caches converted weights; a recording must convert them each time.
        with torch.autocast(positions.device.type, enabled=False, cache_enabled=False):
            self._total.add_(self._take(positions))

    def _prepared(self, positions: Tensor) -> Callable[[], None]:
        """Prepare the step over whatever ``positions`` holds when it is taken."""
        if self._records:
            try:
                with torch.cuda.device(positions.device):
                    return self._recorded(positions)
            except RuntimeError as error:
                self._records = False
                (reason, *_) = [*str(error).splitlines(), ""]
                logger.warning("the training step cannot be recorded (%s); steps are taken eagerly", reason)
        return lambda: self._step(positions)

    def _recorded(self, positions: Tensor) -> Callable[[], None]:
        present = torch.cuda.current_stream()
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        side.wait_stream(present)
        with torch.cuda.stream(side), undone(lambda: [self._total, *self._changed()]), warnings.catch_warnings():
            # An optimiser made for recordings warns of its first step outside of one.
            warnings.filterwarnings("ignore", message=".*capturable=True")
            for _ in range(_WARM_UP_STEPS):
                self._step(positions)
        present.wait_stream(side)
        try:
            # Only this thread's mistakes may spoil a recording: Flower and Ray have threads of their own.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self._step(positions)
        except RuntimeError:
            torch.cuda.set_stream(present)  # a recording that fails may leave its own stream as the current one
            raise
        return graph.replay


@contextmanager
def undone(tensors: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
    """Restore tensors in place to their values from before the block, and set those that appeared in it to zero."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors()]
    yield
    known = {id(tensor) for tensor, _ in before}
    with torch.no_grad():
        for tensor, value in before:
            tensor.copy_(value)
        for tensor in tensors():
            if id(tensor) not in known:
                tensor.zero_()


def tensors_in(net: torch.nn.Module, optimiser: Adam, *others: object) -> list[Tensor]:
    """All tensors that a training step may change in place and that outlive it, each once.

    Parameters
    ----------
    net : Module
        Parameters and buffers count.
    optimiser : Adam
        Its moments count.
    others : object
        Tensors count that are reachable through attributes, mappings and sequences, such as those of a loss.
    """
    found: dict[int, Tensor] = {}
    visited: set[int] = set()
    open_ends: list[object] = [*net.parameters(), *net.buffers(), *optimiser.moments.values(), *others]
    while open_ends:
        each = open_ends.pop()
        if id(each) in visited:
            continue
        visited.add(id(each))
        if isinstance(each, Tensor):
            if _is_writable(each):
                found[id(each)] = each
        elif isinstance(each, Mapping):
            open_ends += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            open_ends += each
        elif not isinstance(each, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType):
            open_ends += getattr(each, "__dict__", {}).values()
    return list(found.values())


def _is_writable(tensor: Tensor) -> bool:
    """Whether a step can change the tensor in place: no inference tensor, and no element stands for several."""
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not tensor.is_inference() and not is_expanded
