"""Server of Centralized: asks each client for its reference accuracy and sends no model (paper, section 5.1)."""

from strategies.base import ServerRule


class Centralized(ServerRule):
    """No training phase, and evaluation messages without a model, so no weights are transferred."""

    train_action = None
