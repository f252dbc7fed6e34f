"""A grid that is out of reach for a while, or gives replies that cannot be unpacked."""

from collections.abc import Callable, Iterable

import httpx
import pytest
from flwr.app import Message
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid as InMemory
from support.common import FakeTime
from support.doubles.grids import LONG, FlakyGrid, MeddlingGrid, RecordingGrid, client_said, echo, questions

from fedkace_flwr import client_app
from fedkace_flwr.flower.internals import is_simulation
from fedkace_flwr.rounds.directory import ClientDirectory
from fedkace_flwr.rounds.exchange import exchange


def timed_out() -> Exception:
    """As Flower's own grid raises it."""
    return httpx.ReadTimeout("the read timed out")


def answered(status: int) -> Exception:
    request = httpx.Request("POST", "http://127.0.0.1")
    return httpx.HTTPStatusError("refused", request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize("error", [ConnectionError("reset"), timed_out(), answered(503)])
def test_a_grid_out_of_reach_is_tried_again_with_longer_and_longer_pauses(clock: FakeTime, error: Exception) -> None:
    grid = FlakyGrid(echo(), 3, error, push=3, pull=2)
    assert ClientDirectory(3, 60.0).nodes(RecordingGrid(client_app.app, 3)) == {0: 2, 1: 3, 2: 4}
    found = exchange(grid, questions(grid, range(3), 3), 3600.0)
    assert list(found.replies) == [0, 1, 2] and found.silent == []
    assert clock.slept[:3] == [0.5, 1.0, 2.0]
    assert ClientDirectory(3, 60.0).nodes(FlakyGrid(client_app.app, 3, error, look=4)) == {0: 2, 1: 3, 2: 4}


@pytest.mark.parametrize("call", ["push", "pull"])
def test_a_grid_out_of_reach_for_the_whole_deadline_leaves_all_clients_silent(clock: FakeTime, call: str) -> None:
    grid, begun = FlakyGrid(echo(), 3, ConnectionError("reset"), **{call: 10**6}), clock.now
    found = exchange(grid, questions(grid, range(3), 3), 600.0)
    assert found.replies == {} and found.silent == [0, 1, 2]
    assert 600 <= clock.now - begun <= 2 * 600 + 60


def test_nodes_known_before_an_outage_are_still_known_after_it(clock: FakeTime) -> None:
    grid, directory = FlakyGrid(client_app.app, 2, ConnectionError("reset")), ClientDirectory(2, 30.0)
    hosts = directory.nodes(grid)
    grid.times["look"] = 10**6
    assert directory.nodes(grid) == hosts


@pytest.mark.parametrize("error", [RuntimeError("a fault in the program"), answered(401)])
def test_what_is_no_outage_is_not_tried_again(clock: FakeTime, error: Exception) -> None:
    for call in ("push", "pull"):
        grid = FlakyGrid(echo(), 1, error, **{call: 1})
        with pytest.raises(type(error)):
            exchange(grid, questions(grid, [0], 1), LONG)
    assert clock.slept == []


def test_a_reply_that_flower_cannot_unpack_is_its_senders_failure_alone(clock: FakeTime) -> None:
    def corrupt(grid: object, numbers: list[str], pull: Callable[..., Iterable[Message]]) -> list[Message]:
        replies = list(pull(numbers))
        if any(client_said(reply) == 1 for reply in replies):
            raise ValueError("Object content is corrupted")  # all replies of the same pull are lost
        return replies

    grid = MeddlingGrid(echo(), 3, corrupt)
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
    assert InMemory.__name__ == "InMemoryGrid" and is_simulation(object.__new__(InMemory))
    assert not is_simulation(object.__new__(HttpGrid))
