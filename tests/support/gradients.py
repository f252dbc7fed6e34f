"""Gradients after a backward pass."""

from torch import Tensor


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient of a parameter or leaf; the backward pass must have reached it."""
    assert tensor.grad is not None
    return tensor.grad
