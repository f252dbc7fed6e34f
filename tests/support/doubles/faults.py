"""Misbehaving clients on the inline grid."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, Error, Message, MessageType, RecordDict

from fedkace_flwr import client_app
from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.messaging import wire

Damage = Callable[[str, int, int, Message], Message | None]
"""Takes message type, round, client and reply; returns the reply to deliver, or None to drop it."""


def honest(kind: str, number: int, client: int, reply: Message) -> Message:
    return reply


@dataclass(frozen=True)
class Crossing:
    """A message to a client, and its reply; None if it never arrived.

    ``labels`` are those that the client holds, by set of samples, on a grid that notes them.
    """

    kind: str
    round: int
    client: int
    down: RecordDict
    reply: Message | None
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)

    def arrays(self) -> Iterator[np.ndarray]:
        for content in (self.down, self.up or RecordDict()):
            for record in content.array_records.values():
                yield from wire.unpack(record).values()

    def numbers(self) -> Iterator[tuple[str, Any]]:
        for record in (self.up or RecordDict()).metric_records.values():
            yield from record.items()

    @property
    def up(self) -> RecordDict | None:
        return self.reply.content if self.reply is not None and self.reply.has_content() else None

    @property
    def place(self) -> tuple[str, int, int]:
        return self.kind, self.round, self.client


class FaultyGrid(InlineGrid):
    """Records all messages of rounds, and passes their replies through ``damage``.

    A message whose reply is lost counts as not received, so that the server does not wait for it.
    """

    def __init__(self, config: Config, damage: Damage = honest) -> None:
        super().__init__(client_app.app, config.stream.clients, config.flat(), run_id=1)
        self._damage = damage
        self.crossings: list[Crossing] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            (number,) = super().push_messages([message])
            told = message.content.config_records[wire.CONFIG]
            if wire.ROUND in told:
                place = message.metadata.message_type, int(told[wire.ROUND]), int(told[wire.CLIENT])  # type: ignore[arg-type]
                reply = self._damage(*place, self._replies.pop(number))
                self.crossings.append(Crossing(*place, message.content, reply, self.labels(*place)))
                if reply is None:
                    number = ""
                else:
                    self._replies[number] = reply
            numbers.append(number)
        return numbers

    def labels(self, kind: str, number: int, client: int) -> Mapping[str, np.ndarray]:
        """Return the labels that a client holds after a message."""
        return {}

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """Return type, round and client of all messages in the order of sending."""
        return [crossing.place for crossing in self.crossings]

    def of(self, kind: str, number: int) -> dict[int, Crossing]:
        """Return a round's messages of one type by client."""
        return {crossing.client: crossing for crossing in self.crossings if crossing.place[:2] == (kind, number)}

    def model_sent(self, kind: str, number: int, client: int) -> dict[str, np.ndarray]:
        return wire.unpack(self.of(kind, number)[client].down.array_records[wire.ARRAYS])

    def model_returned(self, number: int, client: int) -> dict[str, np.ndarray]:
        content = self.of(MessageType.TRAIN, number)[client].up
        assert content is not None
        return wire.unpack(content.array_records[wire.ARRAYS])


def only(
    client: int, round_number: int, act: Callable[[Message], Message | None], kind: str = MessageType.TRAIN
) -> Damage:
    """Damage one reply."""
    place = kind, round_number, client
    return lambda *told: act(told[-1]) if told[:-1] == place else told[-1]


def on_training(act: Callable[[int, int, Message], Message | None]) -> Damage:
    """Damage training replies, depending on round and client."""
    return lambda kind, *told: act(*told) if kind == MessageType.TRAIN else told[-1]


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], Message]:
    """Change the array with this name."""

    def act(reply: Message) -> Message:
        record = reply.content.array_records[wire.ARRAYS]
        record[name] = Array(change(record[name].numpy()))
        return reply

    return act


def with_array(name: str, array: np.ndarray) -> Callable[[Message], Message]:
    """Add or replace the array with this name."""

    def act(reply: Message) -> Message:
        reply.content.array_records[wire.ARRAYS][name] = Array(array)
        return reply

    return act


def failed(reply: Message) -> Message:
    """Replace the reply by an error."""
    reply.__dict__["_content"], reply.__dict__["_error"] = None, Error(2, "Traceback\nOSError: disk on fire")
    return reply


def lost(reply: Message) -> None:
    """Drop the reply."""
