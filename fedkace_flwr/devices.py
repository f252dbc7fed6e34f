"""Where tensors live."""

import torch

from fedkace_flwr.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Resolve the configuration key ``device``.

    Raises
    ------
    ConfigError
        An unknown name, or a GPU that this process cannot see.
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
