"""Re-Fed's informative model and its score for each sample (Li et al., CVPR 2024, arXiv 2403.05890).

A personalised model v, at first a copy of the global model w, takes s steps on the client's samples while a
proximal term pulls it towards w:

    v_p = v_(p-1) - eta * (G + (1 - lambda) / (2 lambda) * (v_(p-1) - w)),

G being the mean of the samples' gradients. A sample scores I = sum over p of ||g_p|| / p, with g_p the
gradient of its own loss at v_(p-1): samples that are hard in early steps score highest.

Pure tensor mathematics. Shapes: n samples in blocks of B, C classes, F features.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
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
) -> Informative:
    """Move v from the anchor, and sum each sample's gradient norms along the way.

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
    """
    pull = (1 - locality) / (2 * locality)
    parameters = {name: tensor.detach().clone() for name, tensor in anchor.items()}
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
        scores = scores + norms.sqrt() / step
        share = 1 / len(norms)
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

    if not net.layered or net.adapted:
        return lambda parameters, block: one_by_one(loss, parameters, block)

    def measure(parameters: Parameters, block: Block) -> tuple[Tensor, Parameters]:
        images, labels = block
        with torch.enable_grad(), squared_norms_of(net) as norms:
            leaves = _leaves(parameters)
            losses, _ = masked_cross_entropy(functional_call(net, leaves, (images,)), labels, seen)
            total = _gradients(losses, leaves)
        return norms.total, total

    return measure


def _leaves(parameters: Parameters) -> Parameters:
    return {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}


def _gradients(losses: Tensor, leaves: Parameters) -> Parameters:
    return dict(zip(leaves, torch.autograd.grad(losses.sum(), list(leaves.values())), strict=True))


def network_scores(
    net: Network,
    blocks: Callable[[int], Iterable[Block]],
    seen: Tensor,
    *,
    steps: int,
    learning_rate: float,
    locality: float,
    shape: tuple[int, ...] = (),
) -> Informative:
    """Score samples by an informative model that starts at ``net`` and is pulled towards it.

    Batch normalisation uses the running statistics of ``net``; otherwise a single sample would have no gradient of its
    own. The network, its statistics and mode and the global generators are left unchanged. Gradients are taken in
    float32, whatever the training precision.

    Parameters
    ----------
    net : Network
        w.
    blocks : callable
        Given a number of samples, passes once over all of them in blocks no larger: preprocessed samples,
        float (B, ...), and labels, int64 (B,), on the network's device.
    seen : Tensor
        bool (C,), on the network's device: the classes to include.
    steps, learning_rate, locality
        As for :func:`informative_scores`.
    shape : tuple of int
        Of a sample; decides on a GPU how many pass at once.
    """
    anchor = {name: parameter.detach() for name, parameter in net.named_parameters()}
    passes = partial(blocks, _block_of(net, shape))
    was_training = net.training
    net.eval()
    try:
        with net.computing_in(torch.float32):
            return informative_scores(
                all_gradients(net, seen), passes, anchor, steps=steps, learning_rate=learning_rate, locality=locality
            )
    finally:
        net.train(was_training)


def _block_of(net: Network, shape: tuple[int, ...]) -> int:
    if net.output.weight.device.type == "cpu" or not shape:
        return _BLOCK
    return max(_BLOCK, images_at_once(*net.largest_map(*shape)) // _GRADIENTS)


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
