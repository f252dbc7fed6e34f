"""Server of Centralized: asks each client for its reference accuracy and sends no model (paper, section 5.1)."""

from fedkace_flwr.strategies.base import ServerRule


class Centralized(ServerRule):
    """No training phase, and evaluation messages without a model, so no weights are transferred."""

    train_action = None
    aggregates = False

    def lacks_global_model(self) -> str:
        """There is none: each client trains a network for each round's test and discards it."""
        return "its clients discard each round's network after testing it"
