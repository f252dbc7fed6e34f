"""Clients that lie or break, and runs that show whether they change anything.

In a reference run the hostile clients' replies never arrive. The honest clients' replies are real, and are stored by
the message that they answer. A hostile run then takes its replies from this store. Every message to an honest client
must therefore equal one of the reference run, bit for bit; otherwise the hostile clients have changed something.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Array, Error, Message, MessageType, RecordDict

from fedkace_flwr import client_app, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.messaging import wire
from support.common import SMALL, rounds_of
from support.systems.runs import folder_of, last

CLIENTS, HOSTILE = 5, {1, 3}
ROUNDS = 3

Key = tuple[str, int, bytes]
Damage = Callable[[RecordDict], RecordDict | Error | None]


def key_of(message: Message) -> Key:
    """Return a message's type, recipient and digest."""
    content, told = hashlib.sha256(), message.content.config_records[wire.CONFIG]
    for name, record in sorted(message.content.items()):
        content.update(name.encode())
        for part, value in sorted(record.items()):
            content.update(part.encode() + (value.data if isinstance(value, Array) else repr(value).encode()))
    return message.metadata.message_type, int(told[wire.CLIENT]), content.digest()  # type: ignore[arg-type]


def is_inquiry(message: Message) -> bool:
    """Return whether the server only asks a SuperNode for its identity."""
    return message.metadata.message_type == MessageType.QUERY


@dataclass
class Reference:
    """A run without the hostile clients' replies to some kinds of messages, and all other replies."""

    config: Config
    kinds: frozenset[str]
    answers: dict[Key, RecordDict | Error] = field(default_factory=dict)

    def is_hostile(self, message: Message) -> bool:
        kind, client, _ = key_of(message)
        return client in HOSTILE and (not self.kinds or kind in self.kinds)


class RecordingWire(InlineGrid):
    """Records all replies and drops those of the hostile clients."""

    def __init__(self, reference: Reference) -> None:
        super().__init__(client_app.app, CLIENTS, reference.config.flat(), run_id=1)
        self._reference = reference

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            (number,) = super().push_messages([message])
            if not is_inquiry(message):
                reply = self._replies[number]
                kept = reply.error if reply.has_error() else copy.deepcopy(reply.content)
                self._reference.answers[key_of(message)] = kept
                if self._reference.is_hostile(message):
                    del self._replies[number]
                    number = ""  # as if the message had not been accepted
            numbers.append(number)
        return numbers


class HostileWire(InlineGrid):
    """Replies as in the reference run, with damage to the hostile clients' replies."""

    def __init__(self, reference: Reference, config: Config, damage: Damage) -> None:
        super().__init__(client_app.app, CLIENTS, config.flat(), run_id=1)
        self._reference, self._damage = reference, damage
        self.unheard_of: list[tuple[str, int]] = []
        self.damaged = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return ["" if self._push(message) is None else message.metadata.message_id for message in messages]

    def _push(self, message: Message) -> Message | None:
        (number,) = super().push_messages([message]) if is_inquiry(message) else [None]
        if number is not None:
            return self._replies[number]
        kind, client, _ = key_of(message)
        answer = copy.deepcopy(self._reference.answers.get(key_of(message)))
        if answer is None:
            self.unheard_of.append((kind, client))
            return None
        if self._reference.is_hostile(message) and isinstance(answer, RecordDict):
            self.damaged += 1
            answer = self._damage(answer)
            if answer is None:
                return None
        message.metadata.__dict__["_message_id"] = number = f"{id(message)}-{len(self._replies)}-{kind}"
        self._replies[number] = Message(answer, reply_to=message)
        return self._replies[number]


def configured(folder: Path, name: str, method: str, **changes: Any) -> Config:
    named = {key.replace("_", "-"): value for key, value in changes.items()}
    shape = {"defence": "on", "clients": CLIENTS, "rounds": ROUNDS, "capacity": 12, "tfcl-server-epochs": 2}
    return Config.parse({**SMALL, **shape, "method": method, "results-dir": str(folder), "run-name": name, **named})


def columns_of_the_honest(config: Config) -> list[dict[str, Any]]:
    """Return a run's record without the hostile clients and the bytes."""
    records = rounds_of(folder_of(config))
    for record in records:
        del record["bytes"], record["failures"]
        for name, value in record.items():
            if isinstance(value, list) and len(value) == CLIENTS:
                record[name] = [value[client] for client in range(CLIENTS) if client not in HOSTILE]
    return records


def assert_nothing_changes(reference: Reference, folder: Path, damage: Damage) -> list[dict[str, Any]]:
    """Run with the damage, and return the failures of all rounds."""
    config = configured(folder, "hostile", reference.config.method)
    grid = HostileWire(reference, config, damage)
    server_app.run(grid, config, run_id=1)
    assert grid.damaged >= len(HOSTILE) * ROUNDS if not reference.kinds else grid.damaged > 0
    assert grid.unheard_of == []
    mine, other = last(config), last(reference.config)
    assert mine.round == other.round == ROUNDS
    for one, two in ((mine.weights, other.weights), (mine.arrays, other.arrays)):
        assert list(one) == list(two)
        assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    assert columns_of_the_honest(config) == columns_of_the_honest(reference.config)
    return [failure for record in rounds_of(folder_of(config)) for failure in record["failures"]]
