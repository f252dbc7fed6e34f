"""Rounds in which some clients sit out, too few answer, or come and go."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Error, Message, MessageType, RecordDict
from support.common import SMALL, FakeTime, rounds_of

from experiments.running.inline import InlineGrid
from fedkace_flwr import client_app, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods import tfcl as tfcl_names
from fedkace_flwr.results import run_folder
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints

Meddle = Callable[[str, int, int, Message], Message | None]
TRAIN, EVALUATE = MessageType.TRAIN, MessageType.EVALUATE
TRAINING_KINDS = {TRAIN, tfcl_names.HEAD_ACTION}
METHODS = [
    *("fedkace", "fedavg", "dcfcl", "fedcbdr"),
    *(pytest.param(method, marks=pytest.mark.slow) for method in ("er", "ofcl", "lkc", "refed", "tfcl")),
]


class Wire(InlineGrid):
    """An inline grid whose replies pass through ``meddle(kind, round, client, reply)``; None: never taken."""

    def __init__(self, config: Config, meddle: Meddle) -> None:
        super().__init__(client_app.app, config.stream.clients, config.flat(), run_id=1)
        self._meddle = meddle
        self.asked: list[tuple[str, int, int]] = []
        self.sent: list[tuple[str, int, int, RecordDict]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            (number,) = super().push_messages([message])
            kind = message.metadata.message_type
            if kind != MessageType.QUERY:
                told = message.content.config_records[keys.CONFIG]
                place = kind, int(told[keys.ROUND]), int(told[keys.CLIENT])  # type: ignore[arg-type]
                self.asked.append(place)
                self.sent.append((*place, message.content))
                reply = self._meddle(*place, self._replies.pop(number))
                if reply is None:
                    number = ""
                else:
                    self._replies[number] = reply
            numbers.append(number)
        return numbers


@pytest.fixture(autouse=True)
def quick(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for real, and nothing draws."""
    monkeypatch.setattr(run_folder, "draw_accuracy", lambda *args, **kwargs: None)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Config]:
    def make(name: str = "run", **changes: Any) -> Config:
        keyed = {key.replace("_", "-"): value for key, value in changes.items()}
        shape = {"rounds": 3, "capacity": 12, "tfcl-server-epochs": 2}
        return Config.parse({**SMALL, **shape, "results-dir": str(tmp_path), "run-name": name, **keyed})

    return make


Make = Callable[..., Config]


def run(config: Config, meddle: Meddle) -> Wire:
    wire = Wire(config, meddle)
    server_app.run(wire, config, run_id=1)
    return wire


def folder_of(config: Config) -> Path:
    return Path(config.run.results_dir) / config.run.run_name


def records(config: Config) -> list[dict[str, Any]]:
    return rounds_of(folder_of(config))


def last(config: Config) -> Checkpoint:
    found = Checkpoints(folder_of(config) / "server").newest()
    assert found is not None
    return found


def same(one: Checkpoint, other: Checkpoint) -> bool:
    pairs = ((one.weights, other.weights), (one.arrays, other.arrays))
    return all(list(a) == list(b) and all(a[name].tobytes() == b[name].tobytes() for name in a) for a, b in pairs)


def honest(kind: str, number: int, client: int, reply: Message) -> Message:
    return reply


def failed(reply: Message) -> Message:
    reply.__dict__["_content"], reply.__dict__["_error"] = None, Error(2, "Traceback\nOSError: disk on fire")
    return reply


def failing(*places: tuple[str, int, int], times: int = 10**6) -> Meddle:
    """Errors in place of the replies of these kinds, rounds and clients, so many times each."""
    left = dict.fromkeys(places, times)

    def meddle(kind: str, number: int, client: int, reply: Message) -> Message:
        if left.get((kind, number, client), 0) > 0:
            left[kind, number, client] -= 1
            return failed(reply)
        return reply

    return meddle


def sitting_out(*places: tuple[int, int]) -> Meddle:
    """A client that has nothing to train on in these rounds: it answers so, and its evaluation is lost."""

    def meddle(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if (number, client) not in places:
            return reply
        if kind not in TRAINING_KINDS:
            return None
        reply.__dict__["_content"] = keys.reply_content(None, 0, {keys.SAT_OUT: 1})
        return reply

    return meddle


def missing(*places: tuple[int, int]) -> Meddle:
    return lambda kind, number, client, reply: None if (number, client) in places else reply


# Sitting a round out


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

    def meddle(kind: str, number: int, client: int, reply: Message) -> Message:
        if number == 2 and kind in TRAINING_KINDS:
            before.append(last(config))
            reply.__dict__["_content"] = keys.reply_content(None, 0, {keys.SAT_OUT: 1})
        return reply

    kept: list[Checkpoint] = []
    wire = Wire(config, lambda k, n, c, r: meddle(k, n, c, r) if n < 3 or kept.append(last(config)) else r)
    server_app.run(wire, config, run_id=1)
    assert before[0].round == 1 and kept[0].round == 2
    assert same(before[0], kept[0])
    second = records(config)[1]
    assert second["sat_out"] == [0, 1, 2] and second["client_drift"] is None
    assert second["accuracy"] is not None, "evaluation goes on"
    assert [kind for kind, number, _ in wire.asked if number == 2 and kind not in (*TRAINING_KINDS, EVALUATE)] == []


def test_who_sits_out_counts_for_the_quorum(made: Make) -> None:
    run(made(quorum=1.0), sitting_out_and_evaluating({(2, 1), (2, 2)}))
    assert records(made())[1]["sat_out"] == [1, 2] and records(made())[1]["failures"] == []


def sitting_out_and_evaluating(places: set[tuple[int, int]]) -> Meddle:
    def meddle(kind: str, number: int, client: int, reply: Message) -> Message:
        if (number, client) in places and kind == TRAIN:
            reply.__dict__["_content"] = keys.reply_content(None, 0, {keys.SAT_OUT: 1})
        return reply

    return meddle


def test_a_run_in_which_nobody_sits_out_has_no_field_of_it(made: Make) -> None:
    run(made(), honest)
    assert not {"sat_out", "below_quorum", "repeated"} & set(records(made())[0])


# Below the quorum

TWO_FAIL = ((TRAIN, 2, 0), (TRAIN, 2, 1))


def test_skip_leaves_the_model_and_goes_on(made: Make) -> None:
    config = made(below_quorum="skip", method="er")
    before: list[Checkpoint] = []
    fail = failing(*TWO_FAIL)

    def meddle(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if (kind, number, client) == (EVALUATE, 2, 0):
            before.append(last(config))
        return fail(kind, number, client, reply)

    wire = run(config, meddle)
    first, second, third = records(config)
    assert second["below_quorum"] == ["training"] and "below_quorum" not in first and "below_quorum" not in third
    assert second["buffer_size"][:2] == [None, None] and second["buffer_size"][2] is not None
    assert None not in second["client_accuracy"] and third["failures"] == []
    evaluated = [content for kind, number, _, content in wire.sent if (kind, number) == (EVALUATE, 2)]
    for content in evaluated:
        received = keys.unpack(content.array_records[keys.ARRAYS])
        assert all(received[name].tobytes() == array.tobytes() for name, array in before[0].weights.items())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_skips_a_round_and_goes_on(made: Make, method: str) -> None:
    config = made(below_quorum="skip", method=method)
    run(config, failing(*((kind, 2, client) for kind in TRAINING_KINDS for client in (0, 1))))
    assert records(config)[1]["below_quorum"] == ["training"]
    assert records(config)[2]["failures"] == []


def test_skip_of_an_evaluation_records_what_there_is(made: Make) -> None:
    config = made(below_quorum="skip")
    run(config, failing((EVALUATE, 2, 0), (EVALUATE, 2, 1)))
    second = records(config)[1]
    assert second["below_quorum"] == ["evaluation"]
    assert second["client_accuracy"][:2] == [None, None] and second["accuracy"] == second["client_accuracy"][2]


@pytest.mark.parametrize("method", METHODS)
def test_repeat_asks_the_same_round_again_and_nothing_is_learnt_twice(made: Make, method: str) -> None:
    """The one client that had trained answers from its store; the run ends as one in which nothing went wrong."""
    plain, again = made("plain", method=method), made("again", method=method, below_quorum="repeat")
    run(plain, honest)
    places = [(kind, 2, client) for kind in TRAINING_KINDS for client in (0, 1)]
    wire = run(again, failing(*places, times=2))
    assert same(last(plain), last(again))
    mine, other = records(again), records(plain)
    assert mine[1].pop("repeated") == {"training": 2}
    assert len(mine[1]["failures"]) == 4
    assert mine[1]["bytes"]["down"] > other[1]["bytes"]["down"]
    for record in (*mine, *other):
        del record["failures"], record["bytes"]
    assert mine == other
    trained = [place for place in wire.asked if place[0] in TRAINING_KINDS and place[1] == 2]
    assert len(trained) == 9


def test_repeat_of_an_evaluation_asks_for_the_evaluation_alone(made: Make) -> None:
    plain, again = made("plain"), made("again", below_quorum="repeat")
    run(plain, honest)
    wire = run(again, failing((EVALUATE, 2, 0), (EVALUATE, 2, 1), times=1))
    assert records(again)[1]["repeated"] == {"evaluation": 1} and same(last(plain), last(again))
    assert len([place for place in wire.asked if place[:2] == (TRAIN, 2)]) == 3


@pytest.mark.parametrize(("rule", "done"), [("stop", 1), ("skip", 4), ("repeat", 1)])
def test_after_so_many_in_a_row_the_run_ends_in_one_line_and_can_go_on(made: Make, rule: str, done: int) -> None:
    changes = {"below_quorum": rule, "below_quorum_limit": 3, "rounds": 6}
    config = made(**changes)
    places = [(TRAIN, number, client) for number in range(2, 7) for client in (0, 1)]
    with pytest.raises(RunError) as caught:
        run(config, failing(*places))
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and "1 of 3 clients gave a valid reply" in text and "disk on fire" in text
    if rule != "stop":
        assert f"below-quorum = {rule}" in text and "below-quorum-limit = 3" in text and "resume = true" in text
    assert [record["round"] for record in records(config)] == list(range(1, done + 1))
    assert not (folder_of(config) / "summary.json").exists()
    run(made(**changes, resume=True), honest)
    assert [record["round"] for record in records(config)] == [1, 2, 3, 4, 5, 6]
    assert records(config)[-1]["failures"] == []


def test_askings_with_a_good_one_between_are_not_in_a_row(made: Make) -> None:
    config = made(below_quorum="repeat", below_quorum_limit=3, rounds=4)
    run(config, failing(*((TRAIN, number, client) for number in (1, 2, 3, 4) for client in (0, 1)), times=2))
    assert [record["repeated"] for record in records(config)] == [{"training": 2}] * 4


def test_skipped_rounds_with_a_good_one_between_are_not_in_a_row(made: Make) -> None:
    config = made(below_quorum="skip", below_quorum_limit=2, rounds=4)
    run(config, failing(*((TRAIN, number, client) for number in (1, 3) for client in (0, 1))))
    assert [record.get("below_quorum") for record in records(config)] == [["training"], None, ["training"], None]


def test_a_run_whose_last_round_was_skipped_is_finished(made: Make) -> None:
    config = made(below_quorum="skip", below_quorum_limit=1, rounds=2)
    run(config, failing((TRAIN, 2, 0), (TRAIN, 2, 1)))
    assert records(config)[1]["below_quorum"] == ["training"] and (folder_of(config) / "summary.json").exists()


def test_another_rule_may_go_on_with_a_run(made: Make) -> None:
    config = made()
    with pytest.raises(RunError):
        run(config, failing(*TWO_FAIL))
    run(made(resume=True, below_quorum="skip", below_quorum_limit=1_000), failing(*TWO_FAIL))
    assert records(config)[1]["below_quorum"] == ["training"]


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"norm-bound = 0.5: must be at least 1, or 0"):
        Config.parse({"norm-bound": 0.5})


# Coming and going


class ComingAndGoing(Wire):
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
    wire = ComingAndGoing(config, {0: {2}})
    server_app.run(wire, config, run_id=1)
    assert wire.asked[:5] == [(TRAIN, 1, 0), (TRAIN, 1, 1), (EVALUATE, 1, 0), (EVALUATE, 1, 1), (EVALUATE, 1, 2)]
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
    wire = ComingAndGoing(config, {})
    gone_until = 40.0 + clock.now
    wire.get_node_ids = lambda: (  # type: ignore[method-assign]
        [] if wire._begun == 2 and clock.now < gone_until else InlineGrid.get_node_ids(wire)
    )
    server_app.run(wire, config, run_id=1)
    assert records(config)[1]["repeated"]["training"] >= 1
    assert same(last(config), last(plain))


class LateWire(Wire):
    """Gives client 1's training reply of round 1 with the replies of every later phase."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [*super().pull_messages(message_ids), *self.late]

    late: tuple[Message, ...] = ()


def test_a_reply_that_comes_after_its_phase_is_ignored(made: Make) -> None:
    late, lost = made("late"), made("lost")

    def hold(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if (kind, number, client) == (TRAIN, 1, 1):
            wire.late = (reply,)
            return None
        return reply

    wire = LateWire(late, hold)
    server_app.run(wire, late, run_id=1)
    run(lost, lambda kind, number, client, reply: None if (kind, number, client) == (TRAIN, 1, 1) else reply)
    assert wire.late and records(late) == records(lost) and same(last(late), last(lost))


# The measure of what is usual


def test_with_few_replies_the_last_measure_of_enough_holds_also_after_a_resume(made: Make) -> None:
    """Of two models either may be the hostile one; what was usual the round before says which."""

    def meddle(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if kind == TRAIN and number == 3:
            if client == 2:
                return None
            if client == 1:
                held = reply.content.array_records[keys.ARRAYS]
                for name, array in keys.unpack(held).items():
                    if name.endswith("weight"):
                        held[name] = Array(np.float32(50) * array)
        return reply

    def stopped(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if number == 3:
            raise SystemExit("cut off")
        return reply

    whole, pieces = made("whole", quorum=0.3), made("pieces", quorum=0.3)
    run(whole, meddle)
    with pytest.raises(SystemExit):
        run(pieces, stopped)
    again = replace(pieces, run=replace(pieces.run, resume=True))
    run(again, meddle)
    assert records(whole) == records(pieces) and same(last(whole), last(pieces))
    kinds = {(failure["client"], failure["kind"]) for failure in records(whole)[2]["failures"]}
    assert kinds == {(1, "norm"), (2, "silent")}
