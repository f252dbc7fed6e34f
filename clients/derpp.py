"""The client of DER++: a reservoir that remembers the logits of its samples."""

from dataclasses import dataclass

from fedkace_flwr.clients.base import ClientRound
from fedkace_flwr.clients.er import ReplayClient
from fedkace_flwr.keys import key
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method
from fedkace_flwr.training.losses import Objective, WeightedMeansLoss


@dataclass(frozen=True)
class DerppKeys:
    """DER++."""

    derpp_alpha: float = key(0.1, "Weight alpha of the squared distance from the stored logits.", low=0, living=True)
    derpp_beta: float = key(0.5, "Weight beta of the replayed samples' label loss.", low=0, living=True)


class DerppClient(ReplayClient):
    """DER++ (Buzzega et al., "Dark Experience for General Continual Learning", NeurIPS 2020), averaged by the server.

    The loss is the chunk's mean cross-entropy, plus beta times the replayed samples', plus alpha times the squared
    distance of the replayed samples' logits from those that were stored with them. The
    publication tunes alpha and beta for each data set and buffer; here they are 0.1 and 0.5 everywhere (``derpp-alpha``,
    ``derpp-beta``).

    Inferred: the publication draws two independent batches from the buffer for its two replay terms, and stores logits
    while it trains, as each sample arrives; here both terms see the replayed samples of the batch, and logits are
    stored at the end of the sample's first round. Distances cover the classes met by then.
    """

    @property
    def logits_weight(self) -> float:
        """Alpha."""
        return self.config.of(DerppKeys).derpp_alpha

    def objective(self, net: Network, now: ClientRound) -> Objective:
        """The two label losses; the third term is added where the buffer is replayed."""
        if len(now.state.buffer) == 0:
            return super().objective(net, now)
        seen, beta = now.seen.to(self.experiment.device), self.config.of(DerppKeys).derpp_beta
        return WeightedMeansLoss(seen, weight_old=beta, weight_new=1.0)


METHOD = Method(DerppClient, "DER++", keys=(DerppKeys,), is_mean=True)
