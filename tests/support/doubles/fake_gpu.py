"""Fake tensors on a GPU: shapes, dtypes and devices without values, as PyTorch computes them.

An operation over tensors of two devices raises, and so does reading a value back. Without a GPU, PyTorch cannot
differentiate fake tensors on the device ``cuda``, whether it was built with CUDA or not; there the device ``meta``
stands for the GPU, to which the same rules apply. It has no autocast.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA = torch.device("cuda:0")
GPU = CUDA if torch.cuda.is_available() else torch.device("meta")
"""The device that stands for a GPU."""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Every tensor made in this context is fake."""
    with FakeTensorMode(allow_non_fake_inputs=True):  # torch.tensor makes real ones on meta
        yield


def placed(net: nn.Module, device: torch.device) -> nn.Module:
    """A network, made under fake tensors, with fake weights on a device, in channels-last order."""
    for module in net.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                order = torch.channels_last if parameter.ndim == 4 else torch.contiguous_format
                empty = torch.empty(parameter.shape, device=device, memory_format=order)
                module._parameters[name] = nn.Parameter(empty, requires_grad=True)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    return net
