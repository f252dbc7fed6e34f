"""What the server makes of the names that clients bring."""

import logging

import pytest
from flwr.app import ConfigRecord, RecordDict

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import wire
from fedkace_flwr.rounds.class_names import ClassNames
from fedkace_flwr.sections import DataConfig

OPEN = DataConfig(classes="open", class_names="ok", max_classes=4)


def reply(*names: object) -> RecordDict:
    return RecordDict({wire.CONFIG: ConfigRecord({wire.NEW_CLASSES: list(names)})})  # type: ignore[dict-item]


def test_names_of_a_round_get_the_next_numbers_whoever_brings_them_and_in_whatever_order() -> None:
    names = ClassNames(OPEN)
    names.take(2, reply("hole", "dent"))
    names.take(0, reply("dent", "ok"))
    assert names.told() == {wire.CLASS_NAMES: ["ok"], wire.CLASS_ROUNDS: [0]}, "numbers are given at the round's end"
    assert names.settle(3) == ["dent", "hole"]
    assert names.told() == {wire.CLASS_NAMES: ["ok", "dent", "hole"], wire.CLASS_ROUNDS: [0, 4, 4]}
    names.take(1, reply("hole"))  # not told yet
    assert names.settle(4) == []
    again = ClassNames(OPEN)
    again.restore(names.state())
    assert again.told() == names.told()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    ["a,b", "../x", "a/b", ".x", "", " x", "x\n", "\x1b[2J", "\u202ecod", "\udc80", "x" * 201, 7, 1.5, True, b"x"],
)
def test_what_can_be_no_name_is_ignored_and_the_client_named(name: object, caplog: pytest.LogCaptureFixture) -> None:
    names = ClassNames(OPEN)
    lists = reply(name, "hole") if isinstance(name, str) else reply(name)
    names.take(5, lists)
    assert names.settle(1) == (["hole"] if isinstance(name, str) else [])
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("client 5: ") and line.isprintable() and len(line) < 300


def test_a_name_is_one_however_it_is_composed() -> None:
    names = ClassNames(OPEN)
    names.take(0, reply("cafe\u0301"))
    names.take(1, reply("caf\u00e9"))
    assert names.settle(1) == ["caf\u00e9"]


def test_a_client_brings_a_few_names_at_once_and_each_without_a_number_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ClassNames(OPEN)
    names.take(0, reply(*(f"{number:02d}" for number in range(30))))
    assert names.settle(1) == ["00", "01", "02"]
    warned = [record.getMessage() for record in caplog.records if "max-classes = 4" in record.getMessage()]
    assert len(warned) == wire.MOST_NEW_CLASSES - 3 and warned[0].startswith("class 03, brought by clients [0]")
    names.take(0, reply("03"))
    names.settle(2)
    assert sum("class 03" in record.getMessage() for record in caplog.records) == 1


def test_fixed_classes_tell_and_take_nothing() -> None:
    names = ClassNames(DataConfig(class_names="a,b"))
    names.take(0, reply("c"))
    assert (names.told(), names.settle(1), names.state()) == ({}, [], {})


@pytest.mark.parametrize(
    "told",
    [
        {},
        {wire.CLASS_NAMES: ["a"], wire.CLASS_ROUNDS: []},
        {wire.CLASS_NAMES: ["a", "a"], wire.CLASS_ROUNDS: [0, 0]},
        {wire.CLASS_NAMES: ["a/b"], wire.CLASS_ROUNDS: [0]},
        {wire.CLASS_NAMES: [1], wire.CLASS_ROUNDS: [0]},
        {wire.CLASS_NAMES: ["a"], wire.CLASS_ROUNDS: [-1]},
        {wire.CLASS_NAMES: ["a", "b", "c"], wire.CLASS_ROUNDS: [0, 0, 0]},
    ],
)
def test_a_client_accepts_only_what_a_server_can_have_agreed(told: dict[str, list[object]]) -> None:
    with pytest.raises(MessageError, match="class-"):
        wire.agreed_classes(told, 2)
