"""Server of Centralized: asks each client for its reference accuracy and sends no model (paper, section 5.1)."""

from fedkace_flwr.clients.centralized import CentralizedKeys
from fedkace_flwr.strategies.base import ServerRule


class Centralized(ServerRule):
    """No training phase, and evaluation messages without a model, so no weights are transferred."""

    train_action = None
    aggregates = False

    def why_not_longer(self, planned: int, begun: int) -> str:
        """Rounds between trained ones depend on the next trained one, which may be the last."""
        keys, rounds = self.config.of(CentralizedKeys), self.config.stream.rounds
        if all(keys.anchors(each, planned) == keys.anchors(each, rounds) for each in range(1, begun + 1)):
            return ""
        return f"with centralized-rounds = {keys.centralized_rounds!r} its accuracies depend on which round is the last"

    def lacks_global_model(self) -> str:
        """There is none: each client trains a network for each round's test and discards it."""
        return "its clients discard each round's network after testing it"
