"""Data that arrives: taken once, learned once, whatever happens in between; and whole runs over inboxes."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.common import rounds_of

from experiments.feed import feed
from experiments.running.inline import InlineGrid, run_inline
from fedkace_flwr import client_app
from fedkace_flwr.config import Config
from fedkace_flwr.data import inbox
from fedkace_flwr.data.inbox import Inbox
from fedkace_flwr.errors import ConfigError, DataError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage import atomic as durable
from fedkace_flwr.storage.checkpoint import Checkpoints
from fedkace_flwr.storage.client_store import Answer, ClientState, ClientStore

Make = Callable[..., Config]
CLASSES = ("a", "b", "c")
SIZE = 2
RUN = "00000000000000000007"


def drop(folder: Path, name: str, *numbers: int) -> None:
    """One file; a sample's number is its first pixel."""
    pixels = np.zeros((len(numbers), SIZE, SIZE, 3), dtype=np.uint8)
    pixels[:, 0, 0, 0] = numbers
    (folder / "new").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "new" / name, images=pixels, labels=np.array(numbers) % 3)


def opened(folder: Path, run: str = RUN, **settings: Any) -> Inbox:
    return Inbox(folder, run, CLASSES, SIZE, **{"bound": 100, **settings})


def numbers_of(arrived: tuple[np.ndarray, np.ndarray]) -> list[int]:
    assert (arrived[0][:, 0, 0, 0] % 3 == arrived[1]).all()
    return arrived[0][:, 0, 0, 0].tolist()


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_round_takes_what_has_arrived_and_the_next_what_came_since(tmp_path: Path) -> None:
    drop(tmp_path, "2.npz", 3, 4)
    drop(tmp_path, "1.npz", 1, 2)
    box = opened(tmp_path)
    assert numbers_of(box.take(1, 0)) == [1, 2, 3, 4]
    drop(tmp_path, "3.npz", 5)
    assert numbers_of(box.take(1, 0)) == [1, 2, 3, 4]  # a round that is tried again learns the same
    box.learned(1)
    assert numbers_of(box.take(2, 1)) == [5]
    assert names_in(tmp_path / "new") == []


def test_learned_files_go_to_done_once_the_next_round_is_on_disk(tmp_path: Path) -> None:
    box = opened(tmp_path)
    for number in (1, 2, 3):
        drop(tmp_path, "x.npz", number)  # always the same name
        box.take(number, number - 1)
        box.learned(number)
    assert names_in(tmp_path / "done") == [f"{RUN}-000001/x.npz"]
    box.take(4, 3)
    assert names_in(tmp_path / "done") == [f"{RUN}-000001/x.npz", f"{RUN}-000002/x.npz"]
    assert names_in(tmp_path / "taken") == [f"{RUN}-000003.learned/x.npz"]


def test_learned_files_may_be_deleted(tmp_path: Path) -> None:
    box = opened(tmp_path, keep=False)
    for number in (1, 2):
        drop(tmp_path, "x.npz", number)
        box.take(number, number - 1)
        box.learned(number)
    box.take(3, 2)
    assert names_in(tmp_path) == [f"taken/{RUN}-000002.learned/x.npz"]


def test_a_bound_leaves_the_rest_for_later_and_splits_no_file(tmp_path: Path) -> None:
    drop(tmp_path, "1.npz", 1, 2)
    drop(tmp_path, "2.npz", 3, 4)
    drop(tmp_path, "3.npz", 5, 6, 7)
    drop(tmp_path, "4.npz", *range(10, 15))
    box = opened(tmp_path, bound=4)
    taken = []
    for number in (1, 2, 3):
        taken.append(numbers_of(box.take(number, number - 1)))
        box.learned(number)
    assert taken == [[1, 2, 3, 4], [5, 6, 7], []]
    assert "holds 5 samples; inbox-bound = 4" in (tmp_path / "rejected" / "4.npz.reason.txt").read_text()


def test_pictures_lie_in_their_classes_folders(tmp_path: Path) -> None:
    for name, value in (("b", 90), ("a", 30)):
        (tmp_path / "new" / name).mkdir(parents=True)
        Image.new("RGB", (5, 5), (value, 0, 0)).save(tmp_path / "new" / name / "shot.png")
    images, labels = opened(tmp_path).take(1, 0)
    assert images[:, 0, 0, 0].tolist() == [30, 90] and labels.tolist() == [0, 1]
    assert names_in(tmp_path / "taken") == [f"{RUN}-000001/a/shot.png", f"{RUN}-000001/b/shot.png"]


def test_what_will_not_do_is_put_aside_with_its_reason_and_the_rest_is_learned(tmp_path: Path) -> None:
    drop(tmp_path, "good.npz", 1)
    (tmp_path / "new" / "text.npz").write_text("hello")
    (tmp_path / "new" / "notes.txt").write_text("hello")
    (tmp_path / "new" / "cow").mkdir()
    Image.new("RGB", (5, 5)).save(tmp_path / "new" / "cow" / "text.npz.png")
    np.savez(tmp_path / "new" / "label.npz", images=np.zeros((1, 2, 2), np.uint8), labels=np.array([3]))
    (tmp_path / "new" / "link.npz").symlink_to(tmp_path / "new" / "good.npz")
    os.mkfifo(tmp_path / "new" / "pipe.npz")
    assert numbers_of(opened(tmp_path).take(1, 0)) == [1]
    reasons = {path.name: path.read_text() for path in (tmp_path / "rejected").glob("*.reason.txt")}
    assert set(reasons) == {
        f"{name}.reason.txt" for name in ("text.npz", "notes.txt", "text.npz.png", "label.npz", "link.npz", "pipe.npz")
    }
    assert "label 3 is none of the 3 agreed" in reasons["label.npz.reason.txt"]
    assert "class 'cow'" in reasons["text.npz.png.reason.txt"]
    assert "plain file" in reasons["pipe.npz.reason.txt"]
    assert all(text.count("\n") == 1 for text in reasons.values())


def test_rejected_files_of_one_name_do_not_replace_each_other(tmp_path: Path) -> None:
    box = opened(tmp_path)
    for number in (1, 2):
        (tmp_path / "new" / "a.npz").write_text(str(number))
        box.take(number, 0)
    kept = sorted(path.name for path in (tmp_path / "rejected").iterdir())
    assert kept == ["a.npz", "a.npz.reason.txt", "a~1.npz", "a~1.npz.reason.txt"]


def test_a_round_that_was_given_up_leaves_its_files_to_the_next(tmp_path: Path) -> None:
    drop(tmp_path, "1.npz", 1)
    opened(tmp_path).take(1, 0)  # the machine goes down here; the server goes on
    drop(tmp_path, "1.npz", 2)
    box = opened(tmp_path)
    assert sorted(numbers_of(box.take(2, 0))) == [1, 2]
    box.learned(2)
    assert numbers_of(box.take(3, 2)) == []


def test_a_client_whose_newest_state_is_lost_learns_that_rounds_files_again(tmp_path: Path) -> None:
    box = opened(tmp_path)
    for number in (1, 2):
        drop(tmp_path, f"{number}.npz", number)
        box.take(number, number - 1)
        box.learned(number)
    assert numbers_of(box.take(2, 1)) == [2]  # the same round again
    assert numbers_of(opened(tmp_path).take(3, 1)) == [2]  # or the next one, from the state of round 1


def test_another_run_takes_over_what_was_not_learned(tmp_path: Path) -> None:
    box = opened(tmp_path)
    drop(tmp_path, "1.npz", 1)
    box.take(1, 0)
    box.learned(1)
    drop(tmp_path, "2.npz", 2)
    box.take(2, 1)
    assert numbers_of(opened(tmp_path, "other").take(1, 0)) == [2]
    assert names_in(tmp_path / "done") == [f"{RUN}-000001/1.npz"]


def test_an_inbox_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"inbox = .*file: cannot be used"):
        opened(tmp_path / "file")


# --- crashes ---------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is killed here; nothing catches it."""


class Disk:
    """Counts what changes the disk, and kills the process before the k-th change."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.done = 0
        for place, name in (
            (Path, "rename"),
            (Path, "mkdir"),
            (Path, "unlink"),
            (Path, "write_bytes"),
            (inbox, "sync_folder"),
            (shutil, "rmtree"),
            (durable.os, "replace"),
            (durable.os, "fsync"),
        ):
            patch.setattr(place, name, self._counted(getattr(place, name)))

    def _counted(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                raise Crash
            self.left -= 1
            self.done += 1
            return change(*args, **kwargs)

        return counted


def empty() -> ClientState:
    return ClientState(torch.zeros(3, dtype=torch.bool), Samples.none((3, SIZE, SIZE)), RUN)


def learn(folder: Path, number: int, *, keep: bool) -> None:
    """One round of a client whose model is the list of all samples that it has learned."""
    store = ClientStore(folder / "state", empty())
    if store.answer(number) is not None:
        return
    state = store.before(number)
    box = opened(folder / "inbox", keep=keep, bound=4)
    taken = numbers_of(box.take(number, state.round))
    if not taken:
        return
    ledger = torch.cat([state.extra.get("ledger", torch.empty(0, dtype=torch.int64)), torch.tensor(taken)])
    store.save_trained(
        replace(state, round=number, follows=state.round, extra={"ledger": ledger}), Answer({}, len(taken), {})
    )
    box.learned(number)


def ledger_of(folder: Path, number: int) -> list[int]:
    return sorted(ClientStore(folder / "state", empty()).before(number + 1).extra["ledger"].tolist())


def live(folder: Path, disk: Disk, kills: list[int], *, keep: bool, skips: bool) -> list[int]:
    """Rounds until everything that arrived is learned, the process killed after each of ``kills`` further changes."""
    number, arrived, waiting = 1, 0, iter(kills)
    disk.left = next(waiting, -1)
    while number <= 3 or names_in(folder / "inbox" / "new") or disk.left >= 0:
        if arrived < number <= 3:
            left, disk.left = disk.left, -1
            taken = (
                folder / "inbox" / "new" / "same.npz"
            ).exists()  # a producer uses a name again, but replaces nothing
            drop(folder / "inbox", f"{number}.npz" if taken else "same.npz", 10 * number, 10 * number + 1)
            disk.left, arrived = left, number
        try:
            learn(folder, number, keep=keep)
        except Crash:
            disk.left = next(waiting, -1)
            number += skips  # the server goes on without this client, or asks again
            continue
        if number > 6 + len(kills):
            disk.left = -1
        number += 1
    disk.left = -1
    learn(folder, number, keep=keep)
    return ledger_of(folder, number)


EVERYTHING = [10, 11, 20, 21, 30, 31]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("skips", [True, False])
def test_a_crash_at_any_change_of_the_disk_loses_no_sample_and_learns_none_twice(
    keep: bool, skips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    live(tmp_path / "whole", disk, [], keep=keep, skips=skips)
    changes = disk.done
    assert changes > 60
    for kill in range(changes):
        folder = tmp_path / str(kill)
        assert live(folder, disk, [kill], keep=keep, skips=skips) == EVERYTHING, f"killed before change {kill}"
        files = names_in(folder / "inbox")
        assert not keep or len([name for name in files if name.endswith(".npz")]) == 3


@settings(suppress_health_check=list(HealthCheck))
@given(kills=st.lists(st.integers(0, 40), min_size=2, max_size=6), keep=st.booleans(), skips=st.booleans())
def test_crashes_during_recovery_too(
    kills: list[int], keep: bool, skips: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("life")
        assert live(folder, Disk(patch), kills, keep=keep, skips=skips) == EVERYTHING


# --- whole runs ------------------------------------------------------------------------------------------------------

DIGITS = ",".join("0123456789")


def at(folder: Path) -> Callable[[int], dict[str, str]]:
    """Where each client's SuperNode finds its data."""
    return lambda client: {
        keys.INBOX: str(folder / f"client-{client}"),
        keys.TEST: str(folder / f"client-{client}" / "test"),
    }


def over_inbox(make: Make, **changes: Any) -> Config:
    bound = 2 * 8
    return make(data_source="inbox", class_names=DIGITS, image_size=8, inbox_bound=bound, normalise=False, **changes)


@pytest.mark.parametrize("method", ["fedkace", "er", "ofcl", "refed", "fedcbdr", "tfcl", "dcfcl"])
def test_a_run_over_inboxes_is_the_run_over_the_stream(method: str, small: Make, tmp_path: Path) -> None:
    stream = small(run_name="stream", method=method, normalise=False)
    run_inline(stream)
    feed(stream, tmp_path / "data")
    arriving = over_inbox(small, run_name="inbox", method=method)
    run_inline(arriving, node_config=at(tmp_path / "data"))
    lines, wanted = rounds_of(tmp_path / "inbox"), rounds_of(tmp_path / "stream")
    assert lines == wanted and len(lines) == 3
    ours, theirs = (Checkpoints(tmp_path / name / "server").newest() for name in ("inbox", "stream"))
    assert ours is not None and theirs is not None
    assert all(np.array_equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)


@pytest.fixture
def device(small: Make, tmp_path: Path) -> Iterator[Callable[[str, int], Message]]:
    """Client 0 on a device: ``send(kind, round)``."""
    config = over_inbox(small)
    feed(small(rounds=3), tmp_path / "source")
    weights = as_arrays(Experiment(config).initial_weights())
    shutil.copytree(tmp_path / "source" / "client-0" / "test", tmp_path / "data" / "client-0" / "test")

    def send(kind: str, number: int) -> Message:
        grid = InlineGrid(client_app.app, 3, config.flat(), 1, at(tmp_path / "data"))
        content = keys.instruction(keys.array_record(weights), {keys.RUN: RUN}, 0, number)
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=2, message_type=kind)])
        return reply

    yield send


def arrive(tmp_path: Path, number: int) -> None:
    name = f"chunk-{number:06d}.npz"
    shutil.copy(tmp_path / "source" / "client-0" / "new" / name, tmp_path / "data" / "client-0" / "new" / name)


def test_an_empty_inbox_sits_the_round_out_and_goes_on_answering(
    device: Callable[[str, int], Message], tmp_path: Path
) -> None:
    nothing = device(MessageType.TRAIN, 1)
    assert nothing.content.metric_records[keys.METRICS] == {keys.EXAMPLES: 0, keys.SAT_OUT: 1}
    assert not nothing.content.array_records
    assert device(MessageType.EVALUATE, 1).content.metric_records[keys.METRICS] == {keys.EXAMPLES: 0}

    arrive(tmp_path, 1)
    first = device(MessageType.TRAIN, 2).content.metric_records[keys.METRICS]
    assert first[keys.EXAMPLES] == 16
    before = device(MessageType.EVALUATE, 2).content.metric_records[keys.METRICS]
    assert device(MessageType.TRAIN, 3).content.metric_records[keys.METRICS][keys.SAT_OUT] == 1
    after = device(MessageType.EVALUATE, 3).content.metric_records[keys.METRICS]
    assert after[keys.ACCURACY] == before[keys.ACCURACY] and after[keys.SEEN_CLASSES] == before[keys.SEEN_CLASSES]


def test_buffers_on_a_device_hold_pixels(device: Callable[[str, int], Message], tmp_path: Path) -> None:
    device(MessageType.TRAIN, 1)
    arrive(tmp_path, 1)
    device(MessageType.TRAIN, 2)
    (path,) = (tmp_path / "run" / "clients" / "client-000").glob("state-*.npz")
    content = durable.read(path)
    assert content is not None
    assert content[0]["buffer.content"].dtype == np.uint8 and content[0]["buffer.content"].shape[1:] == (3, 8, 8)


def test_without_a_test_folder_no_accuracy_is_reported(small: Make, tmp_path: Path) -> None:
    feed(small(), tmp_path / "data")
    config = over_inbox(small)
    run_inline(config, node_config=lambda client: {keys.INBOX: str(tmp_path / "data" / f"client-{client}")})
    lines = rounds_of(tmp_path / "run")
    assert [line["accuracy"] for line in lines] == [None, None, None]
    assert [line["buffer_size"] for line in lines] == [[16, 16, 16], [18, 18, 18], [20, 20, 20]]
    assert all(gap is not None for gap in lines[0]["gap"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"class-names": ""}, "at least two different names"),
        ({"class-names": "a,a"}, "at least two different names"),
        ({"image-size": 0}, "image-size = 0"),
        ({"capacity": 9}, "capacity = 9: must be at least the number of classes, 10"),
        ({"method": "centralized"}, "keeps all data"),
    ],
)
def test_what_an_inbox_needs_is_asked_for_before_any_round(changes: dict[str, Any], words: str) -> None:
    base = {"data-source": "inbox", "class-names": DIGITS, "image-size": 8}
    Config.parse(base)
    with pytest.raises(ConfigError, match=words):
        Config.parse({**base, **changes})


def test_a_node_without_an_inbox_or_with_two_clients_says_so(small: Make, tmp_path: Path) -> None:
    config = over_inbox(small)
    content = {keys.RUN: RUN}
    for nodes, node_config, words in (
        (3, lambda client: {}, "start the SuperNode with --node-config"),
        (2, at(tmp_path), "need as many SuperNodes"),
    ):
        grid = InlineGrid(client_app.app, nodes, config.flat(), 1, node_config)
        weights = keys.array_record(as_arrays(Experiment(config).initial_weights()))
        message = Message(keys.instruction(weights, content, 2, 1), dst_node_id=2 + 2 % nodes, message_type="train")
        (reply,) = grid.send_and_receive([message])
        assert words in reply.error.reason


def test_feeding_at_intervals_drops_whole_files(small: Make, tmp_path: Path) -> None:
    feed(small(rounds=2), tmp_path, every=0.01)
    files = names_in(tmp_path)
    expected = itertools.product(range(3), ("new/chunk-000001.npz", "new/chunk-000002.npz", "test/test.npz"))
    assert files == sorted(f"client-{client}/{name}" for client, name in expected)
