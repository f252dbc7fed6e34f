"""Rounds in which too few clients answer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, Message
from support.common import FakeTime
from support.doubles.faults import honest
from support.systems.runs import EVALUATE, METHODS, TRAIN, TRAINING_KINDS, failing, folder_of, last, records, run, same

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.messaging import wire
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.rounds.driver import BelowQuorumError, Quorum
from fedkace_flwr.storage.checkpoint import Checkpoint

Make = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")


TWO_FAIL = ((TRAIN, 2, 0), (TRAIN, 2, 1))


def test_skip_leaves_the_model_and_goes_on(made: Make) -> None:
    config = made(below_quorum="skip", method="er")
    before: list[Checkpoint] = []
    fail = failing(*TWO_FAIL)

    def damage(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if (kind, number, client) == (EVALUATE, 2, 0):
            before.append(last(config))
        return fail(kind, number, client, reply)

    grid = run(config, damage)
    first, second, third = records(config)
    assert second["below_quorum"] == ["training"] and "below_quorum" not in first and "below_quorum" not in third
    assert second["buffer_size"][:2] == [None, None] and second["buffer_size"][2] is not None
    assert None not in second["client_accuracy"] and third["failures"] == []
    evaluated = [crossing.down for crossing in grid.of(EVALUATE, 2).values()]
    for content in evaluated:
        received = wire.unpack(content.array_records[wire.ARRAYS])
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
    grid = run(again, failing(*places, times=2))
    assert same(last(plain), last(again))
    mine, other = records(again), records(plain)
    assert mine[1].pop("repeated") == {"training": 2}
    assert [failure["client"] for failure in mine[1]["failures"]] == [0, 1], "once, though they failed twice"
    assert mine[1]["bytes"]["down"] > other[1]["bytes"]["down"]
    for record in (*mine, *other):
        del record["failures"], record["bytes"]
    assert mine == other
    trained = [place for place in grid.places if place[0] in TRAINING_KINDS and place[1] == 2]
    assert len(trained) == 9


@pytest.mark.slow
def test_repeat_of_an_evaluation_asks_for_the_evaluation_alone(made: Make) -> None:
    plain, again = made("plain"), made("again", below_quorum="repeat")
    run(plain, honest)
    grid = run(again, failing((EVALUATE, 2, 0), (EVALUATE, 2, 1), times=1))
    assert records(again)[1]["repeated"] == {"evaluation": 1} and same(last(plain), last(again))
    assert len([place for place in grid.places if place[:2] == (TRAIN, 2)]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "done"), [("stop", 1), ("skip", 4), ("repeat", 1)])
def test_after_so_many_in_a_row_the_run_ends_in_one_line_and_can_go_on(made: Make, rule: str, done: int) -> None:
    changes = {"below_quorum": rule if rule == "stop" else f"{rule}:3", "rounds": 6}
    config = made(**changes)
    places = [(TRAIN, number, client) for number in range(2, 7) for client in (0, 1)]
    with pytest.raises(RunError) as caught:
        run(config, failing(*places))
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and "1 of 3 clients gave a valid reply" in text and "disk on fire" in text
    if rule != "stop":
        assert f"below-quorum = {rule}:3" in text and "resume = true" in text
    assert [record["round"] for record in records(config)] == list(range(1, done + 1))
    assert not (folder_of(config) / "summary.json").exists()
    run(made(**changes, resume=True), honest)
    assert [record["round"] for record in records(config)] == [1, 2, 3, 4, 5, 6]
    assert records(config)[-1]["failures"] == []


def test_inboxes_are_waited_for_without_limit_and_streams_are_not() -> None:
    shortfall = BelowQuorumError("round 2, training: 0 of 3 clients gave a valid reply", "training", [])
    patient, plain = (Quorum(Config.parse({}).run, arrives=arrives) for arrives in (True, False))
    for _ in range(1000):
        patient.short(shortfall)
    assert patient.repeats and not patient.skips
    with pytest.raises(BelowQuorumError):
        plain.short(shortfall)


@pytest.mark.slow
def test_askings_with_a_good_one_between_are_not_in_a_row(made: Make) -> None:
    config = made(below_quorum="repeat:3", rounds=4)
    run(config, failing(*((TRAIN, number, client) for number in (1, 2, 3, 4) for client in (0, 1)), times=2))
    assert [record["repeated"] for record in records(config)] == [{"training": 2}] * 4


@pytest.mark.slow
def test_skipped_rounds_with_a_good_one_between_are_not_in_a_row(made: Make) -> None:
    config = made(below_quorum="skip:2", rounds=4)
    run(config, failing(*((TRAIN, number, client) for number in (1, 3) for client in (0, 1))))
    assert [record.get("below_quorum") for record in records(config)] == [["training"], None, ["training"], None]


def test_a_run_whose_last_round_was_skipped_is_finished(made: Make) -> None:
    config = made(below_quorum="skip:1", rounds=2)
    run(config, failing((TRAIN, 2, 0), (TRAIN, 2, 1)))
    assert records(config)[1]["below_quorum"] == ["training"] and (folder_of(config) / "summary.json").exists()


@pytest.mark.slow
def test_another_rule_may_go_on_with_a_run(made: Make) -> None:
    config = made()
    with pytest.raises(RunError):
        run(config, failing(*TWO_FAIL))
    run(made(resume=True, below_quorum="skip:1000"), failing(*TWO_FAIL))
    assert records(config)[1]["below_quorum"] == ["training"]


@pytest.mark.slow
def test_of_two_replies_the_one_that_no_training_gives_is_rejected_also_after_a_resume(made: Make) -> None:
    """Of two models either may be the odd one; what AdamW can do says which."""

    def damage(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if kind == TRAIN and number == 3:
            if client == 2:
                return None
            if client == 1:
                held = reply.content.array_records[wire.ARRAYS]
                for name, array in wire.unpack(held).items():
                    if name.endswith("weight"):
                        held[name] = Array(np.float32(50) * array)
        return reply

    def stopped(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if number == 3:
            raise SystemExit("cut off")
        return reply

    whole, pieces = (made(name, quorum=0.3, defence="on") for name in ("whole", "pieces"))
    run(whole, damage)
    with pytest.raises(SystemExit):
        run(pieces, stopped)
    again = replace(pieces, run=replace(pieces.run, resume=True))
    run(again, damage)
    assert records(whole) == records(pieces) and same(last(whole), last(pieces))
    kinds = {(failure["client"], failure["kind"]) for failure in records(whole)[2]["failures"]}
    assert kinds == {(1, "norm"), (2, "refused")}


def test_an_order_to_stop_ends_a_round_that_stays_below_the_quorum(made: Make, clock: FakeTime) -> None:
    config = made(below_quorum="repeat:0", resume=True)
    folder = Path(config.run.results_dir) / config.run.run_name
    begun, sleep = clock.now, clock.sleep

    def order(seconds: float) -> None:
        sleep(seconds)
        if clock.now > begun + 1000:
            Orders(folder).stop()

    clock.sleep = order  # type: ignore[method-assign]
    run(config, failing(*TWO_FAIL, times=100))
    assert [record["round"] for record in records(config)] == [1]
    clock.sleep = sleep  # type: ignore[method-assign]
    Orders(folder).go_on()
    run(config, honest)
    assert [record["round"] for record in records(config)] == [1, 2, 3]
