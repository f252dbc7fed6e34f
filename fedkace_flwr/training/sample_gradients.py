"""How long the gradient of each sample's own loss is, from one backward pass for all samples.

Where no sample's output depends on another's, which asks of batch normalisation that it use its running statistics,
the gradient of a layer's parameters by one sample's loss follows from what the layer took in for this sample and from
the loss's gradient by what it gave out. A single backward pass has both at hand for all samples, and the norms need
no gradient to be kept (Goodfellow, arXiv 1510.01799; for convolutions Bu, Mao and Xu, arXiv 2205.10683).

Pure tensor mathematics. Shapes: B samples, L places of a convolution's output, K inputs that meet at a place, C
channels, O outputs, F features.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, singledispatch

import torch
from torch import Tensor, nn
from torch.nn import functional

_UNFOLDED = (
    1 << 20
)  # elements of unfolded input at a time on a CPU, whose cache they stay in; elsewhere 32 times as many


class SquaredNorms:
    """Squared norms of the samples' gradients, added up layer by layer.

    Attributes
    ----------
    total : Tensor
        Float64 (B,); a single 0 before a backward pass.
    """

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)

    def add(self, part: Tensor) -> None:
        """Take in one layer's squared norms, (B,)."""
        self.total = self.total + part.double()


@contextmanager
def squared_norms_of(net: nn.Module) -> Iterator[SquaredNorms]:
    """Within the block, a backward pass through what ``net`` computed there adds up its samples' squared norms.

    Each sample's loss must have entered the sum that is differentiated with weight 1, and each layer be used once.

    Parameters
    ----------
    net : Module
        Its parameters all belong to layers that :func:`squared_norms` knows.

    Raises
    ------
    TypeError
        They do not.
    """
    norms = SquaredNorms()
    with ExitStack() as hooks:
        for layer in net.modules():
            if next(layer.parameters(recurse=False), None) is not None:
                hooks.callback(layer.register_forward_hook(partial(_observe, norms)).remove)
        yield norms


def _observe(norms: SquaredNorms, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    (taken,) = inputs
    # The hook stays with this output's gradient where the output itself is changed in place later.
    output.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: norms.add(squared_norms(layer, taken.detach(), gradient))
    )


@singledispatch
def squared_norms(layer: nn.Module, taken: Tensor, gradient: Tensor) -> Tensor:
    """Squared norm of the gradient of a layer's parameters by each sample's loss.

    Parameters
    ----------
    layer : Module
        A linear layer, a two-dimensional convolution or batch normalisation in evaluation mode.
    taken : Tensor
        Float (B, ...): its input.
    gradient : Tensor
        Float (B, ...): the gradient by its output.

    Returns
    -------
    Tensor
        Float (B,).

    Raises
    ------
    TypeError
        Another kind of layer.
    """
    raise TypeError(f"{type(layer).__name__}: no rule for the gradients of its samples")


@squared_norms.register
def _(layer: nn.Linear, taken: Tensor, gradient: Tensor) -> Tensor:
    """Of (B, F) and (B, O): the outer product has the product of both norms, the bias that of the gradient."""
    weights = taken.square().sum(dim=1) * gradient.square().sum(dim=1)
    return weights if layer.bias is None else weights + gradient.square().sum(dim=1)


@squared_norms.register
def _(layer: nn.BatchNorm2d, taken: Tensor, gradient: Tensor) -> Tensor:
    """Of (B, C, H, W) both."""
    if layer.training or layer.running_mean is None or layer.running_var is None:
        raise TypeError("BatchNorm2d in training mode: its samples have no gradients of their own")
    gradients, offset = _by_place(gradient), taken - layer.running_mean.view(1, -1, 1, 1)
    weights = (gradients * _by_place(offset)).sum(dim=1) * (layer.running_var + layer.eps).rsqrt()
    return weights.square().sum(dim=1) + gradients.sum(dim=1).square().sum(dim=1)


@squared_norms.register
def _(layer: nn.Conv2d, taken: Tensor, gradient: Tensor) -> Tensor:
    """Of (B, C, H, W) and (B, O, H', W')."""
    padding = layer.padding
    if layer.groups != 1 or layer.dilation != (1, 1) or layer.padding_mode != "zeros" or isinstance(padding, str):
        raise TypeError(f"{layer}: no rule for the gradients of its samples")
    (down, across), gradients = padding, _by_place(gradient)
    padded = functional.pad(taken.permute(0, 2, 3, 1), (0, 0, across, across, down, down))
    most = _UNFOLDED if taken.device.type == "cpu" else 32 * _UNFOLDED
    rows = max(1, most // (gradients.shape[1] * layer.weight[0].numel()))
    parts = zip(torch.split(padded, rows), torch.split(gradients, rows), strict=True)
    squares = torch.cat([_product_norms(_unfolded(layer, images), part) for images, part in parts])
    return squares if layer.bias is None else squares + gradients.sum(dim=1).square().sum(dim=1)


def _product_norms(unfolded: Tensor, gradients: Tensor) -> Tensor:
    """Squared norm of each sample's gradients^T unfolded, of (B, L, O) and (B, L, K).

    It is taken from the product itself or, where there are few places, from the two matrices of inner products
    between places, whichever is less to multiply.
    """
    places, inputs, outputs = unfolded.shape[1], unfolded.shape[2], gradients.shape[2]
    if places * (inputs + outputs) < inputs * outputs:
        return ((unfolded @ unfolded.mT) * (gradients @ gradients.mT)).sum(dim=(1, 2)).clamp_min(0)
    return (gradients.mT @ unfolded).square().sum(dim=(1, 2))


def _unfolded(layer: nn.Conv2d, padded: Tensor) -> Tensor:
    """What meets at each place of the output: (B, H, W, C) to (B, L, K)."""
    (tall, wide), (down, across) = layer.kernel_size, layer.stride
    windows = padded.unfold(1, tall, down).unfold(2, wide, across)
    return windows.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)


def _by_place(x: Tensor) -> Tensor:
    """(B, C, H, W) to (B, H W, C), a view of channels-last tensors."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)
