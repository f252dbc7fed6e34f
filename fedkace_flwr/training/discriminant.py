"""An output layer fitted in closed form: linear discriminant analysis of a network's features.

A trained output layer lags behind. Where classes come and go, its rows lean towards the classes trained last, and the
mean of several clients' output layers fits the mean network's features badly at first. Linear discriminant analysis
(Fisher, 1936; with the covariance shrunk as by Friedman, 1989, "Regularized Discriminant Analysis") needs one forward
pass over some labelled samples, treats all classes alike whatever their number of samples, and is a linear layer itself.
"""

import torch
from torch import Tensor

from fedkace_flwr.metrics import fading
from fedkace_flwr.networks.network import Network
from fedkace_flwr.training.loop import Preprocess, features_of

SHRINKAGE = 0.1
"""Weight of a multiple of the identity in the features' covariance."""


def discriminant_share(classifier: str, round_number: int) -> float:
    """Weight of the discriminant in the output layer that predicts in a round, from 1; 0 where only the trained one does.

    Parameters
    ----------
    classifier : {"trained", "discriminant", "both", "fading"}
        The key. With ``fading`` the weight is :func:`fedkace_flwr.metrics.fading`.
    round_number : int
        t.
    """
    if classifier == "fading":
        return fading(round_number)
    return {"trained": 0.0, "discriminant": 1.0, "both": 0.5}[classifier]


def refit(net: Network, images: Tensor, labels: Tensor, preprocess: Preprocess, share: float = 1.0) -> None:
    """Move the output layer's rows, in place, for the classes of some samples; the other rows stay.

    Parameters
    ----------
    net : Network
        On the device of ``preprocess``; left in evaluation mode.
    images : Tensor
        uint8 (n, 3, H, W).
    labels : Tensor
        int64 (n,).
    preprocess : Preprocess
        Normalisation and device.
    share : float
        Weight of the discriminant's rows in the new ones; the old rows have the rest. Averaging two output layers
        averages their logits, and so takes the geometric mean of their probabilities.
    """
    features = features_of(net, lambda block: block, images, preprocess)
    classes, weight, bias = discriminant(features, labels.cpu())
    with torch.no_grad():
        output, rows = net.output, classes.to(net.output.weight.device)
        output.weight[rows] = torch.lerp(output.weight[rows], weight.to(output.weight), share)
        output.bias[rows] = torch.lerp(output.bias[rows], bias.to(output.bias), share)


def discriminant(features: Tensor, labels: Tensor, shrinkage: float = SHRINKAGE) -> tuple[Tensor, Tensor, Tensor]:
    """Linear discriminant functions of the classes present, which all count as equally likely.

    With the means mu_k of the classes, and S the mean over classes of their covariances, shrunk to
    (1 - g) S + g tr(S)/F I, the logit of class k is mu_k' S^-1 x - mu_k' S^-1 mu_k / 2: the logarithm of its posterior
    probability, up to a constant, if classes are normal with covariance S.

    Parameters
    ----------
    features : Tensor
        Float (n, F).
    labels : Tensor
        int64 (n,).
    shrinkage : float
        g, from 0 to 1. With no more samples than features, S is singular without it.

    Returns
    -------
    classes : Tensor
        int64 (K,): the classes present, ascending.
    weight : Tensor
        float64 (K, F).
    bias : Tensor
        float64 (K,).
    """
    x = features.double()
    counts = torch.bincount(labels)
    classes = counts.nonzero().flatten()
    index = torch.searchsorted(classes, labels)
    share = 1.0 / counts[classes].double()
    means = torch.zeros(len(classes), x.shape[1], dtype=torch.float64).index_add_(0, index, x) * share[:, None]
    residuals = (x - means[index]) * (share / len(classes)).sqrt()[index][:, None]
    covariance = residuals.T @ residuals
    size = float(covariance.diagonal().mean())
    if size == 0:  # one sample of each class: nothing is known of the spread, so that distances decide
        covariance, size, shrinkage = torch.zeros_like(covariance), 1.0, 1.0
    shrunk = (1 - shrinkage) * covariance
    shrunk.diagonal().add_(shrinkage * size)
    weight = torch.linalg.solve(shrunk, means.T).T
    return classes, weight, -0.5 * (weight * means).sum(dim=1)
