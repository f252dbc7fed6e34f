"""Norm of the gradient of each sample's own loss, from one backward pass for all samples.

If no sample's output depends on another's, which requires that batch normalisation use its running statistics, the
gradient of one sample's loss with respect to a layer's parameters follows from the layer's input for this sample and
from the loss's gradient with respect to the layer's output. A single backward pass provides both for all samples, and
the norms do not require any gradient to be kept (Goodfellow, arXiv 1510.01799; for convolutions Bu, Mao and Xu, arXiv 2205.10683).
Where a network has other layers, the samples' gradients themselves are taken, some at a time (:func:`one_by_one`).

Pure tensor mathematics. Shapes: B samples, L positions of a convolution's output, K inputs of a position, C
channels, O outputs, F features.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, singledispatch

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Tensors = dict[str, Tensor]
SampleLoss = Callable[[Tensors, tuple[Tensor, ...]], Tensor]

_GRADIENTS = 1 << 24  # numbers in the gradients that are held at a time, 64 MiB

# Elements of unfolded input at a time on a CPU, so that they stay in its cache; elsewhere 32 times as many.
_UNFOLDED = 1 << 20


class SquaredNorms:
    """Squared norms of the samples' gradients, summed over layers.

    Attributes
    ----------
    total : Tensor
        Float64 (B,); a single 0 before a backward pass.
    """

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)

    def add(self, part: Tensor) -> None:
        """Add one layer's squared norms, (B,)."""
        self.total = self.total + part.double()


def one_by_one(loss: SampleLoss, parameters: Tensors, samples: tuple[Tensor, ...]) -> tuple[Tensor, Tensors]:
    """Squared norms of the samples' gradients, float64 (B,), and the gradients' sum, for any network.

    Parameters
    ----------
    loss : callable
        Maps parameters and one sample, without the first dimension, to its scalar loss.
    parameters : dict of str to Tensor
        At which gradients are taken.
    samples : tuple of Tensor
        Each (B, ...).
    """
    each = grad(loss)
    size = max(1, _GRADIENTS // sum(parameter.numel() for parameter in parameters.values()))
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    norms = []
    for part in zip(*(torch.split(tensor, size) for tensor in samples), strict=True):
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            # Of operations that vmap takes one sample after another, to which attention's other kernels belong.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            try:
                gradients = vmap(each, in_dims=(None, 0))(parameters, part)
            except RuntimeError:  # recurrent layers, which vmap cannot take, nor cuDNN in evaluation
                with torch.backends.cudnn.flags(enabled=False):
                    alone = [each(parameters, sample) for sample in zip(*part, strict=True)]
                gradients = {name: torch.stack([own[name] for own in alone]) for name in parameters}
        norms.append(torch.stack([g.flatten(1).double().square().sum(dim=1) for g in gradients.values()]).sum(dim=0))
        for name, gradient in gradients.items():
            total[name] += gradient.sum(dim=0)
    return torch.cat(norms), total


@contextmanager
def squared_norms_of(net: nn.Module) -> Iterator[SquaredNorms]:
    """Collect the samples' squared norms in backward passes through what ``net`` computes within the block.

    Each sample's loss must have weight 1 in the sum that is differentiated, and each layer must be used once.

    Parameters
    ----------
    net : Module
        All its parameters belong to layers that :func:`squared_norms` supports.

    Raises
    ------
    TypeError
        A layer is not supported.
    """
    norms = SquaredNorms()
    with ExitStack() as hooks:
        for layer in net.modules():
            if next(layer.parameters(recurse=False), None) is not None:
                hooks.callback(layer.register_forward_hook(partial(_observe, norms)).remove)
        yield norms


def _observe(norms: SquaredNorms, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    (taken,) = inputs
    # The hook is on this output's gradient even if the output itself is changed in place later.
    output.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: norms.add(squared_norms(layer, taken.detach(), gradient))
    )


@singledispatch
def squared_norms(layer: nn.Module, taken: Tensor, gradient: Tensor) -> Tensor:
    """Squared norm of the gradient of each sample's loss with respect to a layer's parameters.

    Parameters
    ----------
    layer : Module
        A linear layer, a two-dimensional convolution or batch normalisation in evaluation mode.
    taken : Tensor
        Float (B, ...): its input.
    gradient : Tensor
        Float (B, ...): the gradient with respect to its output.

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
    if taken.dim() != 2:
        raise TypeError(f"{layer} of an input of {taken.dim()} dimensions: no rule for the gradients of its samples")
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
