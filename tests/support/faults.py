"""Clients that misbehave, over the inline grid."""

from collections.abc import Callable, Iterable

import numpy as np
from flwr.app import Array, Error, Message, MessageType

from experiments.running.inline import InlineGrid
from fedkace_flwr import client_app
from fedkace_flwr.config import Config
from fedkace_flwr.messaging import records as keys


class FaultyGrid(InlineGrid):
    """An inline grid whose training replies pass through ``damage(round, client, reply)``; None loses the reply."""

    def __init__(self, config: Config, damage: Callable[[int, int, Message], Message | None]) -> None:
        super().__init__(client_app.app, config.stream.clients, config.flat(), run_id=1)
        self._damage = damage
        self.replies: dict[tuple[int, int], keys.Reply] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            (number,) = super().push_messages([message])
            numbers.append(number)
            if message.metadata.message_type == MessageType.TRAIN:
                told = message.content.config_records[keys.CONFIG]
                reply = self._damage(int(told[keys.ROUND]), int(told[keys.CLIENT]), self._replies.pop(number))
                if reply is not None:
                    self._replies[number] = reply
        return numbers


def only(client: int, round_number: int, act: Callable[[Message], Message | None]):  # type: ignore[no-untyped-def]
    return lambda number, who, reply: act(reply) if (number, who) == (round_number, client) else reply


def with_array(name: str, array: np.ndarray) -> Callable[[Message], Message]:
    def act(reply: Message) -> Message:
        reply.content.array_records[keys.ARRAYS][name] = Array(array)
        return reply

    return act


def failed(reply: Message) -> Message:
    reply.__dict__["_content"], reply.__dict__["_error"] = None, Error(2, "Traceback\nOSError: disk on fire")
    return reply
