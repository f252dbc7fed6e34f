"""One exchange of messages with clients over a grid."""

from collections.abc import Callable, Iterable

import pytest
from flwr.app import Message, RecordDict
from support.common import FakeTime
from support.doubles.grids import (
    LONG,
    SHORT,
    WEIGHTS,
    MeddlingGrid,
    RecordingGrid,
    SilentGrid,
    client_said,
    echo,
    questions,
)

from fedkace_flwr.messaging import wire
from fedkace_flwr.rounds.exchange import exchange


def test_each_client_gets_its_message_and_replies_come_in_the_order_of_clients() -> None:
    grid = MeddlingGrid(echo(), 4, lambda grid, numbers, pull: sorted(pull(numbers), key=client_said, reverse=True))
    found = exchange(grid, questions(grid, [3, 1, 0, 2], 4), LONG)
    assert list(found.replies) == [0, 1, 2, 3]
    assert [client_said(reply) for reply in found.replies.values()] == [0, 1, 2, 3]
    assert found.silent == []


def test_replies_that_trickle_in_are_all_collected() -> None:
    grid = MeddlingGrid(echo(), 3, lambda grid, numbers, pull: pull(numbers[:1]))
    found = exchange(grid, questions(grid, range(3), 3), LONG)
    assert list(found.replies) == [0, 1, 2]
    assert grid.pulls == 3


def test_a_silent_client_is_left_out_after_the_deadline_and_not_before(clock: FakeTime) -> None:
    grid, begun = SilentGrid(echo(), 3, silent={1}), clock.now
    found = exchange(grid, questions(grid, range(3), 3), SHORT)
    assert list(found.replies) == [0, 2]
    assert found.silent == [1]
    assert clock.now - begun == pytest.approx(SHORT)


def test_a_reply_shortly_before_the_deadline_counts(clock: FakeTime) -> None:
    """Even where it falls into the last pause between two looks."""
    grid = SilentGrid(echo(), 2, silent={1}, until=clock.now + 0.8 * SHORT)
    found = exchange(grid, questions(grid, range(2), 2), SHORT)
    assert found.silent == []
    assert list(found.replies) == [0, 1]


def test_a_reply_of_an_earlier_exchange_is_not_taken_for_one_of_this(clock: FakeTime) -> None:
    grid = SilentGrid(echo(), 2, silent={1})
    first = questions(grid, range(2), 2)
    assert exchange(grid, first, 0.05).silent == [1]
    grid.silent = set()
    second = questions(grid, range(2), 2)
    found = exchange(grid, second, LONG)
    asked = {client: message.metadata.message_id for client, message in second.items()}
    assert {client: reply.metadata.reply_to_message_id for client, reply in found.replies.items()} == asked


def test_a_clients_first_reply_counts_and_others_are_ignored() -> None:
    given: list[Message] = []

    def repeat(grid: RecordingGrid, numbers: list[str], pull: Callable[..., Iterable[Message]]) -> list[Message]:
        """Every reply twice at once, and all earlier ones with each pull."""
        fresh = list(pull(numbers[:1]))
        asked = {message.metadata.message_id: message for message in grid.sent}
        twins = [
            Message(wire.reply_content(None, 1, {"client": 99}), reply_to=asked[m.metadata.reply_to_message_id])
            for m in fresh
        ]
        earlier = list(given)
        given.extend(fresh)
        return [*earlier, *fresh, *twins]

    grid = MeddlingGrid(echo(), 3, repeat)
    found = exchange(grid, questions(grid, range(3), 3), LONG)
    assert [client_said(reply) for reply in found.replies.values()] == [0, 1, 2]
    single = RecordingGrid(echo(), 3)
    assert found.up.total() == exchange(single, questions(single, range(3), 3), LONG).up.total()


def test_a_message_that_the_grid_does_not_take_is_refused_at_once_and_nobody_is_silent(clock: FakeTime) -> None:
    class RefusingGrid(RecordingGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            taken = list(super().push_messages(messages))
            return ["", *taken[1:]]

    grid = RefusingGrid(echo(), 3)
    found = exchange(grid, questions(grid, range(3), 3), LONG)
    assert found.refused == [0] and found.silent == []
    assert list(found.replies) == [1, 2]
    assert not clock.slept


def test_an_error_is_a_reply_and_brings_no_bytes() -> None:
    grid = RecordingGrid(echo(fail=lambda client: client == 1), 3)
    found = exchange(grid, questions(grid, range(3), 3), LONG)
    assert list(found.replies) == [0, 1, 2]
    assert [reply.has_error() for reply in found.replies.values()] == [False, True, False]
    assert found.up.total() == sum(wire.size_in_bytes(found.replies[client].content) for client in (0, 2))


def test_bytes_of_both_ways_are_counted() -> None:
    grid = RecordingGrid(echo(), 3)
    sent = questions(grid, range(3), 3)
    sizes = [wire.size_in_bytes(message.content) for message in sent.values()]
    found = exchange(grid, sent, LONG)
    assert found.down.total() == sum(sizes)
    assert found.up.total() == sum(wire.size_in_bytes(reply.content) for reply in found.replies.values())
    assert min(found.down.total(), found.up.total()) > 3 * WEIGHTS["w"].nbytes


def test_a_silent_clients_message_counts_as_sent_and_not_as_received(clock: FakeTime) -> None:
    grid = SilentGrid(echo(), 2, silent={0})
    sent = questions(grid, range(2), 2)
    found = exchange(grid, sent, 0.05)
    assert found.down.total() == sum(wire.size_in_bytes(message.content) for message in sent.values())
    assert found.up.total() == wire.size_in_bytes(found.replies[1].content)


def test_a_grid_that_drops_content_on_sending_does_not_disturb_the_count() -> None:
    """As Flower's own grid does to save memory."""

    class DroppingGrid(RecordingGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            numbers = list(super().push_messages(messages))
            for message in messages:
                message.content = RecordDict()
            return numbers

    grid, plain = DroppingGrid(echo(), 2), RecordingGrid(echo(), 2)
    found = exchange(grid, questions(grid, range(2), 2), LONG)
    assert found.down.total() == exchange(plain, questions(plain, range(2), 2), LONG).down.total() > 0
    assert list(found.replies) == [0, 1]


def test_nobody_to_ask_is_an_empty_exchange() -> None:
    found = exchange(RecordingGrid(echo(), 1), {}, LONG)
    assert (found.replies, found.silent, found.down.total(), found.up.total()) == ({}, [], 0, 0)
