"""Which SuperNode hosts which client."""

import logging
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from support.common import FakeTime
from support.doubles.grids import (
    LONG,
    SHORT,
    WEIGHTS,
    ChangingGrid,
    MeddlingGrid,
    RecordingGrid,
    SilentGrid,
    echo,
    heard,
)

from fedkace_flwr import client_app, queries
from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.messaging import wire
from fedkace_flwr.rounds.directory import ClientDirectory
from fedkace_flwr.rounds.exchange import client_of, exchange
from fedkace_flwr.rounds.members import Members


def node_of(partition: int) -> int:
    return partition + 2


def members(clients: int, deadline: float) -> Members:
    return Members(Config.parse({"clients": clients, "join-deadline": deadline}))


@pytest.mark.parametrize(("clients", "nodes"), [(1, 1), (3, 3), (7, 3), (5, 1), (2, 4)])
def test_client_k_lives_at_partition_k_mod_n(clients: int, nodes: int) -> None:
    hosts = members(clients, LONG).wait(RecordingGrid(echo(), nodes))
    assert hosts == {client: node_of(client % nodes) for client in range(clients)}


def test_a_message_to_a_client_arrives_where_it_lives() -> None:
    grid = RecordingGrid(echo(), 3)
    hosts = members(7, LONG).wait(grid)
    content = {client: wire.instruction(wire.array_record(WEIGHTS), {}, client, 1) for client in hosts}
    sent = {k: grid.create_message(content[k], MessageType.TRAIN, node, "1") for k, node in hosts.items()}
    found = exchange(grid, sent, LONG)
    places = {k: reply.content.metric_records[wire.METRICS]["node"] for k, reply in found.replies.items()}
    assert places == {client: client % 3 for client in range(7)}


def test_a_node_is_asked_once_and_remembered() -> None:
    grid, directory = RecordingGrid(echo(), 3), members(3, LONG)
    first = directory.wait(grid)
    assert [directory.nodes(grid) for _ in range(3)] == [first] * 3
    assert [message.metadata.dst_node_id for message in grid.sent] == [2, 3, 4]
    assert {message.metadata.message_type for message in grid.sent} == {MessageType.QUERY}


def test_nodes_that_join_late_are_waited_for(clock: FakeTime) -> None:
    grid = ChangingGrid(echo(), 3, set(), {2}, {2, 3, 4})
    assert members(3, LONG).wait(grid) == {0: 2, 1: 3, 2: 4}


def test_a_node_that_left_takes_its_clients_with_it_and_brings_them_back() -> None:
    grid = ChangingGrid(echo(), 3, {2, 3, 4}, {2, 4}, {2, 3, 4})
    directory = ClientDirectory(5, LONG)
    assert directory.nodes(grid) == {0: 2, 1: 3, 2: 4, 3: 2, 4: 3}
    assert directory.nodes(grid) == {0: 2, 2: 4, 3: 2}
    assert directory.nodes(grid) == {0: 2, 1: 3, 2: 4, 3: 2, 4: 3}


def test_a_node_that_comes_back_under_another_number_hosts_its_partition_again() -> None:
    grid = ChangingGrid(echo(), 3, {2, 3}, {2, 4})
    for context, partition in zip(grid._contexts.values(), (0, 1, 1), strict=True):
        context.node_config |= {wire.PARTITION: partition, wire.PARTITIONS: 2}
    directory = ClientDirectory(4, LONG)
    assert directory.nodes(grid) == {0: 2, 1: 3, 2: 2, 3: 3}
    assert directory.nodes(grid) == {0: 2, 1: 4, 2: 2, 3: 4}


def test_a_run_starts_without_the_nodes_that_do_not_join_and_says_so(clock: FakeTime) -> None:
    grid, begun = ChangingGrid(echo(), 3, {2, 4}), clock.now
    with heard("fedkace_flwr.rounds.members") as lines:
        assert members(3, SHORT).wait(grid) == {0: 2, 2: 4}
    assert SHORT <= clock.now - begun <= SHORT + 0.5  # it looks every half second
    assert (logging.WARNING, "2 of 3 clients can be reached; starting without the others") in lines


def test_without_any_node_the_run_ends_at_the_join_deadline(clock: FakeTime) -> None:
    begun = clock.now
    with pytest.raises(RunError) as caught:
        members(3, SHORT).wait(RecordingGrid(echo(), 0))
    assert SHORT <= clock.now - begun <= SHORT + 0.5  # it looks every half second
    assert str(caught.value) == f"no SuperNode joined within join-deadline = {SHORT:g} seconds"


def test_a_node_that_never_answers_is_like_one_that_never_joined(clock: FakeTime) -> None:
    with pytest.raises(RunError, match=r"join-deadline = 0\.25"):
        members(2, SHORT).wait(MeddlingGrid(echo(), 2, lambda grid, numbers, pull: []))


def spoilt(node: int, **config: Any) -> RecordingGrid:
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
    config: dict[str, object], words: str, clock: FakeTime
) -> None:
    with heard("fedkace_flwr.rounds.directory") as lines:
        assert members(2, SHORT).wait(spoilt(3, **config)) == {0: 2}
    (named,) = [text for level, text in lines if level == logging.WARNING and text.startswith("SuperNode 3")]
    assert words in named and "--node-config 'partition-id=K num-partitions=N'" in named
    assert len(named.splitlines()) == 1


def test_where_no_node_can_name_its_partition_the_run_ends_with_what_to_do_in_one_line(clock: FakeTime) -> None:
    grid = RecordingGrid(client_app.app, 1)
    del grid._contexts[2].node_config[wire.PARTITION]
    with pytest.raises(RunError) as caught:
        members(1, SHORT).wait(grid)
    text = str(caught.value)
    assert "partition-id = None" in text and "--node-config 'partition-id=K num-partitions=N'" in text
    assert f"join-deadline = {SHORT:g}" in text and len(text.splitlines()) == 1


def test_a_node_that_answers_again_after_an_error_hosts_its_clients(clock: FakeTime) -> None:
    grid, directory = spoilt(3, partition_id="first"), ClientDirectory(2, LONG)
    assert directory.nodes(grid) == {0: 2}
    grid._contexts[3].node_config[wire.PARTITION] = 1
    assert directory.nodes(grid) == {0: 2}, "it is not asked again at once"
    clock.now += 61
    assert directory.nodes(grid) == {0: 2, 1: 3}


def test_an_answer_without_sense_is_like_an_error(clock: FakeTime) -> None:
    app, answers = ClientApp(), [RecordDict(), RecordDict({wire.CONFIG: ConfigRecord({wire.PARTITION: "0"})})]

    @app.query()
    def identify(message: Message, context: Context) -> Message:
        node = int(context.node_config[wire.PARTITION])
        return Message(answers[node], reply_to=message) if node < 2 else queries.identity(message, context)

    grid = RecordingGrid(app, 3)
    with heard("fedkace_flwr.rounds.directory") as lines:
        assert ClientDirectory(3, LONG).nodes(grid) == {2: 4}
    assert [text for _, text in lines if "SuperNode 2" in text] and [text for _, text in lines if "SuperNode 3" in text]


def test_a_mute_node_holds_a_phase_up_once_and_for_a_moment(clock: FakeTime) -> None:
    """With hours to answer a training message, it must not take hours to start one."""
    grid = SilentGrid(client_app.app, 3, silent={3})
    directory = ClientDirectory(3, 300.0)
    begun = clock.now
    assert directory.nodes(grid) == {0: 2, 2: 4}
    first = clock.now - begun
    assert 10 <= first <= 20
    assert [directory.nodes(grid) for _ in range(5)] == [{0: 2, 2: 4}] * 5
    assert clock.now - begun == first
    assert len([message for message in grid.sent if client_of(message) == 3]) == 1
    grid.silent = set()
    assert directory.nodes(grid) == {0: 2, 1: 3, 2: 4}, "a late answer counts from the next phase on"


def test_a_node_whose_question_has_expired_is_asked_once_more(clock: FakeTime) -> None:
    grid, directory = SilentGrid(client_app.app, 2, silent={3}), ClientDirectory(2, 300.0)
    directory.nodes(grid)
    grid._replies.clear()  # what Flower does with a message whose time is over
    clock.now += 301
    grid.silent = set()
    assert directory.nodes(grid) == {0: 2, 1: 3}


def claiming(*places: tuple[int, int]) -> RecordingGrid:
    """A grid whose nodes 2, 3, ... name these partitions."""
    grid = RecordingGrid(client_app.app, len(places))
    for context, (partition, partitions) in zip(grid._contexts.values(), places, strict=True):
        context.node_config |= {wire.PARTITION: partition, wire.PARTITIONS: partitions}
    return grid


def test_of_two_nodes_of_one_partition_the_first_known_has_it_and_the_other_is_named_once() -> None:
    grid, directory = claiming((0, 2), (1, 2), (1, 2)), ClientDirectory(2, LONG)
    with heard("fedkace_flwr.rounds.directory") as lines:
        assert [directory.nodes(grid) for _ in range(4)] == [{0: 2, 1: 3}] * 4
    (named,) = [text for _, text in lines if "SuperNode 4" in text]
    assert "partition-id = 1" in named and "SuperNode 3 has" in named


def test_a_second_claimant_takes_over_when_the_first_is_gone_and_not_back() -> None:
    grid = claiming((0, 1), (0, 1))
    grid.get_node_ids = lambda: present.pop(0)  # type: ignore[method-assign]
    present = [{3}, {2, 3}, {2}, {2, 3}, {2, 3}]
    directory = ClientDirectory(1, LONG)
    assert [directory.nodes(grid)[0] for _ in range(5)] == [3, 3, 2, 2, 2]


def test_a_node_with_another_number_of_partitions_than_most_moves_nobody() -> None:
    grid = claiming((0, 10**9), (0, 3), (1, 3), (2, 3))
    with heard("fedkace_flwr.rounds.directory") as lines:
        assert ClientDirectory(3, LONG).nodes(grid) == {0: 3, 1: 4, 2: 5}
    (named,) = [text for _, text in lines if "SuperNode 2" in text]
    assert "num-partitions = 1000000000, most say 3" in named
