"""Faulty grids, and clients that echo."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp

from fedkace_flwr import queries
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.messaging import wire
from fedkace_flwr.rounds import exchange as exchanges
from fedkace_flwr.rounds.exchange import by_client, client_of

WEIGHTS = {"w": np.arange(4, dtype=np.float32)}
SHORT, LONG = 0.25, 30.0
"""Deadlines in seconds of the fake clock; a quarter is exact in binary."""


def echo(fail: Callable[[int], bool] = lambda client: False) -> ClientApp:
    """A client that states its number, returns the weights, and raises an error where told to."""
    app = ClientApp()

    @app.query()
    def identify(message: Message, context: Context) -> Message:
        return queries.identity(message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = client_of(message)
        if fail(client):
            raise ValueError(f"client {client} fails")
        weights = wire.unpack(message.content.array_records[wire.ARRAYS])
        metrics = {"node": int(context.node_config[wire.PARTITION]), "client": client}
        return Message(wire.reply_content(weights, 1, metrics), reply_to=message)

    return app


def questions(grid: InlineGrid, clients: Iterable[int], nodes: int) -> dict[int, Message]:
    """Return a training message for each client."""
    arrays = wire.array_record(WEIGHTS)
    return by_client(
        grid.create_message(wire.instruction(arrays, {}, client, 1), MessageType.TRAIN, 2 + client % nodes, "1")
        for client in clients
    )


def client_said(reply: Message) -> Any:
    return reply.content.metric_records[wire.METRICS]["client"]


class RecordingGrid(InlineGrid):
    """Records the messages sent, and counts the pulls."""

    def __init__(self, app: ClientApp, nodes: int) -> None:
        super().__init__(app, nodes, {}, run_id=11)
        self.sent: list[Message] = []
        self.pulls = 0

    def of(self, kind: str) -> list[Message]:
        return [message for message in self.sent if message.metadata.message_type == kind]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.sent += messages
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.pulls += 1
        return super().pull_messages(message_ids)


class SilentGrid(RecordingGrid):
    """Withholds the replies of some clients until a time on the server's clock, or for ever."""

    def __init__(self, app: ClientApp, nodes: int, silent: set[int], until: float = float("inf")) -> None:
        super().__init__(app, nodes)
        self.silent, self.until = silent, until

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        held = {m.metadata.message_id for m in self.sent if client_of(m) in self.silent}
        over = exchanges.time.monotonic() >= self.until  # type: ignore[attr-defined]
        return super().pull_messages([number for number in message_ids if number not in held or over])


class LossyGrid(RecordingGrid):
    """Loses or delays replies to training messages, selected by their place in the order of sending."""

    def __init__(self, app: ClientApp, lost: Iterable[int] = (), late: dict[int, float] | None = None) -> None:
        super().__init__(app, 1)
        self.lost, self.late = set(lost), late or {}

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        place = {message.metadata.message_id: index for index, message in enumerate(self.of(MessageType.TRAIN))}
        now = exchanges.time.monotonic()  # type: ignore[attr-defined]
        wanted = [
            number
            for number in message_ids
            if place.get(number) not in self.lost and now >= self.late.get(place.get(number, -1), 0.0)
        ]
        return super().pull_messages(wanted)


class ChangingGrid(RecordingGrid):
    """Nodes come and go: each call returns the next set, and the last set is repeated."""

    def __init__(self, app: ClientApp, nodes: int, *present: set[int]) -> None:
        super().__init__(app, nodes)
        self.present = list(present)

    def get_node_ids(self) -> Iterable[int]:
        return self.present.pop(0) if len(self.present) > 1 else self.present[0]


class FlakyGrid(RecordingGrid):
    """Raises an error the given number of times in each of its calls (``look``, ``push``, ``pull``)."""

    def __init__(self, app: ClientApp, nodes: int, error: Exception, **times: int) -> None:
        super().__init__(app, nodes)
        self.error, self.times = error, times

    def _fail(self, call: str) -> None:
        if self.times.get(call, 0) > 0:
            self.times[call] -= 1
            raise self.error

    def get_node_ids(self) -> Iterable[int]:
        self._fail("look")
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._fail("push")
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._fail("pull")
        return super().pull_messages(message_ids)


class MeddlingGrid(RecordingGrid):
    """Delivers the replies that ``meddle(grid, numbers, pull)`` returns; ``pull`` is the grid's own method."""

    def __init__(self, app: ClientApp, nodes: int, meddle: Callable[..., Iterable[Message]]) -> None:
        super().__init__(app, nodes)
        self._meddle = meddle

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._meddle(self, list(message_ids), super().pull_messages)


@contextmanager
def heard(name: str) -> Iterator[list[tuple[int, str]]]:
    """Collect the level and text of a logger's messages, wherever the log goes."""
    lines: list[tuple[int, str]] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelno, record.getMessage()))

    ear, logger = Ear(), logging.getLogger(name)
    logger.addHandler(ear)
    try:
        yield lines
    finally:
        logger.removeHandler(ear)
