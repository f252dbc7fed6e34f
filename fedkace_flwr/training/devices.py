"""Device and numerical precision."""

from typing import Any

import torch

from fedkace_flwr.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Resolve the configuration key ``device``.

    Raises
    ------
    ConfigError
        An unknown name, or a GPU that is not visible to this process.
    """
    kind, _, index = name.partition(":")
    if name not in ("auto", "cpu") and (kind != "cuda" or not (index.isdecimal() or name == "cuda")):
        raise ConfigError(f"device = {name!r}: must be auto, cpu, cuda or cuda:N")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if found else "cpu")
    if kind == "cuda" and int(index or 0) >= found:
        raise ConfigError(f'device = {name!r}: this process sees {found} CUDA devices; use device = "cpu" or auto')
    return torch.device(name)


def limit_memory(device: torch.device, share: float) -> None:
    """Limit this process to its share of a GPU's memory, so that it fails before it affects others.

    Parameters
    ----------
    device : torch.device
        On a CPU nothing happens.
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
    if name not in ("fp32", "bf16", "auto"):
        raise ConfigError(f"precision = {name!r}: must be fp32, bf16 or auto")
    if name == "auto":
        name = "bf16" if _multiplies_bf16(device) else "fp32"
    return torch.bfloat16 if name == "bf16" else torch.float32


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # PyTorch reports a processor's instructions from 2.10 on; with older versions none are assumed for bf16.
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
