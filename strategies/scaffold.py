"""Server of SCAFFOLD: the mean of the models, and a control variate that is the mean of the clients'."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedkace_flwr.clients.scaffold import CONTROL, PREFIX
from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import NumpyArray, Reply, Shapes, Weights
from fedkace_flwr.rounds.server_round import ServerRound
from fedkace_flwr.strategies.base import Aggregator, ServerRule


class Scaffold(ServerRule):
    """Global step size 1 (Karimireddy et al., 2020); c moves by the share of clients that trained times their mean change.

    The mean is by the key ``aggregation``, as for models.

    Inferred: a client whose reply is lost or rejected keeps its new control variate, which c lacks until later replies
    replace it.
    """

    undefended = "control variates can turn honest updates against each other"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._control: dict[str, NumpyArray] = {}
        self._changes: dict[int, Weights] = {}

    def begin_round(self, now: ServerRound, arrays: ArrayRecord) -> None:
        """Start from c = 0."""
        for name, (shape, dtype) in now.replied.items():
            if name in now.parameters:
                self._control.setdefault(name, np.zeros(shape, dtype))

    def training_extras_for(self, client: int) -> dict[str, ArrayRecord | ConfigRecord]:
        """The control variate c."""
        return {CONTROL: wire.array_record(self.state()[0])}

    def expected(self, now: ServerRound, content: RecordDict) -> Shapes:
        """The model, and the change of the client's control variate."""
        return {**now.replied, **{f"{PREFIX}{name}": now.shapes[name] for name in self._control}}

    def compare(self, now: ServerRound, replies: Sequence[Reply]) -> list[Reply]:
        """Set the changes of control variates aside."""
        self._changes = {
            reply.client: {name: reply.weights[f"{PREFIX}{name}"] for name in self._control} for reply in replies
        }
        return super().compare(
            now,
            [
                replace(reply, weights={n: each for n, each in reply.weights.items() if not n.startswith(PREFIX)})
                for reply in replies
            ],
        )

    def merge(self, now: ServerRound, replies: Sequence[Reply]) -> Weights:
        """Move c, and take the mean of the models."""
        aggregate = Aggregator(self.config.aggregation, now.parameters)
        change = aggregate([self._changes[reply.client] for reply in replies], [1.0] * len(replies))
        share = np.float32(len(replies) / now.clients)
        self._control = {name: each + share * change[name] for name, each in self._control.items()}
        return super().merge(now, replies)

    def state(self) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
        """The control variate."""
        return {f"{PREFIX}{name}": array for name, array in self._control.items()}, {}

    def restore(self, arrays: Mapping[str, NumpyArray], record: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self._control = {name.removeprefix(PREFIX): array for name, array in arrays.items()}
