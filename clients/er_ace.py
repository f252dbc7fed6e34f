"""The client of ER-ACE: experience replay with an asymmetric cross-entropy."""

import torch
from torch import Tensor

from fedkace_flwr.clients.base import ClientRound
from fedkace_flwr.clients.er import ReplayClient
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method
from fedkace_flwr.training.losses import Objective, WeightedMeansLoss


class AsymmetricLoss(WeightedMeansLoss):
    """The new samples' mean cross-entropy over the chunk's classes alone, plus the replayed samples' over all classes met.

    New classes thus do not push the old ones' features and logits away; replay alone teaches to tell them apart.

    Parameters
    ----------
    current, seen : Tensor
        bool (C,): C_t and C_<=t.
    """

    def __init__(self, current: Tensor, seen: Tensor) -> None:
        super().__init__(seen, weight_old=1.0, weight_new=1.0)
        self.masks = torch.stack([current, seen])


class ErAceClient(ReplayClient):
    """ER-ACE (Caccia et al., ICLR 2022), averaged by the server.

    The publication is "New Insights on Reducing Abrupt Representation Change in Online Continual Learning". As there,
    the two means have the same weight, and the buffer is a reservoir.

    Inferred: a chunk's classes count in all of its batches; the publication takes those of each incoming batch.
    """

    def objective(self, net: Network, now: ClientRound) -> Objective:
        """The asymmetric cross-entropy."""
        device = self.experiment.device
        return AsymmetricLoss(now.current.to(device), now.seen.to(device))


METHOD = Method(ErAceClient, "ER-ACE", is_mean=True)
