"""Messages to clients and back over a grid, and which SuperNode hosts which client."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid as InMemory
from support.common import FakeTime
from support.grids import LONG, SOON, WEIGHTS, RecordingGrid, echo

from experiments.running.inline import InlineGrid
from fedkace_flwr import client_app
from fedkace_flwr.errors import RunError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.rounds import transport
from fedkace_flwr.rounds.exchange import by_client, client_of, exchange
from fedkace_flwr.rounds.roster import Roster


class SilentGrid(RecordingGrid):
    """Withholds the replies of some clients until a moment, if at all."""

    def __init__(self, app: ClientApp, nodes: int, silent: set[int], until: float = float("inf")) -> None:
        super().__init__(app, nodes)
        self.silent, self.until = silent, time.monotonic() + until

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        held = {m.metadata.message_id for m in self.sent if client_of(m) in self.silent}
        return super().pull_messages([n for n in message_ids if n not in held or time.monotonic() >= self.until])


def questions(grid: InlineGrid, clients: Iterable[int], nodes: int) -> dict[int, Message]:
    arrays = keys.array_record(WEIGHTS)
    return by_client(
        grid.create_message(keys.instruction(arrays, {}, client, 1), MessageType.TRAIN, 2 + client % nodes, "1")
        for client in clients
    )


def client_said(reply: Message) -> Any:
    return reply.content.metric_records[keys.METRICS]["client"]


@contextmanager
def heard(name: str) -> Iterator[list[tuple[int, str]]]:
    """Level and text of what a logger says, wherever the log goes."""
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


# One exchange


def test_each_client_gets_its_message_and_replies_come_in_the_order_of_clients() -> None:
    class BackwardsGrid(RecordingGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = super().pull_messages(message_ids)
            return sorted(replies, key=client_said, reverse=True)  # type: ignore[arg-type]

    grid = BackwardsGrid(echo(), 4)
    found = exchange(grid, questions(grid, [3, 1, 0, 2], 4), LONG)
    assert list(found.replies) == [0, 1, 2, 3]
    assert [client_said(reply) for reply in found.replies.values()] == [0, 1, 2, 3]
    assert found.silent == []
    assert found.seconds < LONG / 2


def test_replies_that_trickle_in_are_all_collected() -> None:
    class OneAtATime(RecordingGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return super().pull_messages(list(message_ids)[:1])

    grid = OneAtATime(echo(), 3)
    found = exchange(grid, questions(grid, range(3), 3), LONG)
    assert list(found.replies) == [0, 1, 2]
    assert grid.pulls == 3


def test_a_silent_client_is_left_out_after_the_deadline_and_not_before() -> None:
    grid = SilentGrid(echo(), 3, silent={1})
    found = exchange(grid, questions(grid, range(3), 3), SOON)
    assert list(found.replies) == [0, 2]
    assert found.silent == [1]
    assert SOON <= found.seconds < SOON + 2


def test_a_reply_shortly_before_the_deadline_counts() -> None:
    """Even where it falls into the last pause between two looks."""
    grid = SilentGrid(echo(), 2, silent={1}, until=0.8 * SOON)
    found = exchange(grid, questions(grid, range(2), 2), SOON)
    assert found.silent == []
    assert list(found.replies) == [0, 1]


def test_a_reply_of_an_earlier_exchange_is_not_taken_for_one_of_this() -> None:
    grid = SilentGrid(echo(), 2, silent={1})
    first = questions(grid, range(2), 2)
    assert exchange(grid, first, 0.05).silent == [1]
    grid.silent = set()
    second = questions(grid, range(2), 2)
    found = exchange(grid, second, LONG)
    asked = {client: message.metadata.message_id for client, message in second.items()}
    assert {client: reply.metadata.reply_to_message_id for client, reply in found.replies.items()} == asked


def test_a_clients_first_reply_counts_and_others_are_ignored() -> None:
    class RepeatingGrid(RecordingGrid):
        """Gives every reply twice at once, and all earlier ones with each pull."""

        def __init__(self, app: ClientApp, nodes: int) -> None:
            super().__init__(app, nodes)
            self.given: list[Message] = []

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            fresh = list(super().pull_messages(list(message_ids)[:1]))
            twins = [Message(keys.reply_content(None, 1, {"client": 99}), reply_to=self._question(m)) for m in fresh]
            self.given += fresh
            return [*self.given[: -len(fresh) or None], *fresh, *twins]

        def _question(self, reply: Message) -> Message:
            (question,) = (m for m in self.sent if m.metadata.message_id == reply.metadata.reply_to_message_id)
            return question

    grid = RepeatingGrid(echo(), 3)
    found = exchange(grid, questions(grid, range(3), 3), LONG)
    assert [client_said(reply) for reply in found.replies.values()] == [0, 1, 2]
    single = RecordingGrid(echo(), 3)
    assert found.bytes_up == exchange(single, questions(single, range(3), 3), LONG).bytes_up


def test_a_message_that_the_grid_does_not_take_is_silent_at_once() -> None:
    class RefusingGrid(RecordingGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            taken = list(super().push_messages(messages))
            return ["", *taken[1:]]

    grid = RefusingGrid(echo(), 3)
    found = exchange(grid, questions(grid, range(3), 3), LONG)
    assert found.silent == [0]
    assert list(found.replies) == [1, 2]
    assert found.seconds < LONG / 2


def test_an_error_is_a_reply_and_brings_no_bytes() -> None:
    grid = RecordingGrid(echo(fail=lambda client: client == 1), 3)
    found = exchange(grid, questions(grid, range(3), 3), LONG)
    assert list(found.replies) == [0, 1, 2]
    assert [reply.has_error() for reply in found.replies.values()] == [False, True, False]
    assert found.bytes_up == sum(keys.size_in_bytes(found.replies[client].content) for client in (0, 2))


def test_bytes_of_both_ways_are_counted() -> None:
    grid = RecordingGrid(echo(), 3)
    sent = questions(grid, range(3), 3)
    sizes = [keys.size_in_bytes(message.content) for message in sent.values()]
    found = exchange(grid, sent, LONG)
    assert found.bytes_down == sum(sizes)
    assert found.bytes_up == sum(keys.size_in_bytes(reply.content) for reply in found.replies.values())
    assert min(found.bytes_down, found.bytes_up) > 3 * WEIGHTS["w"].nbytes


def test_a_silent_clients_message_counts_as_sent_and_not_as_received() -> None:
    grid = SilentGrid(echo(), 2, silent={0})
    sent = questions(grid, range(2), 2)
    found = exchange(grid, sent, 0.05)
    assert found.bytes_down == sum(keys.size_in_bytes(message.content) for message in sent.values())
    assert found.bytes_up == keys.size_in_bytes(found.replies[1].content)


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
    assert found.bytes_down == exchange(plain, questions(plain, range(2), 2), LONG).bytes_down > 0
    assert list(found.replies) == [0, 1]


def test_nobody_to_ask_is_an_empty_exchange() -> None:
    found = exchange(RecordingGrid(echo(), 1), {}, LONG)
    assert (found.replies, found.silent, found.bytes_down, found.bytes_up) == ({}, [], 0, 0)


# Which node hosts which client


class ChangingGrid(RecordingGrid):
    """Nodes come and go: each call names the next set, the last one for ever."""

    def __init__(self, app: ClientApp, nodes: int, *present: set[int]) -> None:
        super().__init__(app, nodes)
        self.present = list(present)

    def get_node_ids(self) -> Iterable[int]:
        return self.present.pop(0) if len(self.present) > 1 else self.present[0]


def node_of(partition: int) -> int:
    return partition + 2


@pytest.mark.parametrize(("clients", "nodes"), [(1, 1), (3, 3), (7, 3), (5, 1), (2, 4)])
def test_client_k_lives_at_partition_k_mod_n(clients: int, nodes: int) -> None:
    hosts = Roster(clients, LONG).wait(RecordingGrid(echo(), nodes))
    assert hosts == {client: node_of(client % nodes) for client in range(clients)}


def test_a_message_to_a_client_arrives_where_it_lives() -> None:
    grid = RecordingGrid(echo(), 3)
    hosts = Roster(7, LONG).wait(grid)
    content = {client: keys.instruction(keys.array_record(WEIGHTS), {}, client, 1) for client in hosts}
    sent = {k: grid.create_message(content[k], MessageType.TRAIN, node, "1") for k, node in hosts.items()}
    found = exchange(grid, sent, LONG)
    places = {k: reply.content.metric_records[keys.METRICS]["node"] for k, reply in found.replies.items()}
    assert places == {client: client % 3 for client in range(7)}


def test_a_node_is_asked_once_and_remembered() -> None:
    grid, roster = RecordingGrid(echo(), 3), Roster(3, LONG)
    first = roster.wait(grid)
    assert [roster.nodes(grid) for _ in range(3)] == [first] * 3
    assert [message.metadata.dst_node_id for message in grid.sent] == [2, 3, 4]
    assert {message.metadata.message_type for message in grid.sent} == {MessageType.QUERY}


def test_nodes_that_join_late_are_waited_for() -> None:
    grid = ChangingGrid(echo(), 3, set(), {2}, {2, 3, 4})
    assert Roster(3, LONG).wait(grid) == {0: 2, 1: 3, 2: 4}


def test_a_node_that_left_takes_its_clients_with_it_and_brings_them_back() -> None:
    grid = ChangingGrid(echo(), 3, {2, 3, 4}, {2, 4}, {2, 3, 4})
    roster = Roster(5, LONG)
    assert roster.nodes(grid) == {0: 2, 1: 3, 2: 4, 3: 2, 4: 3}
    assert roster.nodes(grid) == {0: 2, 2: 4, 3: 2}
    assert roster.nodes(grid) == {0: 2, 1: 3, 2: 4, 3: 2, 4: 3}


def test_a_node_that_comes_back_under_another_number_hosts_its_partition_again() -> None:
    grid = ChangingGrid(echo(), 3, {2, 3}, {2, 4})
    for context, partition in zip(grid._contexts.values(), (0, 1, 1), strict=True):
        context.node_config |= {keys.PARTITION: partition, keys.PARTITIONS: 2}
    roster = Roster(4, LONG)
    assert roster.nodes(grid) == {0: 2, 1: 3, 2: 2, 3: 3}
    assert roster.nodes(grid) == {0: 2, 1: 4, 2: 2, 3: 4}


def test_a_run_starts_without_the_nodes_that_do_not_join_and_says_so() -> None:
    grid = ChangingGrid(echo(), 3, {2, 4})
    begun = time.monotonic()
    with heard("fedkace_flwr.rounds.roster") as lines:
        assert Roster(3, SOON).wait(grid) == {0: 2, 2: 4}
    assert SOON <= time.monotonic() - begun < SOON + 3
    assert (logging.WARNING, "2 of 3 clients can be reached; starting without the others") in lines


def test_without_any_node_the_run_ends_within_the_join_deadline() -> None:
    begun = time.monotonic()
    with pytest.raises(RunError) as caught:
        Roster(3, SOON).wait(RecordingGrid(echo(), 0))
    assert SOON <= time.monotonic() - begun < SOON + 3
    assert str(caught.value) == f"no SuperNode joined within join-deadline = {SOON:g} seconds"


def test_a_node_that_never_answers_is_like_one_that_never_joined() -> None:
    class MuteGrid(RecordingGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return []

    with pytest.raises(RunError, match=r"join-deadline = 0\.3"):
        Roster(2, SOON).wait(MuteGrid(echo(), 2))


def spoilt(node: int, **config: object) -> RecordingGrid:
    """A grid of two nodes, one of which is configured like this; None takes a key away."""
    grid = RecordingGrid(client_app.app, 2)
    for name, value in config.items():
        key = name.replace("_", "-")
        if value is None:
            del grid._contexts[node].node_config[key]
        else:
            grid._contexts[node].node_config[key] = value
    return grid


SPOILT: list[tuple[dict[str, object], str]] = [
    ({"partition_id": None}, "partition-id = None"),
    ({"num_partitions": None}, "num-partitions = None"),
    ({"partition_id": "first"}, "'first'"),
    ({"partition_id": 2}, "partition-id = 2"),
    ({"partition_id": -1}, "partition-id = -1"),
    ({"num_partitions": 0}, "num-partitions = 0"),
]


@pytest.mark.parametrize(("config", "words"), SPOILT)
def test_a_node_that_cannot_name_its_partition_is_named_and_the_others_go_on(
    config: dict[str, object], words: str
) -> None:
    with heard("fedkace_flwr.rounds.roster") as lines:
        assert Roster(2, SOON).wait(spoilt(3, **config)) == {0: 2}
    (named,) = [text for level, text in lines if level == logging.WARNING and text.startswith("SuperNode 3")]
    assert words in named and "--node-config 'partition-id=K num-partitions=N'" in named
    assert len(named.splitlines()) == 1


def test_where_no_node_can_name_its_partition_the_run_ends_with_what_to_do_in_one_line() -> None:
    grid = RecordingGrid(client_app.app, 1)
    del grid._contexts[2].node_config[keys.PARTITION]
    with pytest.raises(RunError) as caught:
        Roster(1, SOON).wait(grid)
    text = str(caught.value)
    assert "partition-id = None" in text and "--node-config 'partition-id=K num-partitions=N'" in text
    assert f"join-deadline = {SOON:g}" in text and len(text.splitlines()) == 1


def test_a_node_that_answers_again_after_an_error_hosts_its_clients(clock: FakeTime) -> None:
    grid, roster = spoilt(3, partition_id="first"), Roster(2, LONG)
    assert roster.nodes(grid) == {0: 2}
    grid._contexts[3].node_config[keys.PARTITION] = 1
    assert roster.nodes(grid) == {0: 2}, "it is not asked again at once"
    clock.now += 61
    assert roster.nodes(grid) == {0: 2, 1: 3}


def test_an_answer_without_sense_is_like_an_error(clock: FakeTime) -> None:
    app, answers = ClientApp(), [RecordDict(), RecordDict({keys.CONFIG: ConfigRecord({keys.PARTITION: "0"})})]

    @app.query()
    def identify(message: Message, context: Context) -> Message:
        node = int(context.node_config[keys.PARTITION])
        return Message(answers[node], reply_to=message) if node < 2 else client_app.identify(message, context)

    grid = RecordingGrid(app, 3)
    with heard("fedkace_flwr.rounds.roster") as lines:
        assert Roster(3, LONG).nodes(grid) == {2: 4}
    assert [text for _, text in lines if "SuperNode 2" in text] and [text for _, text in lines if "SuperNode 3" in text]


def test_a_mute_node_holds_a_phase_up_once_and_for_a_moment(clock: FakeTime) -> None:
    """With hours to answer a training message, it must not take hours to start one."""
    grid = SilentGrid(client_app.app, 3, silent={3})
    roster = Roster(3, 300.0)
    begun = clock.now
    assert roster.nodes(grid) == {0: 2, 2: 4}
    first = clock.now - begun
    assert 10 <= first <= 20
    assert [roster.nodes(grid) for _ in range(5)] == [{0: 2, 2: 4}] * 5
    assert clock.now - begun == first
    assert len([message for message in grid.sent if client_of(message) == 3]) == 1
    grid.silent = set()
    assert roster.nodes(grid) == {0: 2, 1: 3, 2: 4}, "a late answer counts from the next phase on"


def test_a_node_whose_question_has_expired_is_asked_once_more(clock: FakeTime) -> None:
    grid, roster = SilentGrid(client_app.app, 2, silent={3}), Roster(2, 300.0)
    roster.nodes(grid)
    grid._replies.clear()  # what Flower does with a message whose time is over
    clock.now += 301
    grid.silent = set()
    assert roster.nodes(grid) == {0: 2, 1: 3}


def claiming(*places: tuple[int, int]) -> RecordingGrid:
    """A grid whose nodes 2, 3, ... name these partitions."""
    grid = RecordingGrid(client_app.app, len(places))
    for context, (partition, partitions) in zip(grid._contexts.values(), places, strict=True):
        context.node_config |= {keys.PARTITION: partition, keys.PARTITIONS: partitions}
    return grid


def test_of_two_nodes_of_one_partition_the_first_known_has_it_and_the_other_is_named_once() -> None:
    grid, roster = claiming((0, 2), (1, 2), (1, 2)), Roster(2, LONG)
    with heard("fedkace_flwr.rounds.roster") as lines:
        assert [roster.nodes(grid) for _ in range(4)] == [{0: 2, 1: 3}] * 4
    (named,) = [text for _, text in lines if "SuperNode 4" in text]
    assert "partition-id = 1" in named and "SuperNode 3 has" in named


def test_a_second_claimant_takes_over_when_the_first_is_gone_and_not_back() -> None:
    grid = claiming((0, 1), (0, 1))
    grid.get_node_ids = lambda: present.pop(0)  # type: ignore[method-assign]
    present = [{3}, {2, 3}, {2}, {2, 3}, {2, 3}]
    roster = Roster(1, LONG)
    assert [roster.nodes(grid)[0] for _ in range(5)] == [3, 3, 2, 2, 2]


def test_a_node_with_another_number_of_partitions_than_most_moves_nobody() -> None:
    grid = claiming((0, 10**9), (0, 3), (1, 3), (2, 3))
    with heard("fedkace_flwr.rounds.roster") as lines:
        assert Roster(3, LONG).nodes(grid) == {0: 3, 1: 4, 2: 5}
    (named,) = [text for _, text in lines if "SuperNode 2" in text]
    assert "num-partitions = 1000000000, most say 3" in named


# A SuperLink that is out of reach for a while


class FlakyGrid(RecordingGrid):
    """Fails so many times at each of its calls, with this."""

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


def timed_out() -> Exception:
    """As Flower's own grid raises it."""
    return httpx.ReadTimeout("the read timed out")


def answered(status: int) -> Exception:
    request = httpx.Request("POST", "http://127.0.0.1")
    return httpx.HTTPStatusError("refused", request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize("error", [ConnectionError("reset"), timed_out(), answered(503)])
def test_a_grid_out_of_reach_is_tried_again_with_longer_and_longer_pauses(clock: FakeTime, error: Exception) -> None:
    grid = FlakyGrid(echo(), 3, error, push=3, pull=2)
    assert Roster(3, 60.0).nodes(RecordingGrid(client_app.app, 3)) == {0: 2, 1: 3, 2: 4}
    found = exchange(grid, questions(grid, range(3), 3), 3600.0)
    assert list(found.replies) == [0, 1, 2] and found.silent == []
    assert clock.slept[:3] == [0.5, 1.0, 2.0]
    assert Roster(3, 60.0).nodes(FlakyGrid(client_app.app, 3, error, look=4)) == {0: 2, 1: 3, 2: 4}


@pytest.mark.parametrize("call", ["push", "pull"])
def test_a_grid_out_of_reach_for_the_whole_deadline_leaves_all_clients_silent(clock: FakeTime, call: str) -> None:
    grid, begun = FlakyGrid(echo(), 3, ConnectionError("reset"), **{call: 10**6}), clock.now
    found = exchange(grid, questions(grid, range(3), 3), 600.0)
    assert found.replies == {} and found.silent == [0, 1, 2]
    assert 600 <= clock.now - begun <= 2 * 600 + 60


def test_nodes_known_before_an_outage_are_still_known_after_it(clock: FakeTime) -> None:
    grid, roster = FlakyGrid(client_app.app, 2, ConnectionError("reset")), Roster(2, 30.0)
    hosts = roster.nodes(grid)
    grid.times["look"] = 10**6
    assert roster.nodes(grid) == hosts


@pytest.mark.parametrize("error", [RuntimeError("a fault in the program"), answered(401)])
def test_what_is_no_outage_is_not_tried_again(clock: FakeTime, error: Exception) -> None:
    for call in ("push", "pull"):
        grid = FlakyGrid(echo(), 1, error, **{call: 1})
        with pytest.raises(type(error)):
            exchange(grid, questions(grid, [0], 1), LONG)
    assert clock.slept == []


def test_a_reply_that_flower_cannot_unpack_is_its_senders_failure_alone(clock: FakeTime) -> None:
    class BrokenGrid(RecordingGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            if any(client_said(reply) == 1 for reply in replies):
                raise ValueError("Object content is corrupted")  # all that were fetched with it are lost
            return replies

    grid = BrokenGrid(echo(), 3)
    found = exchange(grid, questions(grid, range(3), 3), LONG)
    assert list(found.replies) == [0, 2] and found.silent == []
    assert list(found.unreadable) == [1] and "ValueError" in found.unreadable[1]


def test_a_simulations_replies_are_fetched_together() -> None:
    class InMemoryGrid(RecordingGrid):
        """By its name the grid of Flower's simulation."""

    grid = InMemoryGrid(echo(), 3)
    assert list(exchange(grid, questions(grid, range(3), 3), LONG).replies) == [0, 1, 2]
    assert grid.pulls == 1


def test_the_grids_of_flower_are_told_apart() -> None:
    assert InMemory.__name__ == "InMemoryGrid" and transport.is_simulation(object.__new__(InMemory))
    assert not transport.is_simulation(object.__new__(HttpGrid))
