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

    The server keeps the clients' control variates too, so that c stays their mean: what a client has computed in a round
    that is lost, rejected or undone does not count.
    """

    undefended = "control variates can turn honest updates against each other"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._control: dict[str, NumpyArray] = {}
        self._of: dict[int, dict[str, NumpyArray]] = {}
        self._new: dict[int, dict[str, NumpyArray]] = {}
        self._clients = 0  # of which c is the mean

    def begin_round(self, now: ServerRound, arrays: ArrayRecord) -> None:
        """Start from c = 0, and let c be the mean of more clients once some have joined, whose c_i are 0."""
        if now.clients > self._clients > 0:
            share = np.float32(self._clients / now.clients)
            self._control = {name: share * each for name, each in self._control.items()}
        self._clients = now.clients
        for name, (shape, dtype) in now.replied.items():
            if name in now.parameters:
                self._control.setdefault(name, np.zeros(shape, dtype))

    def training_extras_for(self, client: int) -> dict[str, ArrayRecord | ConfigRecord]:
        """What corrects the client's gradients: c - c_i."""
        own = self._of.get(client, {})
        correction = {
            f"{PREFIX}{name}": each - own.get(name, np.zeros_like(each)) for name, each in self._control.items()
        }
        return {CONTROL: wire.array_record(correction)}

    def expected(self, now: ServerRound, content: RecordDict) -> Shapes:
        """The model, and the client's new control variate."""
        return {**now.replied, **{f"{PREFIX}{name}": now.shapes[name] for name in self._control}}

    def compare(self, now: ServerRound, replies: Sequence[Reply]) -> list[Reply]:
        """Set the control variates aside."""
        self._new = {
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
        new = {reply.client: self._new[reply.client] for reply in replies}
        zeros = {name: np.zeros_like(each) for name, each in self._control.items()}
        changes = [
            {name: each[name] - old[name] for name in zeros}
            for each, old in ((each, self._of.get(client, zeros)) for client, each in new.items())
        ]
        change, share = aggregate(changes, [1.0] * len(changes)), np.float32(len(changes) / now.clients)
        self._control = {name: each + share * change[name] for name, each in self._control.items()}
        self._of = self._of | new
        return super().merge(now, replies)

    def state(self) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
        """The control variates: c, and each client's with its number before the names."""
        own = {f"{client}.{name}": array for client, each in self._of.items() for name, array in each.items()}
        return {**{f"{PREFIX}{name}": array for name, array in self._control.items()}, **own}, {
            "clients": self._clients
        }

    def restore(self, arrays: Mapping[str, NumpyArray], record: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self._control, self._of, self._clients = {}, {}, record.get("clients", 0)
        for key, array in arrays.items():
            owner, _, name = key.partition(".")
            (self._control if f"{owner}." == PREFIX else self._of.setdefault(int(owner), {}))[name] = array
