"""Server of AFL: adds up the clients' sums and solves for the output layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedkace_flwr.clients.afl import COUNTED, CROSS, GRAM, AflKeys, shapes_for
from fedkace_flwr.config import Config
from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import NumpyArray, Reply, Shapes, Weights
from fedkace_flwr.rounds.server_round import ServerRound
from fedkace_flwr.strategies.base import ServerRule

_SLACK = 1e-9  # rounding may carry an eigenvalue of 0 slightly below 0, in proportion to the largest


class Afl(ServerRule):
    """The output layer is the ridge regression over all that clients have ever sent; the body stays (He et al., 2025)."""

    aggregates = False
    takes_models = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._sums: dict[str, NumpyArray] = {}
        self._counted: dict[int, int] = {}
        self._model: dict[str, NumpyArray] = {}

    def begin_round(self, now: ServerRound, arrays: ArrayRecord) -> None:
        """Keep the body; it is that of every round."""
        self._model = wire.unpack(arrays)

    def training_extras_for(self, client: int) -> dict[str, ArrayRecord | ConfigRecord]:
        """Which of the client's rounds was the last that counts."""
        return {COUNTED: ConfigRecord({COUNTED: self._counted.get(client, 0)})}

    def expected(self, now: ServerRound, content: RecordDict) -> Shapes:
        """The sums."""
        return shapes_for(now.shapes)

    def check(self, now: ServerRound, reply: Reply) -> None:
        """Check that the first sum is a Gram matrix, or the equations might have no solution.

        Raises
        ------
        MessageError
            It has a negative eigenvalue.
        """
        values = np.linalg.eigvalsh(_whole(reply.weights[GRAM], len(reply.weights[CROSS])))
        if values[0] < -_SLACK * max(values[-1], 0.0):
            raise MessageError(f"array {GRAM!r} has a negative eigenvalue, {values[0]:.3g}", "values")

    def compare(self, now: ServerRound, replies: Sequence[Reply]) -> list[Reply]:
        """All count: there are no models to compare."""
        return list(replies)

    def merge(self, now: ServerRound, replies: Sequence[Reply]) -> Weights:
        """Add the sums up, and solve."""
        for name in (GRAM, CROSS):
            self._sums[name] = sum((reply.weights[name] for reply in replies), self._sums.get(name, np.zeros(())))
        self._counted = self._counted | {reply.client: now.number for reply in replies}
        cross = self._sums[CROSS]
        gram = _whole(self._sums[GRAM], len(cross)) + self.config.of(AflKeys).afl_ridge * np.eye(len(cross))
        head = np.linalg.solve(gram, cross)
        return {
            **self._model,
            "output.weight": head.T.astype(self._model["output.weight"].dtype),
            "output.bias": np.zeros_like(self._model["output.bias"]),
        }

    def drift(self, now: ServerRound, replies: Sequence[Reply], merged: Weights) -> None:
        """None: there are no local models."""

    def state(self) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
        """The sums, and the last round of each client that is in them."""
        return dict(self._sums), {COUNTED: {str(client): number for client, number in self._counted.items()}}

    def restore(self, arrays: Mapping[str, NumpyArray], record: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self._sums = dict(arrays)
        self._counted = {int(client): number for client, number in record[COUNTED].items()}


def _whole(triangle: NumpyArray, features: int) -> NumpyArray:
    """The symmetric matrix (F, F) with this upper triangle."""
    matrix = np.zeros((features, features))
    matrix[np.triu_indices(features)] = triangle
    return matrix + np.triu(matrix, 1).T
