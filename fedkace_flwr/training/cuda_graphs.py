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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedkace_flwr.compute.seats import Parts, is_writable, own_memory, seats_in, signature, take_over, undone
from fedkace_flwr.networks.network import Network
from fedkace_flwr.training.losses import Objective
from fedkace_flwr.training.optimisers import Optimiser
from fedkace_flwr.training.steps import Pool, take_step

logger = logging.getLogger(__name__)

_WARM_UP_STEPS = 3  # cuDNN and cuBLAS choose algorithms and allocate in the first steps, which must not be recorded
_MOST_KINDS = 8  # kinds of losses whose recordings are kept


def can_record(device: torch.device) -> bool:
    """Whether steps on a device can be recorded."""
    return device.type == "cuda"


class Recorder:
    """Records steps of one process: on one stream, since libraries keep a workspace for each, and in one pool of memory.

    Recordings may share their memory because none reads what another has left there: everything that outlives a step
    lies elsewhere. After one failure no further step is recorded.
    """

    def __init__(self) -> None:
        self.works = True
        self._stream: torch.cuda.Stream | None = None
        self._memory: Any = None  # PyTorch's handle of a pool of memory

    def recorded(
        self, step: Callable[[], object], changed: Callable[[], Iterable[Tensor]], device: torch.device
    ) -> Callable[[], None] | None:
        """Record a step, which changes some tensors, without leaving a trace in them.

        Returns None, with a warning, if that fails, and from then on.
        """
        if not self.works:
            return None
        try:
            with torch.cuda.device(device):
                return self._recorded(step, changed)
        except RuntimeError as error:
            self.works = False
            (reason, *_) = [*str(error).splitlines(), ""]
            logger.warning("the training step cannot be recorded (%s); steps are taken eagerly", reason)
            return None

    def _recorded(self, step: Callable[[], object], changed: Callable[[], Iterable[Tensor]]) -> Callable[[], None]:
        if self._stream is None or self._memory is None:
            self._stream, self._memory = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        present, side, graph = torch.cuda.current_stream(), self._stream, torch.cuda.CUDAGraph()
        side.wait_stream(present)
        with torch.cuda.stream(side), undone(changed), warnings.catch_warnings():
            # An optimiser made for recordings warns of its first step outside of one.
            warnings.filterwarnings("ignore", message=".*capturable=True")
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            for _ in range(_WARM_UP_STEPS):
                step()
            with _no_waiting():  # a recording that fails half-way is harder to recover from
                step()
        present.wait_stream(side)
        try:
            # Only this thread's mistakes may spoil a recording: Flower and Ray have threads of their own.
            with torch.cuda.graph(graph, pool=self._memory, stream=side, capture_error_mode="thread_local"):
                step()
        except RuntimeError:
            torch.cuda.set_stream(present)  # a recording that fails may leave its own stream as the current one
            raise
        return graph.replay


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Let whatever waits for the device raise RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class StaticSteps:
    """Steps whose tensors all keep their place from step to step.

    On CUDA the step is recorded once for each shape of batch (a ragged last batch has its own recording) and replayed
    from then on; within an epoch nothing waits for the device. If a recording fails, further steps are taken eagerly.
    On a CPU the step is called.

    Parameters
    ----------
    take : callable
        A step: from positions, int64 on the device, to a detached loss. It changes tensors in place.
    changed : callable
        Lists the tensors that a step may change and that outlive it: weights, statistics, the optimiser's and the
        loss's memory. A tensor that first appears during a step is taken to start from zero.
    total : Tensor
        Float on the device, of the loss's shape: the sum of an epoch's losses.
    recorder : Recorder, optional
        Records; by default one of its own.
    """

    def __init__(
        self,
        take: Callable[[Tensor], Tensor],
        changed: Callable[[], Iterable[Tensor]],
        total: Tensor,
        recorder: Recorder | None = None,
    ) -> None:
        self._take = take
        self._changed = changed
        self._total = total
        self._recorder = recorder or Recorder()
        self._steps: dict[torch.Size, tuple[Tensor, Callable[[], None]]] = {}

    def go_on_with(self, take: Callable[[Tensor], Tensor], changed: Callable[[], Iterable[Tensor]]) -> None:
        """Take over objects that hold the same tensors as those before; what is recorded stays."""
        self._take, self._changed = take, changed

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
        step = partial(self._step, positions)
        if not can_record(positions.device):
            return step
        return self._recorder.recorded(step, lambda: [self._total, *self._changed()], positions.device) or step


@dataclass
class Ready:
    """What a training that may be recorded works with.

    Attributes
    ----------
    steps : StaticSteps
        Its steps.
    optimiser : Optimiser
        The optimiser, without memory of earlier trainings.
    pool : Pool
        The samples where steps find them.
    """

    steps: StaticSteps
    optimiser: Optimiser
    pool: Pool


@dataclass
class _Kind:
    """The steps of losses that are built alike, and the parts of the last training whose tensors they use."""

    steps: StaticSteps
    parts: Parts


class KeptSteps:
    """The steps of one process, which are recorded once for each shape and kind of loss, and kept from then on.

    Network, optimiser, pool of samples and sum of losses keep their places from training to training; a training
    starts with an optimiser set to zero, and with its samples copied in. Its loss and its augmentation take over the
    tensors of an earlier one that was built alike (:mod:`fedkace_flwr.compute.seats`). Another network, or more samples
    than there is room for, begins anew.

    Parameters
    ----------
    room : int
        Number of samples to make room for from the start.
    """

    def __init__(self, room: int = 0) -> None:
        self._room = room
        self._recorder = Recorder()
        self._constants: tuple[object, ...] = ()
        self._net: Network | None = None
        self._pool: Pool | None = None
        self._optimiser: Optimiser | None = None
        self._total = torch.zeros(())
        self._kinds: OrderedDict[tuple[object, ...], _Kind] = OrderedDict()

    def room_for(self, samples: int) -> int:
        """The number of samples that there will be room for once so many are placed."""
        held = len(self._pool.labels) if self._pool is not None else 0
        return held if samples <= held else max(samples, self._room, min(2 * held, 2 * samples))

    def ready(
        self, net: Network, pool: Pool, objective: Objective, optimiser: Callable[[], Optimiser], *constants: object
    ) -> Ready:
        """Prepare a training.

        Parameters
        ----------
        net : Network
            On the device, in training mode.
        pool : Pool
            The samples, on any device; an ``augment`` has room for as many as :meth:`room_for` says.
        objective : Objective
            After ``begin_epoch``; its tensors are replaced.
        optimiser : callable
            Makes the optimiser of a new network.
        constants : object
            Whatever else a step depends on.
        """
        constants = (*constants, net.precision, pool.images.shape[1:], pool.preprocess)
        held = len(self._pool.labels) if self._pool is not None else -1
        if net is not self._net or constants != self._constants or len(pool.labels) > held:
            self._begin(net, pool, optimiser())
            self._constants = constants
        assert self._pool is not None and self._optimiser is not None
        self._optimiser.forget()
        for mine, given in ((self._pool.images, pool.images), (self._pool.labels, pool.labels)):
            mine[: len(given)].copy_(given)
        self._pool.replayed[: len(pool.replayed)].copy_(pool.replayed)
        parts: Parts = {"objective": objective, "augment": pool.augment, "adjustment": pool.adjustment}
        own = {id(tensor) for tensor in (*net.parameters(), *net.buffers())}
        kind = self._kind_of(parts, own)
        adjustment = parts["adjustment"]
        assert adjustment is None or isinstance(adjustment, Tensor)
        placed = replace(self._pool, augment=pool.augment, adjustment=adjustment)
        take = partial(take_step, net, placed, objective, self._optimiser)
        changed = partial(tensors_in, net, self._optimiser, objective)
        if kind is None:
            return Ready(StaticSteps(take, changed, self._total, self._recorder), self._optimiser, placed)
        kind.steps.go_on_with(take, changed)
        return Ready(kind.steps, self._optimiser, placed)

    def _begin(self, net: Network, pool: Pool, optimiser: Optimiser) -> None:
        device = next(net.parameters()).device
        room = self.room_for(len(pool.labels))
        images, labels, replayed = (
            torch.zeros((room, *each.shape[1:]), dtype=each.dtype, device=device)
            for each in (pool.images, pool.labels, pool.replayed)
        )
        self._kinds.clear()
        self._net, self._optimiser = net, optimiser
        self._pool = Pool(images, labels, replayed, pool.preprocess)
        self._total = torch.zeros((), device=device)

    def _kind_of(self, parts: Parts, own: set[int]) -> _Kind | None:
        """The kept steps for parts that are built like these, which now hold their tensors; None if none can be kept."""
        seats = seats_in(parts)
        built = signature(seats, own)
        if built is None:
            return None
        kind = self._kinds.get(built)
        if kind is not None and take_over(seats, seats_in(kind.parts), own):
            kind.parts = parts
        else:
            own_memory(seats, own)
            unset = StaticSteps(torch.clone, list, self._total, self._recorder)
            kind = self._kinds[built] = _Kind(unset, parts)
        self._kinds.move_to_end(built)
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        return kind


def tensors_in(net: torch.nn.Module, optimiser: Optimiser, *others: object) -> list[Tensor]:
    """All tensors that a training step may change in place and that outlive it, each once.

    Parameters
    ----------
    net : Module
        Parameters and buffers count.
    optimiser : Optimiser
        Its memory counts.
    others : object
        Tensors count that are reachable through attributes, mappings and sequences, such as those of a loss.
    """
    found: dict[int, Tensor] = {}
    visited: set[int] = set()
    open_ends: list[object] = [*net.parameters(), *net.buffers(), *optimiser.memory.values(), *others]
    while open_ends:
        each = open_ends.pop()
        if id(each) in visited:
            continue
        visited.add(id(each))
        if isinstance(each, Tensor):
            if is_writable(each):
                found[id(each)] = each
        elif isinstance(each, Mapping):
            open_ends += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            open_ends += each
        elif not isinstance(each, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType):
            open_ends += getattr(each, "__dict__", {}).values()
    return list(found.values())
