"""Lost messages: who is not at work and has not answered is asked once more, and learns nothing twice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from support.common import FakeTime
from support.doubles.grids import WEIGHTS, LossyGrid

from fedkace_flwr import client_app
from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.messaging import wire
from fedkace_flwr.rounds.exchange import by_client, exchange
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore, is_locked

Make = Callable[..., Config]
HOUR = 3600.0
TRAIN, WORKING = MessageType.TRAIN, "query.working"


class Machine:
    """A client that says whether it is at work, and what becomes of its messages."""

    def __init__(self, at_work: Callable[[], bool] = lambda: False) -> None:
        self.at_work = at_work
        self.trained = 0
        self.app = ClientApp()
        self.app.query(wire.WORKING)(self._working)
        self.app.train()(self._train)

    def _working(self, message: Message, context: Context) -> Message:
        told = ConfigRecord({wire.WORKING: self.at_work()})
        return Message(RecordDict({wire.CONFIG: told}), reply_to=message)

    def _train(self, message: Message, context: Context) -> Message:
        self.trained += 1
        weights = wire.unpack(message.content.array_records[wire.ARRAYS])
        assert list(weights) == list(WEIGHTS)
        return Message(wire.reply_content(weights, 1, {"copy": self.trained}), reply_to=message)


def question(grid: InlineGrid) -> dict[int, Message]:
    content = wire.instruction(wire.array_record(WEIGHTS), {}, 0, 1)
    return by_client([grid.create_message(content, TRAIN, 2, "1")])


def test_a_client_that_lost_its_message_is_sent_it_once_more(clock: FakeTime) -> None:
    machine = Machine()
    grid = LossyGrid(machine.app, lost=[0])
    found = exchange(grid, question(grid), HOUR, probe=60)
    assert found.silent == [] and found.replies[0].content.metric_records[wire.METRICS]["copy"] == 2
    assert clock.now - 100 < 60 + 60 + 10, "asked after a minute and again after another"
    first, second = grid.of(TRAIN)
    assert second.metadata.dst_node_id == first.metadata.dst_node_id
    assert second.metadata.group_id == "1" and 0 < second.metadata.ttl <= HOUR
    assert len(grid.of(WORKING)) == 2
    assert found.down.total() == 2 * wire.size_in_bytes(question(grid)[0].content)


def test_a_client_at_work_is_left_alone_and_asked_more_and_more_rarely(clock: FakeTime) -> None:
    machine = Machine(lambda: True)
    grid = LossyGrid(machine.app, late={0: 100 + 3000.0})
    found = exchange(grid, question(grid), HOUR, probe=60)
    assert found.replies[0].content.metric_records[wire.METRICS]["copy"] == 1 and machine.trained == 1
    assert len(grid.of(TRAIN)) == 1
    assert len(grid.of(WORKING)) == 5  # after 60, 180, 420, 900 and 1860 seconds


def test_one_idle_answer_is_not_enough(clock: FakeTime) -> None:
    """Between a message's arrival and its work a process has to start."""
    answers = iter([False, True, False, True] + 100 * [True])
    machine = Machine(lambda: next(answers))
    grid = LossyGrid(machine.app, late={0: 100 + 1000.0})
    assert exchange(grid, question(grid), HOUR, probe=60).replies and len(grid.of(TRAIN)) == 1


def test_who_answers_in_time_or_need_not_be_watched_is_never_asked(clock: FakeTime) -> None:
    grid = LossyGrid(Machine().app, late={0: 100 + 50.0})
    assert exchange(grid, question(grid), HOUR, probe=60).replies and not grid.of(WORKING)
    grid = LossyGrid(Machine().app, late={0: clock.now + 500.0})
    assert exchange(grid, question(grid), HOUR).replies and not grid.of(WORKING)


def test_a_client_that_stays_silent_is_silent_at_the_deadline(clock: FakeTime) -> None:
    grid = LossyGrid(Machine().app, lost=range(100))
    found = exchange(grid, question(grid), 600, probe=60)
    assert found.silent == [0] and 600 <= clock.now - 100 < 610
    assert len(grid.of(TRAIN)) == 5
    assert found.down.total() == 5 * wire.size_in_bytes(question(grid)[0].content)


def test_a_copy_that_fails_does_not_count_while_the_first_may_come(clock: FakeTime) -> None:
    """The first was at work after all, and the copy found the folder locked."""
    machine = Machine()
    train = machine._train

    def locked_out(message: Message, context: Context) -> Message:
        if machine.trained == 1:
            machine.trained += 1
            raise RuntimeError("another process is at work on this client")
        return train(message, context)

    machine.app = ClientApp()
    machine.app.query(wire.WORKING)(machine._working)
    machine.app.train()(locked_out)
    grid = LossyGrid(machine.app, late={0: 100 + 150.0})
    found = exchange(grid, question(grid), HOUR, probe=60)
    assert not found.replies[0].has_error() and found.replies[0].content.metric_records[wire.METRICS]["copy"] == 1


def test_an_error_is_taken_where_nothing_better_comes(clock: FakeTime) -> None:
    app = ClientApp()
    app.query(wire.WORKING)(Machine()._working)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise ValueError("out of memory")

    grid = LossyGrid(app, lost=[0])
    found = exchange(grid, question(grid), 600, probe=60)
    assert found.replies[0].has_error() and "out of memory" in str(found.replies[0].error.reason)


def test_a_machine_that_cannot_say_is_not_taken_for_idle(clock: FakeTime) -> None:
    app = ClientApp()
    app.train()(Machine()._train)
    grid = LossyGrid(app, late={0: 100 + 900.0})
    assert exchange(grid, question(grid), HOUR, probe=60).replies and len(grid.of(TRAIN)) == 1
    assert len(grid.of(WORKING)) > 5


def test_a_client_says_whether_a_process_is_at_work_in_its_folder(small: Make, tmp_path: Path) -> None:
    config = small(state_dir=str(tmp_path))
    grid = InlineGrid(client_app.app, config.stream.clients, config.flat(), 7)

    def says() -> Any:
        content = RecordDict({wire.CONFIG: ConfigRecord({wire.CLIENT: 1, wire.ROUND: 1})})
        message = grid.create_message(content, WORKING, 3, "1")
        (reply,) = grid.send_and_receive([message])
        return reply.content.config_records[wire.CONFIG][wire.WORKING]

    folder = tmp_path / "client-001"
    assert says() is False and not folder.exists(), "asking makes no folder"
    store = ClientStore(folder, ClientState.__new__(ClientState))
    with store.locked():
        assert says() is True and is_locked(folder)
    assert says() is False
