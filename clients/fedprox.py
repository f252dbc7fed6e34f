"""The client of FedProx: federated averaging that stays close to the received model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkace_flwr.clients.base import ClientRound, ClientRule
from fedkace_flwr.keys import key
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method
from fedkace_flwr.training.losses import Batch, Objective, TaskLoss


@dataclass(frozen=True)
class FedProxKeys:
    """FedProx."""

    fedprox_mu: float = key(
        0.01,
        "Weight mu of the proximal term: half the squared distance of the parameters from those received.",
        low=0,
        living=True,
    )


class ProximalLoss(TaskLoss):
    """Cross-entropy over all classes met, plus mu / 2 times the squared distance of the parameters from a start.

    Parameters
    ----------
    seen : Tensor
        bool (C,): C_<=t.
    parameters : sequence of Tensor
        The parameters to train; their present values are the start.
    mu : float
        The weight.
    """

    def __init__(self, seen: Tensor, parameters: Sequence[Tensor], mu: float) -> None:
        super().__init__(seen, seen)
        self._parameters = list(parameters)
        self._start = [parameter.detach().clone() for parameter in parameters]
        self._mu = mu

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Mean over the batch, plus the proximal term."""
        squares = [(now - start).square().sum() for now, start in zip(self._parameters, self._start, strict=True)]
        return super().loss(logits, features, batch) + self._mu / 2 * torch.stack(squares).sum()


class FedProxClient(ClientRule):
    """FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020).

    The publication tunes mu among 0.001, 0.01, 0.1 and 1 for each data set; here it is 0.01 everywhere
    (``fedprox-mu``). Inferred: the server takes the plain mean, as for the other methods.
    """

    def objective(self, net: Network, now: ClientRound) -> Objective:
        """Cross-entropy plus the proximal term; ``net`` is the received model."""
        mu = self.config.of(FedProxKeys).fedprox_mu
        return ProximalLoss(now.seen.to(self.experiment.device), list(net.parameters()), mu)


METHOD = Method(FedProxClient, "FedProx", keys=(FedProxKeys,), is_mean=True, replays=False)
