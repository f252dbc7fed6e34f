"""Server of Fed-TaLoRA: the mean of the adapters, and what it lacks of the mean of their products."""

from collections.abc import Sequence

import numpy as np

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging.wire import NumpyArray, Reply, Weights
from fedkace_flwr.networks.lora import DOWN, UP, adapted
from fedkace_flwr.rounds.server_round import ServerRound
from fedkace_flwr.strategies.fedavg import FedAvg

_LARGEST = float(np.finfo(np.float32).max) / 4  # a weight is then finite after the round


class FedTaLora(FedAvg):
    """W moves by mean(B_i A_i) - mean(B) mean(A), so that W + BA is the mean of the local models (Yu et al., 2025)."""

    aggregates = False  # only the mean has such a residual

    def check(self, now: ServerRound, reply: Reply) -> None:
        """Check that the adapters' products are finite.

        Raises
        ------
        MessageError
            One may not be.
        """
        for name in adapted(now.shapes.keys()):
            down, up = reply.weights[name + DOWN], reply.weights[name + UP]
            if len(down) * float(np.abs(down).max()) * float(np.abs(up).max()) > _LARGEST:
                raise MessageError(f"arrays {name + UP!r} and {name + DOWN!r}: their product may be infinite", "values")

    def merge(self, now: ServerRound, replies: Sequence[Reply]) -> Weights:
        """The mean, with the residual in the weights that have adapters."""
        merged = dict(super().merge(now, replies))
        weights = [self.weight(reply) for reply in replies]
        for name in adapted(merged.keys()):
            products = (
                weight / sum(weights) * _product(reply.weights, name)
                for weight, reply in zip(weights, replies, strict=True)
            )
            residual = sum(products) - _product(merged, name)
            merged[name] = (merged[name] + residual.reshape(merged[name].shape)).astype(merged[name].dtype)
        return merged


def _product(model: Weights, name: str) -> NumpyArray:
    """BA, float64 (O, I)."""
    product: NumpyArray = model[name + UP].astype(np.float64) @ model[name + DOWN].astype(np.float64)
    return product
