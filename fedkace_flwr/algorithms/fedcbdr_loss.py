"""Task-aware temperature scaling (FedCBDR; Qi et al., NeurIPS 2025, Eqs. 7 to 9), as printed and as published in code.

Pure tensor mathematics. Shapes: B samples of a batch, C classes.
"""

import torch
from torch import Tensor

from fedkace_flwr.training.losses import WeightedMeansLoss


class TemperatureLoss(WeightedMeansLoss):
    """Weighted sum of two mean cross-entropies, of replayed and of new samples, over logits scaled class by class.

    A sample's origin decides its weight, a class's group its temperature. The paper's tasks have no class in common,
    so both groupings agree there; here a buffered sample may belong to a class of the current chunk.

    Parameters
    ----------
    seen, weight_old, weight_new
        As for :class:`fedkace_flwr.training.losses.WeightedMeansLoss`.
    new : Tensor
        bool (C,): classes whose logits are divided by ``tau_new``, the others' by ``tau_old``.
    tau_old, tau_new : float
        Temperatures, positive.
    """

    def __init__(
        self, seen: Tensor, new: Tensor, *, tau_old: float, tau_new: float, weight_old: float, weight_new: float
    ) -> None:
        super().__init__(seen, weight_old=weight_old, weight_new=weight_new)
        self._temperature = torch.where(new, tau_new, tau_old)

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits, float (B, C), divided by their classes' temperatures."""
        return logits / self._temperature.to(logits.dtype)
