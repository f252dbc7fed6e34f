"""The one door to torchvision.

A CUDA build of torchvision beside a CPU build of PyTorch cannot load its compiled operators, and importing it
fails with ``operator torchvision::nms does not exist``: its Python side describes operators that were never
declared. Nothing in this project calls those operators, so declaring their signatures is cure enough. A
torchvision that matches its PyTorch imports at once and nothing is changed.
"""

import importlib
import sys
from functools import cache
from types import ModuleType

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_UNLOADED = ("nms", "qnms")  # what torchvision's Python side describes unconditionally


@cache
def import_torchvision() -> ModuleType:
    """Import torchvision, with or without its compiled operators.

    Returns
    -------
    module
        ``torchvision``. Without compiled operators its data sets, models and transforms work; calling one of
        the operators, as in ``torchvision.ops.nms``, raises.

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
    # The failed import took torchvision itself out of sys.modules but left its submodules, which must run again.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for operator in _UNLOADED:
        torch.library.define(f"torchvision::{operator}", _SIGNATURE)
    return importlib.import_module("torchvision")
