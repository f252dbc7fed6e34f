"""Server of federated averaging: each local model is weighted by its number of samples."""

from fedkace_flwr.messaging.wire import Reply
from fedkace_flwr.strategies.base import ServerRule


class FedAvg(ServerRule):
    """theta_g = sum of n_k theta_k / sum of n_k (McMahan et al., 2017).

    With differential privacy or secure aggregation all clients have the same weight. The noise is calibrated for equal
    weights, and a client that reports its own weight would have unbounded influence.
    """

    def weight(self, reply: Reply) -> float:
        """n_k, the number of samples in the client's chunk."""
        return 1.0 if self.config.privacy.hides else float(reply.examples)
