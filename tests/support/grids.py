"""Grids that record what passes through them."""

from collections.abc import Callable, Iterable

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from experiments.running.inline import InlineGrid
from fedkace_flwr import client_app
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.rounds.exchange import client_of

WEIGHTS = {"w": np.arange(4, dtype=np.float32)}


SOON = 0.3


LONG = 30.0


def echo(fail: Callable[[int], bool] = lambda client: False) -> ClientApp:
    """A client that names itself, sends the weights back and raises where told."""
    app = ClientApp()

    @app.query()
    def identify(message: Message, context: Context) -> Message:
        return client_app.identify(message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = client_of(message)
        if fail(client):
            raise ValueError(f"client {client} fails")
        weights = keys.unpack(message.content.array_records[keys.ARRAYS])
        metrics = {"node": int(context.node_config[keys.PARTITION]), "client": client}
        return Message(keys.reply_content(weights, 1, metrics), reply_to=message)

    return app


class RecordingGrid(InlineGrid):
    """An inline grid that keeps what was sent and what was asked for."""

    def __init__(self, app: ClientApp, nodes: int) -> None:
        super().__init__(app, nodes, {}, run_id=11)
        self.sent: list[Message] = []
        self.pulls = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.sent += messages
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.pulls += 1
        return super().pull_messages(message_ids)
