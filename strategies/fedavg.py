"""The server of federated averaging: each local model weighs by its samples."""

from fedkace_flwr.messaging.records import Reply
from strategies.base import ContinualStrategy


class FedAvg(ContinualStrategy):
    """theta_g = sum of n_k theta_k / sum of n_k (McMahan et al., 2017).

    With differential privacy or secure aggregation all weigh alike: the noise is measured for it, and a weight that
    a client names itself would be influence without bound.
    """

    def weight(self, reply: Reply) -> float:
        """n_k, the samples of the client's chunk."""
        return 1.0 if self.config.privacy.hides else float(reply.examples)
