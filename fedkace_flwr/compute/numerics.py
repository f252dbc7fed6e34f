"""How exactly a GPU computes, for a whole process: TF32 and determinism; and the versions that results depend on."""

import os
import re
from pathlib import Path
from typing import Any

import torch

_DRIVER = Path("/proc/driver/nvidia/version")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def settle(device: torch.device, *, tf32: bool, deterministic: bool) -> None:
    """Set how this process computes on a GPU, before it computes there; on a CPU nothing changes.

    Parameters
    ----------
    device : torch.device
        Where this process computes.
    tf32 : bool
        Whether products of float32 may round their factors to 10 bits. PyTorch's own default is yes for convolutions
        and no for matrix products.
    deterministic : bool
        Choose algorithms whose results do not depend on the order in which threads finish. An operation that has none
        raises RuntimeError.
    """
    if device.type != "cuda":
        return
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")  # cuBLAS repeats its results with fixed workspaces only


def described(device: torch.device) -> dict[str, Any]:
    """What results on a GPU depend on, for ``environment.json``: all None on a CPU.

    Returns
    -------
    dict
        ``gpu`` (its name), ``driver``, ``cuda`` and ``cudnn`` (versions), ``tf32`` and ``deterministic`` as they are
        set in this process.
    """
    if device.type != "cuda":
        return dict.fromkeys(("gpu", "driver", "cuda", "cudnn", "tf32", "deterministic"))
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "tf32": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def driver_version(path: Path = _DRIVER) -> str | None:
    """Version of NVIDIA's kernel module; None if the file that names it is missing or holds none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    return found[1] if found else None
