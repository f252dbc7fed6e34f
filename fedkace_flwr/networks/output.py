"""A fixed output layer.

Shapes: C classes, F features.
"""

import torch
from torch import Tensor
from torch.nn import functional


def simplex(classes: int, features: int, generator: torch.Generator) -> Tensor:
    """A simplex equiangular tight frame: unit vectors, every two of which have the cosine -1 / (C - 1).

    Parameters
    ----------
    classes, features : int
        C, at least 2, and F, at least C.
    generator : torch.Generator
        Draws the frame's orientation.

    Returns
    -------
    Tensor
        float32 (C, F): the columns of an orthonormal basis of C dimensions, less their mean, at length 1
        (Papyan et al., PNAS 2020, "Prevalence of neural collapse during the terminal phase of deep learning training").
    """
    basis, _ = torch.linalg.qr(torch.randn(features, classes, generator=generator, dtype=torch.float64))
    return functional.normalize((basis - basis.mean(dim=1, keepdim=True)).T, dim=1).float()
