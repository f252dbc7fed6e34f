"""Logging: this project writes to the same log as Flower."""

import logging


def join_flower_log() -> None:
    """Give this project's loggers Flower's handlers, so that ``flwr log`` and the terminal show their lines."""
    flower, logger = logging.getLogger("flwr"), logging.getLogger("fedkace_flwr")
    logger.handlers = flower.handlers
    logger.setLevel(flower.getEffectiveLevel())
    logger.propagate = False
