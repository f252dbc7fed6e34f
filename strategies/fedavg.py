"""The server of federated averaging: each local model weighs by its samples."""

from fedkace_flwr.messages import Reply
from strategies.base import ContinualStrategy


class FedAvg(ContinualStrategy):
    """theta_g = sum of n_k theta_k / sum of n_k (McMahan et al., 2017)."""

    def weight(self, reply: Reply) -> float:
        """n_k, the samples of the client's chunk."""
        return float(reply.examples)
