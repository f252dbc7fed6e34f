"""Device and numerical precision.

A GPU is always named with its index, which most functions of ``torch.cuda`` require.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedkace_flwr.errors import ConfigError

GPU_SHARE = "FEDKACE_GPU_SHARE"
"""The environment variable that tells a process outside Ray its share of a GPU."""

_NO_DOUBLES = "Apple's GPUs have no float64, which losses and scores need"


def index_of(name: str) -> int | None:
    """The index of the GPU that a value of the key ``device`` asks for; None if it asks for none (``auto``, ``cpu``).

    Raises
    ------
    ConfigError
        An unknown name.
    """
    kind, _, index = name.partition(":")
    if kind == "mps":
        raise ConfigError(f'device = {name!r}: {_NO_DOUBLES}; use device = "cpu"')
    if name in ("auto", "cpu"):
        return None
    if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise ConfigError(f"device = {name!r}: must be auto, cpu, cuda or cuda:N")
    return int(index or 0)


def choose_device(name: str, share: float | None = None) -> torch.device:
    """Resolve the configuration key ``device``.

    Parameters
    ----------
    name : str
        ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    share : float, optional
        Share of a GPU that this process was given; with 0 it computes on the CPU, even if it sees a GPU. None: nobody
        shares out GPUs here.

    Raises
    ------
    ConfigError
        An unknown name, or a GPU that this process does not see or was given no share of.
    """
    number = index_of(name)
    if name == "cpu":
        return torch.device("cpu")
    if share == 0:
        if name == "auto":
            return torch.device("cpu")
        raise ConfigError(
            f"device = {name!r}: this client was given no share of a GPU; set --gpu-fraction (with flwr run, "
            "client-resources-num-gpus), for example 0.1"
        )
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and not found:
        return torch.device("cpu")
    number = number or 0
    if number >= found:
        raise ConfigError(f'device = {name!r}: this process sees {found} CUDA devices; use device = "cpu" or auto')
    return torch.device("cuda", number)


def limit_memory(device: torch.device, share: float) -> None:
    """Limit this process to its share of a GPU's memory, so that it fails before it affects others.

    Parameters
    ----------
    device : torch.device
        With an index; on a CPU nothing happens.
    share : float
        Share of the whole; 0 (unknown) or 1 and more set no limit.
    """
    if device.type == "cuda" and 0 < share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Resolve the configuration key ``precision`` for a device; ``auto`` is bf16 if the hardware multiplies it.

    Raises
    ------
    ConfigError
        An unknown name.
    """
    if name not in ("fp32", "tf32", "bf16", "auto"):
        raise ConfigError(f"precision = {name!r}: must be fp32, tf32, bf16 or auto")
    if name == "auto":
        name = "bf16" if _multiplies_bf16(device) else "fp32"
    return torch.bfloat16 if name == "bf16" else torch.float32


@contextmanager
def in_bf16(device: torch.device) -> Iterator[None]:
    """Autocast to bf16 within the context.

    PyTorch's bf16 kernels for processors without instructions for bf16 are ten times slower than those for fp32. There,
    convolutions and linear layers compute the same in fp32: from factors rounded to bf16, with a rounded result.
    """
    lacking = device.type == "cpu" and bool(_capabilities()) and not _multiplies_bf16(device)
    with torch.autocast(device.type, torch.bfloat16), _Widened() if lacking else nullcontext():
        yield


class _Widened(TorchFunctionMode):
    """Computes layers in fp32 from factors rounded to bf16, and rounds the result to bf16."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _LAYERS:
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            wide = {name: _rounded(value) for name, value in kwargs.items()}
            return func(*map(_rounded, args), **wide).bfloat16()


_LAYERS = (torch.conv1d, torch.conv2d, functional.linear)


def _rounded(value: Any) -> Any:
    return value.bfloat16().float() if isinstance(value, Tensor) else value


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return any(_capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _capabilities() -> dict[str, Any]:
    """What the processor can do; PyTorch reports it from 2.10 on, and with older versions this is empty."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found
