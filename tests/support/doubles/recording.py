"""A stand-in for CUDA graphs on a CPU: it records the operations of a block and replays them on the same tensors.

Like a CUDA graph it changes nothing while it records, knows tensors only by their memory, runs no Python code during
replay, and rejects operations that would wait for the device.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedkace_flwr.training import cuda_graphs

_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")


class Recording(TorchDispatchMode):
    """The operations of a block, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        self.played = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            each.dtype == torch.bool for each in tree_leaves(args[1:2]) if isinstance(each, Tensor)
        )
        if name in _WAITING or by_mask:
            raise RuntimeError(f"{func} waits for the device, which a recording cannot")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            # native_batch_norm writes statistics that its schema declares read-only.
            if (argument.alias_info and argument.alias_info.is_write) or argument.name.startswith("running_"):
                written = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
                self._before += [(each, each.detach().clone()) for each in written]
        found = func(*args, **kwargs)
        given = {_place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        fresh = [
            (index, each)
            for index, each in enumerate(tree_leaves(found))
            if isinstance(each, Tensor) and _place(each) not in given
        ]
        self._calls.append((func, args, kwargs, fresh))
        return found

    def undo(self) -> None:
        """Undo the effects of recording, because a recording executes nothing."""
        with torch.no_grad():
            for tensor, value in reversed(self._before):
                tensor.copy_(value)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        self.played += 1
        for func, args, kwargs, fresh in self._calls:
            found = tree_leaves(func(*args, **kwargs))
            for index, tensor in fresh:
                tensor.copy_(found[index])


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Stream:
    def wait_stream(self, other: object) -> None:
        pass


class _NoWaiting(TorchDispatchMode):
    """What ``torch.cuda.set_sync_debug_mode("error")`` does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in _WAITING:
            raise RuntimeError(f"{func} waits for the device, which a recording cannot")
        return func(*args, **(kwargs or {}))


class _Waiting:
    """The state of the debug mode."""

    def __init__(self) -> None:
        self._mode: int | str = 0
        self._entered: _NoWaiting | None = None

    def get(self) -> int | str:
        return self._mode

    def set(self, mode: int | str) -> None:
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None
        if mode in (2, "error"):
            self._entered = _NoWaiting()
            self._entered.__enter__()
        self._mode = mode


_GRAPH = inspect.signature(torch.cuda.graph.__init__)


@contextmanager
def _graph(*args: Any, **kwargs: Any) -> Iterator[None]:
    given = _GRAPH.bind(None, *args, **kwargs).arguments  # only what the real one takes
    assert given["capture_error_mode"] in ("global", "thread_local", "relaxed")
    assert isinstance(given["stream"], _Stream) and given["pool"] == _POOL
    recording: Recording = given["cuda_graph"]
    try:
        with recording:
            yield
    finally:
        recording.undo()


_POOL = (0, 1)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Record and replay static steps in this test, with the code that does so on CUDA."""
    made: list[Recording] = []
    waiting = _Waiting()

    def new() -> Recording:
        made.append(Recording())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", new)
    monkeypatch.setattr(torch.cuda, "graph", _graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: _POOL)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", waiting.get)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", waiting.set)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(cuda_graphs, "can_record", lambda device: True)
    return made
