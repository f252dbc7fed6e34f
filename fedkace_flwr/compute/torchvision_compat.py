"""Importing torchvision even if its compiled operators cannot be loaded.

A CUDA build of torchvision cannot load its compiled operators with a CPU build of PyTorch, and importing it fails with
``operator torchvision::nms does not exist``: its Python code refers to operators that were never declared. This
project calls none of them, so it suffices to declare their signatures. If torchvision matches PyTorch, the first
import succeeds and nothing is changed.
"""

import importlib
import sys
from functools import cache
from types import ModuleType

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_UNLOADED = ("nms", "qnms")  # operators that torchvision's Python code refers to unconditionally


@cache
def import_torchvision() -> ModuleType:
    """Import torchvision, with or without its compiled operators.

    Returns
    -------
    module
        ``torchvision``. Without compiled operators its data sets, models and transforms work; calling an operator such
        as ``torchvision.ops.nms`` raises an error.

    Raises
    ------
    ImportError
        torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as fault:
        if "torchvision::" not in str(fault):
            raise
    # The failed import removed torchvision itself from sys.modules but left its submodules, which must run again.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for operator in _UNLOADED:
        torch.library.define(f"torchvision::{operator}", _SIGNATURE)
    return importlib.import_module("torchvision")
