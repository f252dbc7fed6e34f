"""Re-Fed's informative model and its score for each sample (Li et al., CVPR 2024, arXiv 2403.05890).

A personalised model v, by default a copy of the global model w, takes s steps on the client's samples while a
proximal term pulls it towards w:

    v_p = v_(p-1) - eta * (G + (1 - lambda) / (2 lambda) * (v_(p-1) - w)),

G being the samples' gradients, summed or averaged. A sample scores I = sum over p of ||g_p|| / p, with g_p the
gradient of its own loss at v_(p-1): samples that are hard in early steps score highest.

Pure tensor mathematics. Shapes: n samples in blocks of B, C classes, F features.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedkace_flwr.compute.memory import images_at_once
from fedkace_flwr.networks.network import Network
from fedkace_flwr.training.losses import masked_cross_entropy
from fedkace_flwr.training.sample_gradients import one_by_one, squared_norms_of

Parameters = dict[str, Tensor]
Block = tuple[Tensor, ...]
Measure = Callable[[Parameters, Block], tuple[Tensor, Parameters]]
"""Map parameters and B samples to the squared norms of the samples' gradients, (B,), and the gradients' sum."""

_BLOCK = 64  # samples at a time on a CPU; a GPU takes a part of a pass without gradients
_GRADIENTS = 8  # memory of a sample with its gradients, as a multiple of that of a pass without


@dataclass(frozen=True)
class Informative:
    """The outcome of the informative model.

    Attributes
    ----------
    scores : Tensor
        I, float64 (n,) on the CPU, at least 0; -inf if a gradient was not finite.
    parameters : dict of str to Tensor
        v after its last finite step.
    drift : float
        ||v - w||.
    """

    scores: Tensor
    parameters: Parameters
    drift: float


def informative_scores(
    measure: Measure,
    blocks: Callable[[], Iterable[Block]],
    anchor: Parameters,
    *,
    steps: int,
    learning_rate: float,
    locality: float,
    reduction: str = "mean",
    power: int = 1,
    start: Parameters | None = None,
) -> Informative:
    """Move v from its start, and sum each sample's gradient norms along the way.

    All norms of a step are taken at the same v, before it moves. If a step leads to non-finite weights, it is not
    taken, and the scores so far are final.

    Parameters
    ----------
    measure : callable
        Gradients of the samples of a block, see :data:`Measure`.
    blocks : callable
        Each call passes once over the samples, in the same order; at least one sample.
    anchor : dict of str to Tensor
        w; left as it is.
    steps : int
        s, at least 1.
    learning_rate : float
        eta.
    locality : float
        lambda, in (0, 1]; at 1 the anchor has no effect.
    reduction : {"mean", "sum"}
        How gradients are combined into G.
    power : {1, 2}
        Norms as they are, or squared.
    start : dict of str to Tensor, optional
        v_0; left as it is. By default the anchor.
    """
    pull = (1 - locality) / (2 * locality)
    parameters = {name: tensor.detach().clone() for name, tensor in (start or anchor).items()}
    scores: Tensor | float = 0.0
    for step in range(1, steps + 1):
        squares = []
        total = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        for block in blocks():
            squared, gradient = measure(parameters, block)
            squares.append(squared.detach().double())
            for name, part in gradient.items():
                total[name] += part
        norms = torch.cat(squares)
        scores = scores + (norms.sqrt() if power == 1 else norms) / step
        share = 1 / len(norms) if reduction == "mean" else 1.0
        moved = {
            name: v - learning_rate * (share * total[name] + pull * (v - anchor[name].detach()))
            for name, v in parameters.items()
        }
        if not bool(torch.stack([tensor.isfinite().all() for tensor in moved.values()]).all()):
            break
        parameters = moved
    assert isinstance(scores, Tensor)
    squares = [(v - anchor[name].detach()).square().sum() for name, v in parameters.items()]
    drift = math.sqrt(sum(torch.stack(squares).tolist()))
    return Informative(torch.where(scores.isfinite(), scores, -math.inf).cpu(), parameters, drift)


def all_gradients(net: Network, seen: Tensor) -> Measure:
    """Measure all parameters by cross-entropy over the classes in ``seen``, bool (C,).

    A block is images, float (B, 3, H, W), and labels, int64 (B,).
    """

    def loss(parameters: Parameters, sample: Block) -> Tensor:
        image, label = sample
        losses, _ = masked_cross_entropy(functional_call(net, parameters, (image[None],)), label[None], seen)
        return losses[0]

    if not net.layered:
        return lambda parameters, block: one_by_one(loss, parameters, block)

    def measure(parameters: Parameters, block: Block) -> tuple[Tensor, Parameters]:
        images, labels = block
        with torch.enable_grad(), squared_norms_of(net) as norms:
            leaves = _leaves(parameters)
            losses, _ = masked_cross_entropy(functional_call(net, leaves, (images,)), labels, seen)
            total = _gradients(losses, leaves)
        return norms.total, total

    return measure


def last_layer_squared_norms(residual: Tensor, features: Tensor) -> Tensor:
    """Squared norm of each sample's gradient by the output layer, weights and bias, without a backward pass.

    The gradient of the weights is the outer product of the residual with the features, that of the bias the
    residual itself.

    Parameters
    ----------
    residual : Tensor
        Float (B, C), softmax minus one-hot.
    features : Tensor
        Float (B, F).

    Returns
    -------
    Tensor
        Float (B,).
    """
    return residual.square().sum(dim=1) * (features.square().sum(dim=1) + 1)


def last_layer_gradients(net: Network, seen: Tensor) -> Measure:
    """Measure the output layer only, in closed form; the summed gradient is that of all parameters."""
    both = _FeaturesAndLogits(net)

    def measure(parameters: Parameters, block: Block) -> tuple[Tensor, Parameters]:
        images, labels = block
        with torch.enable_grad():
            leaves = _leaves(parameters)
            features, logits = functional_call(both, {f"net.{n}": leaf for n, leaf in leaves.items()}, (images,))
            losses, residual = masked_cross_entropy(logits, labels, seen)
            total = _gradients(losses, leaves)
        return last_layer_squared_norms(residual, features.detach()), total

    return measure


def _leaves(parameters: Parameters) -> Parameters:
    return {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}


def _gradients(losses: Tensor, leaves: Parameters) -> Parameters:
    return dict(zip(leaves, torch.autograd.grad(losses.sum(), list(leaves.values())), strict=True))


class _FeaturesAndLogits(nn.Module):
    def __init__(self, net: Network) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.net.features(images)
        return features, self.net.output(features)


def network_scores(
    net: Network,
    blocks: Callable[[int], Iterable[Block]],
    seen: Tensor,
    anchor: Network | None = None,
    *,
    size: int = 0,
    last_layer: bool = False,
    **steps: Any,
) -> Informative:
    """Score samples by an informative model that starts at ``net``.

    Batch normalisation uses the running statistics of ``net``; otherwise a single sample would have no gradient of its
    own. The networks, their statistics and modes and the global generators are left unchanged. Gradients are taken in
    float32, whatever the training precision.

    Parameters
    ----------
    net : Network
        v_0.
    blocks : callable
        Given a number of samples, passes once over all of them in blocks no larger: preprocessed images,
        float (B, 3, H, W), and labels, int64 (B,), on the network's device.
    seen : Tensor
        bool (C,), on the network's device: the classes to include.
    anchor : Network, optional
        w, on the network's device. By default the network itself.
    size : int
        Height and width of the images; decides on a GPU how many pass at once.
    last_layer : bool
        Take gradient norms over the output layer only.
    **steps
        As for :func:`informative_scores`.
    """
    start, pulled_to = (
        {name: parameter.detach() for name, parameter in which.named_parameters()} for which in (net, anchor or net)
    )
    measure = (last_layer_gradients if last_layer else all_gradients)(net, seen)
    was_training = net.training
    net.eval()
    try:
        with net.computing_in(torch.float32):
            passes = partial(blocks, _block_of(net, size))
            return informative_scores(measure, passes, pulled_to, start=start, **steps)
    finally:
        net.train(was_training)


def _block_of(net: Network, size: int) -> int:
    if net.output.weight.device.type == "cpu" or not size:
        return _BLOCK
    return max(_BLOCK, images_at_once(*net.largest_map(3, size, size)) // _GRADIENTS)


def most_informative(scores: Tensor, capacity: int) -> Tensor:
    """Positions of the highest scores, regardless of class.

    Parameters
    ----------
    scores : Tensor
        Float (n,); ties go to the lower position.
    capacity : int
        M.

    Returns
    -------
    Tensor
        int64, ascending, min(n, M) positions.
    """
    return scores.argsort(descending=True, stable=True)[:capacity].sort().values
