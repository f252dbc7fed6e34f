"""What a client takes along from one run to the next, class by class."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.common import rounds_of
from support.made.stored import read_state

from fedkace_flwr.clients.memory import joined, memory_of, unnamed
from fedkace_flwr.config import Config
from fedkace_flwr.experiments.feed import feed
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.messaging import wire
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState

Make = Callable[..., Config]
CAPACITY = 20


def state_of(names: str, labels: list[int], *, classes: int | None = None, size: int = 2, **given: Any) -> ClientState:
    """A state with a class for each letter; the first pixel of a sample is its number."""
    pixels = torch.zeros((len(labels), 3, size, size), dtype=torch.uint8)
    pixels[:, 0, 0, 0] = torch.arange(len(labels))
    buffer = Samples.arrived(pixels, torch.tensor(labels, dtype=torch.int64), 4)
    seen = torch.zeros(classes or len(names), dtype=torch.bool)
    seen[buffer.labels] = True
    return ClientState(seen, buffer, run="1", round=4 if labels else 0, names=list(names), **given)


def begun(earlier: ClientState, empty: ClientState, config: Config) -> ClientState:
    remember = memory_of(config, 0)
    assert remember is not None
    return remember(earlier, empty)


def numbers(samples: Samples, names: str | list[str]) -> dict[int, str]:
    """The name of each sample's class."""
    return {
        int(image[0, 0, 0]): names[int(label)] for image, label in zip(samples.content, samples.labels, strict=True)
    }


def met(state: ClientState) -> set[str]:
    return {name for label, name in enumerate(state.names) if state.seen[label]}


def test_labels_follow_the_names_of_the_classes(small: Make) -> None:
    earlier = state_of("abc", [0, 1, 2, 2], extra={"met": torch.tensor(9)}, global_since=3, evaluated=4)
    state = begun(earlier, state_of("cdab", []), small(memory="keep"))
    assert numbers(state.buffer, "cdab") == {0: "a", 1: "b", 2: "c", 3: "c"}
    assert met(state) == set("abc") and unnamed(state, "cdab") == []
    assert bool((state.buffer.rounds == 0).all())
    assert (state.round, state.follows, state.global_since, state.evaluated, state.extra) == (0, 0, None, 0, {})


def test_classes_that_a_run_does_not_have_wait_for_one_that_does(small: Make, caplog: pytest.LogCaptureFixture) -> None:
    config, earlier = small(memory="keep"), state_of("abcd", [0, 1, 2, 2])
    with caplog.at_level(logging.WARNING):
        state = begun(earlier, state_of("xa", [], classes=4), config)
    (line,) = caplog.messages
    assert "2 classes" in line and "'b', 'c'" in line and "3 samples" in line
    assert numbers(state.buffer, "xa") == {0: "a"} and unnamed(state, "xa") == ["b", "c"]

    again = begun(state, state_of("bd", []), config)  # the next run takes what it knows, and the rest goes on waiting
    assert numbers(again.buffer, "bd") == {1: "b"} and unnamed(again, "bd") == ["a", "c"]
    assert numbers(again.waiting, list(again.waiting_names)) == {0: "a", 2: "c", 3: "c"}
    # The classes grow within a run.
    assert joined(state, "xa", config, 0) is state
    grown = joined(state, "xac", config, 0)
    assert numbers(grown.buffer, "xac") == {0: "a", 2: "c", 3: "c"} and unnamed(grown, "xac") == ["b"]


def test_a_class_that_was_met_counts_as_met_without_samples(small: Make) -> None:
    earlier = state_of("abc", [0])
    earlier.seen[1:] = True
    state = begun(earlier, state_of("ba", [], classes=4), small(memory="keep"))
    assert met(state) == set("ab") and unnamed(state, "ba") == ["c"]


def test_a_smaller_buffer_takes_equally_many_of_each_class(small: Make) -> None:
    earlier = state_of("abcd", [0] * 30 + [1] * 8 + [2] * 3)
    states = [begun(earlier, state_of("abcd", []), small(memory="keep", capacity=CAPACITY)) for _ in range(2)]
    assert states[0].buffer.class_counts(4).tolist() == [9, 8, 3, 0]
    assert torch.equal(states[0].buffer.content, states[1].buffer.content)


def test_a_method_without_a_buffer_hands_it_on(small: Make) -> None:
    earlier = state_of("abc", [0, 1, 2] * 20)
    between = begun(earlier, state_of("ab", []), small(memory="keep", method="fedavg"))
    assert len(between.buffer) == 0 and len(between.waiting) == 60 and met(between) == set("ab")
    assert joined(between, "ab", small(method="fedavg"), 0) is between
    after = begun(between, state_of("cba", []), small(memory="keep", capacity=100))
    assert numbers(after.buffer, "cba") == {number: "abc"[number % 3] for number in range(60)}


@pytest.mark.parametrize(
    ("earlier", "told"),
    [
        (state_of("ab", [0], size=3), ("3 x 3 pixels", "2 x 2 pixels")),
        (
            ClientState(torch.tensor([True, False]), Samples.arrived(torch.tensor([5]), torch.tensor([0]), 1)),
            ("ids into the data set", "2 x 2 pixels"),
        ),
        (replace(state_of("abc", [0]), names=()), ("3 classes without names", "has 2")),
    ],
    ids=["another size", "ids", "unnamed classes"],
)
def test_a_memory_that_cannot_be_used_is_named(
    small: Make, caplog: pytest.LogCaptureFixture, earlier: ClientState, told: tuple[str, str]
) -> None:
    empty = state_of("ab", [])
    with caplog.at_level(logging.WARNING):
        assert begun(earlier, empty, small(memory="keep")) is empty
    (line,) = caplog.messages
    assert all(part in line for part in told)


def test_a_memory_of_arrays_is_for_arrays_of_the_same_shape_only(small: Make) -> None:
    def rows(count: int, features: int) -> ClientState:
        content, labels = torch.ones(count, features), torch.zeros(count, dtype=torch.int64)
        return ClientState(torch.tensor([True, False]), Samples.arrived(content, labels, 1), names=("a", "b"))

    for features, samples in ((13, 4), (12, 0)):
        assert len(begun(rows(4, 13), rows(0, features), small(memory="keep")).buffer) == samples


def test_a_state_of_an_earlier_version_has_the_classes_of_the_run_if_there_are_as_many(small: Make) -> None:
    earlier = replace(state_of("xy", [0, 1, 1]), names=())
    assert numbers(begun(earlier, state_of("ab", []), small(memory="keep")).buffer, "ab") == {0: "a", 1: "b", 2: "b"}


def test_a_memory_of_ids_is_for_the_same_data_set_only(small: Make) -> None:
    held = Samples.arrived(torch.tensor([5]), torch.tensor([0]), 1)
    earlier = ClientState(torch.tensor([True, False]), held, names=("a", "b"), dataset="one")
    for dataset, samples in (("one", 1), ("other", 0)):
        empty = ClientState(torch.zeros(2, dtype=torch.bool), Samples.none(), names=("a", "b"), dataset=dataset)
        assert len(begun(earlier, empty, small(memory="keep")).buffer) == samples


def test_only_inboxes_keep_it_unless_it_is_asked_for(small: Make) -> None:
    inbox = {"dataset": "inbox", "class_names": "a,b", "image_size": 8}
    assert memory_of(small(), 0) is None and memory_of(small(**inbox, memory="fresh"), 0) is None
    assert memory_of(small(**inbox), 0) is not None


@pytest.mark.slow
def test_devices_keep_their_memory_through_a_new_run_of_another_method_and_classes(small: Make, tmp_path: Path) -> None:
    """Nothing arrives in the new run: the devices answer for the classes that they met in the run before."""
    feed(small(), tmp_path / "data")
    digits = "0123456789"

    def node(client: int) -> dict[str, str]:
        inbox = tmp_path / "data" / f"client-{client}"
        return {"state-dir": str(tmp_path / "states"), wire.INBOX: str(inbox), wire.TEST: str(inbox / "test")}

    def over_inbox(names: str, **changes: Any) -> Config:
        return small(
            dataset="inbox",
            class_names=",".join(names),
            image_size=8,
            inbox_bound=16,
            normalise=False,
            round_samples=0,
            **changes,
        )

    run_inline(over_inbox(digits, run_name="first", method="er"), node_config=node)
    before = [read_state(tmp_path / "states" / f"client-00{client}" / "state-000003.npz") for client in range(3)]
    names = "x" + digits[::-1]
    run_inline(over_inbox(names, run_name="second", method="fedkace", rounds=1), node_config=node)
    (record,) = rounds_of(tmp_path / "second")
    assert record["failures"] == [] and all(accuracy is not None for accuracy in record["client_accuracy"])
    for client, earlier in enumerate(before):
        state = read_state(tmp_path / "states" / f"client-00{client}" / "state-000000.npz")
        assert len(earlier.buffer) == CAPACITY and torch.equal(state.buffer.content, earlier.buffer.content)
        assert [names[label] for label in state.buffer.labels] == [digits[label] for label in earlier.buffer.labels]
        assert met(state) == met(earlier)
