"""Who has which seat, who is away, and who was removed."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.common import FakeTime
from support.doubles.faults import FaultyGrid, honest
from support.doubles.grids import RecordingGrid, echo, heard
from support.systems.runs import EVALUATE, METHODS, TRAINING_KINDS, last, records, run, same

from fedkace_flwr import server_app
from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.rounds.members import NODES, Members, registered_nodes

Make = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")

INBOX = {"dataset": "inbox", "class-names": "a,b", "image-size": 8, "join-deadline": 30.0, "away-after": 100.0}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list of nodes with keys, empty at first."""
    path = tmp_path / "nodes"
    monkeypatch.setenv(NODES, str(path))
    return path


class Nodes(RecordingGrid):
    """Nodes 2 to 7, of which those in ``there`` are connected; they know no partition, but for those that claim one."""

    def __init__(self, *there: int, claims: dict[int, int] | None = None) -> None:
        super().__init__(echo(), 6)
        self.there = set(there)
        for node, context in self._contexts.items():
            for key in (wire.PARTITION, wire.PARTITIONS):
                del context.node_config[key]
            if node in (claims or {}):
                context.node_config |= {wire.PARTITION: (claims or {})[node], wire.PARTITIONS: 10**9}

    def get_node_ids(self) -> list[int]:
        return sorted(self.there)


def seats(clients: int, grid: Nodes, orders: Orders | None = None) -> Members:
    made = Members(Config.parse({**INBOX, "clients": clients}), orders)
    made.open(1, grid)
    return made


def test_a_seat_belongs_to_the_node_whatever_others_claim(registry: Path) -> None:
    registry.write_text("3 south\n2 north\n")
    grid = Nodes(2, 3, claims={2: 0})
    with heard("fedkace_flwr.rounds.members") as lines:
        made = seats(2, grid)
        assert made.nodes(grid) == {0: 3, 1: 2}, "in the order of registration"
        assert made.nodes(grid) == {0: 3, 1: 2}
    (named,) = [text for level, text in lines if level == logging.WARNING]
    assert named == "client 1 (north) claims partition-id = 0 of 1000000000, which does not count"
    assert [each["note"] for each in made.table()] == [
        "",
        "claims partition-id = 0 of 1000000000, which does not count",
    ]


def test_a_seat_can_be_named_at_registration_and_passes_to_another_key(registry: Path) -> None:
    registry.write_text("2 north 3\n3 south\n")
    grid = Nodes(2, 3, 4)
    made = seats(2, grid)
    assert made.nodes(grid) == {0: 3, 1: 4, 3: 2}
    grid.there = {3, 5}
    registry.write_text("2 north 3\n3 south\n5 north-2 3\n")
    assert made.welcome(grid) == {0: 3, 3: 5}
    assert [(each["seat"], each["name"]) for each in made.table()] == [(0, "south"), (1, ""), (3, "north-2")]


def test_a_further_node_becomes_a_further_client_from_the_next_round_on(registry: Path) -> None:
    grid = Nodes(2, 3)
    made = seats(2, grid)
    assert made.nodes(grid) == {0: 2, 1: 3} and made.count == 2
    grid.there = {2, 3, 4}
    assert made.nodes(grid) == {0: 2, 1: 3}, "not within a round"
    made.open(2, grid)
    assert made.nodes(grid) == {0: 2, 1: 3, 2: 4} and made.count == 3
    assert [each["joined"] for each in made.table()] == [1, 1, 2]


def test_the_streams_of_a_data_set_have_no_further_client(registry: Path) -> None:
    made = Members(Config.parse({"clients": 1}))
    with heard("fedkace_flwr.rounds.members") as lines:
        made.open(1, grid := Nodes(2, 3))
    assert made.nodes(grid) == {0: 2}
    assert any("SuperNode 3 gets no seat" in text for _, text in lines)


def test_seats_outlive_the_server(registry: Path, clock: FakeTime) -> None:
    grid = Nodes(3, 4)
    before = seats(2, grid)
    grid.there = {2, 3, 4}
    after = Members(Config.parse({**INBOX, "clients": 2}))
    after.restore(before.state())
    after.open(5, grid)
    assert after.nodes(grid) == {0: 3, 1: 4, 2: 2}
    assert [each["joined"] for each in after.table()] == [1, 1, 5]


def test_who_stays_away_is_warned_of_once_and_waited_for_no_longer(registry: Path, clock: FakeTime) -> None:
    grid = Nodes(2, 3)
    made = seats(2, grid)
    grid.there = {2}
    with heard("fedkace_flwr.rounds.members") as lines:
        made.nodes(grid)
        assert [made.present, made.away] == [(0, 1), ()]
        clock.now += 101
        made.nodes(grid)
        made.nodes(grid)
        assert [made.present, made.away] == [(0,), (1,)]
        begun = clock.now
        assert made.gather(grid, 1.0) == {0: 2} and clock.now == begun
        restarted = Members(Config.parse({**INBOX, "clients": 2}))
        restarted.restore(made.state())
        assert restarted.wait(grid) == {0: 2} and clock.now == begun, "nor by a new server"
        grid.there = {2, 3}
        assert made.nodes(grid) == {0: 2, 1: 3} and made.present == (0, 1)
    warned = [text for level, text in lines if level == logging.WARNING]
    assert len(warned) == 1 and "client 1 has been away" in warned[0]
    assert any(text == "client 1 is back" for _, text in lines)


def test_a_client_that_is_missed_after_an_hour_without_a_look_is_not_away_yet(registry: Path, clock: FakeTime) -> None:
    grid = Nodes(2, 3)
    made = seats(2, grid)
    grid.there = {2}
    clock.now += 3600
    assert made.nodes(grid) == {0: 2} and len(made.present) == 2
    clock.now += 101
    assert made.nodes(grid) == {0: 2} and len(made.present) == 1


def test_who_is_removed_never_returns(registry: Path, tmp_path: Path) -> None:
    grid, orders = Nodes(2, 3), Orders(tmp_path / "run")
    made = seats(2, grid, orders)
    orders.remove(1)
    assert made.nodes(grid) == {0: 2} and made.present == (0,) and made.count == 2
    again = Members(Config.parse({**INBOX, "clients": 2}), Orders(tmp_path / "run"))
    again.restore(made.state())
    again.open(2, grid)
    assert [each["status"] for each in again.table()] == ["present", "removed"]


def test_lines_of_the_list_that_are_none_are_skipped() -> None:
    found = registered_nodes("17 cam-7 4\n\nnonsense\n18\n19 cam-9 x\n")
    assert {node: (each.name, each.seat) for node, each in found.items()} == {17: ("cam-7", 4), 19: ("cam-9", None)}


# Whole runs


@pytest.mark.matrix
@pytest.mark.parametrize("method", METHODS)
def test_absences_of_a_simulation_are_rounds_without_the_client(made: Make, method: str) -> None:
    """Whoever is away is neither asked nor a failure; who joins late begins with the model of that time."""
    config = made(method=method, rounds=4, away="2:1-2, 1:3-3", quorum=1.0)
    grid = run(config)
    asked = [
        {client for kind, number, client in grid.places if number == each and kind in (*TRAINING_KINDS, EVALUATE)}
        for each in range(1, 5)
    ]
    assert asked == [{0, 1}, {0, 1}, {0, 2}, {0, 1, 2}]
    assert [record.get("away") for record in records(config)] == [[2], [2], [1], None]
    assert all(not record["failures"] and "asked" not in record for record in records(config))
    seen = [record["seen_classes"] for record in records(config)]
    assert seen[1][2] is None and seen[2][1] is None and seen[3][1] >= seen[1][1]


def test_a_resumed_run_with_absences_equals_the_whole(made: Make) -> None:
    whole, cut = (made(name, rounds=4, away="2:1-2, 1:3-3", resume=True) for name in ("whole", "cut"))
    run(whole)

    class Killed(Exception):
        pass

    def die(kind: str, number: int, client: int, reply: Any) -> Any:
        if number == 3:
            raise Killed
        return reply

    with pytest.raises(Killed):
        server_app.run(FaultyGrid(cut, die), cut, run_id=1)
    run(cut)
    assert records(cut) == records(whole) and same(last(cut), last(whole))


def test_a_run_that_is_told_to_stop_ends_as_if_that_round_had_been_its_last(made: Make, tmp_path: Path) -> None:
    told, short = made("told", rounds=5), made("short", rounds=2)

    def stop(kind: str, number: int, client: int, reply: Any) -> Any:
        if number == 2:
            Orders(tmp_path / "told").stop()
        return reply

    server_app.run(FaultyGrid(told, stop), told, run_id=1)
    server_app.run(FaultyGrid(short, honest), short, run_id=1)
    assert records(told) == records(short) and same(last(told), last(short))
    assert (tmp_path / "told" / "summary.json").exists() and (tmp_path / "told" / "model").is_dir()
