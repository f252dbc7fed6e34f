"""Server of Centralized: asks each client for its reference accuracy and sends no model (paper, section 5.1)."""

from strategies.base import ServerRule


class Centralized(ServerRule):
    """No training phase, and evaluation messages without a model: no bytes of weights in either direction."""

    train_action = None
