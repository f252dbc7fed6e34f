"""How many images pass through a network at once, and the way of many small tensors to a GPU and back.

Shapes: n images, H and W image height and width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

PASS_BYTES = 1 << 30
"""GPU memory that a pass without gradients may take: its activations and the workspaces of its convolutions."""

# Maps of the first stage's size: what PyTorch reserves, most of it workspace, by the tests of memory in tests/gpu.
_LIVE_MAPS = 32
_FEWEST, _MOST = 16, 512  # larger passes are hardly faster, and sets of a few hundred images would be filled up to them


def images_at_once(height: int, width: int, channels: int) -> int:
    """Images of a pass without gradients on a GPU: a power of two whose activations fit into :data:`PASS_BYTES`.

    It depends on the network alone, not on the memory that happens to be free, so that results do not either.

    Parameters
    ----------
    height, width, channels : int
        Size of the network's largest map of one image, float32.
    """
    fitting = PASS_BYTES // (_LIVE_MAPS * 4 * height * width * channels)
    return 1 << max(_FEWEST.bit_length() - 1, min(fitting, _MOST).bit_length() - 1)


def moved_to(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The same tensors on a device: to or from a GPU in one copy for each dtype, so that the CPU waits once.

    Copies are parts of one buffer; tensors that are on such a device already are returned as they are, detached.
    """
    found = {name: tensor.detach() for name, tensor in tensors.items()}
    for dtype in {tensor.dtype for tensor in found.values() if tensor.device.type != device.type}:
        away = [name for name, t in found.items() if t.dtype == dtype and t.device.type != device.type]
        packed = torch.cat([found[name].flatten() for name in away]).to(device)
        parts = torch.split(packed, [found[name].numel() for name in away])
        found |= {name: part.view(found[name].shape) for name, part in zip(away, parts, strict=True)}
    return found


def at_home(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the CPU (:func:`moved_to`)."""
    return moved_to(tensors, torch.device("cpu"))
