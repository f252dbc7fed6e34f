"""Leverage scores, computed from their definition."""

import numpy as np
import torch
from torch import Tensor


def pinv_leverage(stacked: Tensor) -> Tensor:
    """Return x_j (X^T X)^+ x_j^T, computed with NumPy."""
    x = stacked.numpy()
    return torch.from_numpy(np.einsum("ij,jk,ik->i", x, np.linalg.pinv(x.T @ x, rcond=1e-10, hermitian=True), x))
