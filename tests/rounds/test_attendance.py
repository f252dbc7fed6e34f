"""Rounds in which clients sit out, or come and go."""

from collections.abc import Callable, Iterable

import pytest
from flwr.app import Message, MessageType
from support.common import FakeTime
from support.doubles.faults import Damage, FaultyGrid, honest
from support.systems.runs import EVALUATE, METHODS, TRAIN, TRAINING_KINDS, last, records, run, same

from fedkace_flwr import server_app
from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.messaging import wire
from fedkace_flwr.storage.checkpoint import Checkpoint

Make = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")


def sitting_out(*places: tuple[int, int]) -> Damage:
    """A client that has nothing to train on in these rounds: it answers so, and its evaluation is lost."""

    def damage(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if (number, client) not in places:
            return reply
        if kind not in TRAINING_KINDS:
            return None
        reply.__dict__["_content"] = wire.reply_content(None, 0, {wire.SAT_OUT: 1})
        return reply

    return damage


def missing(*places: tuple[int, int]) -> Damage:
    return lambda kind, number, client, reply: None if (number, client) in places else reply


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_who_sits_out_is_no_failure_and_no_part_of_the_model(made: Make, method: str) -> None:
    out, gone = made("out", method=method), made("gone", method=method)
    run(out, sitting_out((2, 1)))
    run(gone, missing((2, 1)))
    assert same(last(out), last(gone))
    first, second, third = records(out)
    assert second["sat_out"] == [1]
    assert "sat_out" not in first and "sat_out" not in third
    assert [failure["phase"] for failure in second["failures"]] == ["evaluation"]
    assert [failure["phase"] for failure in records(gone)[1]["failures"]] == ["training", "evaluation"]
    assert second["buffer_size"][1] is None and third["buffer_size"][1] is not None


@pytest.mark.parametrize("method", METHODS)
def test_where_nobody_has_trained_the_model_stays(made: Make, method: str) -> None:
    config, before = made(method=method, quorum=1.0), list[Checkpoint]()

    def damage(kind: str, number: int, client: int, reply: Message) -> Message:
        if number == 2 and kind in TRAINING_KINDS:
            before.append(last(config))
            reply.__dict__["_content"] = wire.reply_content(None, 0, {wire.SAT_OUT: 1})
        return reply

    kept: list[Checkpoint] = []

    def meddle(kind: str, number: int, client: int, reply: Message) -> Message:
        if number < 3:
            return damage(kind, number, client, reply)
        kept.append(last(config))
        return reply

    grid = FaultyGrid(config, meddle)
    server_app.run(grid, config, run_id=1)
    assert before[0].round == 1 and kept[0].round == 2
    assert same(before[0], kept[0])
    second = records(config)[1]
    assert second["sat_out"] == [0, 1, 2] and second["client_drift"] is None
    assert second["accuracy"] is not None, "evaluation goes on"
    assert [kind for kind, number, _ in grid.places if number == 2 and kind not in (*TRAINING_KINDS, EVALUATE)] == []


def test_who_sits_out_counts_for_the_quorum(made: Make) -> None:
    run(made(quorum=1.0), sitting_out_and_evaluating({(2, 1), (2, 2)}))
    assert records(made())[1]["sat_out"] == [1, 2] and records(made())[1]["failures"] == []


def sitting_out_and_evaluating(places: set[tuple[int, int]]) -> Damage:
    def damage(kind: str, number: int, client: int, reply: Message) -> Message:
        if (number, client) in places and kind == TRAIN:
            reply.__dict__["_content"] = wire.reply_content(None, 0, {wire.SAT_OUT: 1})
        return reply

    return damage


def test_a_run_in_which_nobody_sits_out_has_no_field_of_it(made: Make) -> None:
    run(made(), honest)
    assert not {"sat_out", "below_quorum", "repeated"} & set(records(made())[0])


# Coming and going


class ComingAndGoing(FaultyGrid):
    """Nodes that are there in some phases alone, each named by how many training and evaluation phases have begun."""

    def __init__(self, config: Config, absent: dict[int, set[int]]) -> None:
        super().__init__(config, honest)
        self._absent, self._begun = absent, 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self._begun += any(message.metadata.message_type != MessageType.QUERY for message in messages)
        return super().push_messages(messages)

    def get_node_ids(self) -> Iterable[int]:
        gone = {client + 2 for client in self._absent.get(self._begun, set())}
        return [node for node in super().get_node_ids() if node not in gone]


def test_a_late_joiner_is_asked_from_the_next_phase_on(made: Make, clock: FakeTime) -> None:
    config = made(join_deadline=60.0)
    grid = ComingAndGoing(config, {0: {2}})
    server_app.run(grid, config, run_id=1)
    assert grid.places[:5] == [(TRAIN, 1, 0), (TRAIN, 1, 1), (EVALUATE, 1, 0), (EVALUATE, 1, 1), (EVALUATE, 1, 2)]
    assert 60 <= sum(clock.slept) < 120
    (failure,) = records(config)[0]["failures"]
    assert (failure["client"], failure["phase"], failure["kind"]) == (2, "training", "absent")
    assert records(config)[1]["failures"] == []


def test_clients_that_vanish_come_back_to_what_they_knew(made: Make) -> None:
    config = made(rounds=4)
    server_app.run(ComingAndGoing(config, {2: {0}, 3: {0}, 4: {0}}), config, run_id=1)
    gone = [(number, f["phase"]) for number, record in enumerate(records(config), 1) for f in record["failures"]]
    assert gone == [(2, "training"), (2, "evaluation"), (3, "training")]
    seen = [record["seen_classes"][0] for record in records(config)]
    assert seen[1] is None and seen[3] > seen[0] and records(config)[3]["buffer_size"][0] == 12


def test_everybody_gone_for_a_while_is_waited_for(made: Make, clock: FakeTime) -> None:
    config = made(below_quorum="repeat", join_deadline=50.0)
    plain = made("plain")
    run(plain, honest)
    grid = ComingAndGoing(config, {})
    gone_until = 40.0 + clock.now
    grid.get_node_ids = lambda: (  # type: ignore[method-assign]
        [] if grid._begun == 2 and clock.now < gone_until else InlineGrid.get_node_ids(grid)
    )
    server_app.run(grid, config, run_id=1)
    assert records(config)[1]["repeated"]["training"] >= 1
    assert same(last(config), last(plain))


class LateGrid(FaultyGrid):
    """Gives client 1's training reply of round 1 with the replies of every later phase."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [*super().pull_messages(message_ids), *self.late]

    late: tuple[Message, ...] = ()


def test_a_reply_that_comes_after_its_phase_is_ignored(made: Make) -> None:
    late, lost = made("late"), made("lost")

    def hold(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if (kind, number, client) == (TRAIN, 1, 1):
            grid.late = (reply,)
            return None
        return reply

    grid = LateGrid(late, hold)
    server_app.run(grid, late, run_id=1)
    run(lost, lambda kind, number, client, reply: None if (kind, number, client) == (TRAIN, 1, 1) else reply)
    assert grid.late and records(late) == records(lost) and same(last(late), last(lost))
