"""The ledger of a simulated year, over the inbox and the states of a device."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fedkace_flwr.data.inbox import Inbox
from fedkace_flwr.experiments.soak.ledger import Form, Ledger
from fedkace_flwr.samples import Form as SampleForm
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage import atomic, client_state
from fedkace_flwr.storage.atomic import ANSWER, STATE
from fedkace_flwr.storage.client_state import Answer, ClientState

NODE, RUN, CLASSES = "node-1", "r", ("a", "b")


class Device:
    """A node that takes what is in its inbox, and remembers what a test says."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / NODE
        self.inbox = Inbox(self.home / "inbox", RUN, CLASSES, SampleForm.picture(8), bound=100)
        self._learned = 0

    def learn(self) -> Samples:
        number = self._learned + 1
        images, labels = self.inbox.take(number, self._learned)
        self.inbox.learned(number)
        self._learned = number
        return Samples.arrived(torch.from_numpy(images), torch.from_numpy(labels), number)

    def remember(self, buffer: Samples, *, seen: int = 2, trained: int | None = None) -> None:
        seen_classes = torch.arange(2) < seen
        state = ClientState(seen_classes, buffer, run=RUN, round=self._learned, names=CLASSES)
        folder = self.home / "state" / NODE
        if trained is not None:
            answer = Answer({}, trained, {}).to_record(RUN)
            atomic.write(atomic.path_of(folder, ANSWER, self._learned), *answer)
        path = atomic.path_of(folder, STATE, self._learned)
        atomic.write(path, *state.to_record(), version=client_state.VERSION)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


def drop(ledger: Ledger, number: int, form: Form = "archive", names: Sequence[str] = CLASSES) -> list[str]:
    """Give the node two samples, one of each class."""
    images = np.random.default_rng(number).integers(0, 256, (2, 8, 8), dtype=np.uint8)
    return ledger.drop(NODE, images, names, form)


def test_what_is_learned_once_is_in_order(ledger: Ledger, device: Device) -> None:
    drop(ledger, 0)
    drop(ledger, 1, "pictures")
    assert ledger.waiting(NODE) == 3 and len(ledger.open(NODE)) == 3
    first = device.learn()
    device.remember(first, trained=4)
    ledger.recall(NODE)
    drop(ledger, 2)
    ledger.count(NODE)
    second = device.learn()
    device.remember(first.followed_by(second), trained=2)
    for _ in range(2):
        ledger.count(NODE)
        ledger.recall(NODE)
    ledger.compare()
    assert not ledger.faults and not ledger.open(NODE)
    assert ledger.totals() == {"given": 6, "learned once": 6, "learned again": 0, "not learned": 0}
    assert not list((device.home / "inbox" / "done").iterdir()), "the year's disk does not grow"


def test_a_file_that_is_lost_one_learned_twice_and_one_rejected_are_found(ledger: Ledger, device: Device) -> None:
    for number in range(3):
        drop(ledger, number)
    new = device.home / "inbox" / "new"
    lost, twice, bad = sorted(new.iterdir())
    kept = twice.read_bytes()
    lost.unlink()
    bad.write_bytes(b"nothing")
    device.learn()
    ledger.count(NODE)
    twice.write_bytes(kept)
    device.learn()
    ledger.count(NODE)
    assert ledger.totals() == {"given": 6, "learned once": 0, "learned again": 2, "not learned": 4}
    assert f"{NODE}: {twice.name} was learned in rounds [1, 2]" in ledger.faults
    assert f"{NODE}: {bad.name} was rejected" in ledger.faults and len(ledger.faults) == 2
    assert ledger.open(NODE) == [lost.name, bad.name]


@pytest.mark.parametrize("as_list", [False, True])
def test_labels_come_late_or_never(ledger: Ledger, device: Device, as_list: bool) -> None:
    late, never = drop(ledger, 0, "unlabelled", ("a", ""))
    assert not len(device.learn()) and not ledger.waiting(NODE) and ledger.open(NODE) == [late]
    ledger.label({late: "a"}, as_list=as_list)
    learned = device.learn()
    device.remember(learned, trained=1)
    ledger.count(NODE)
    ledger.recall(NODE)
    ledger.compare()
    assert learned.labels.tolist() == [0] and not ledger.faults and not ledger.open(NODE)
    assert ledger.totals()["learned once"] == ledger.late == 1 and ledger.unlabelled() == (1, 0)
    new = device.home / "inbox" / "new"
    (new / "a").mkdir(exist_ok=True)
    (new / "unlabelled" / never).rename(new / "a" / never)
    device.remember(learned.followed_by(device.learn()))
    ledger.count(NODE)
    ledger.recall(NODE)
    assert f"{NODE}: {never} was learned in round 3, and has no label" in ledger.faults and len(ledger.faults) == 2


def test_a_picture_that_was_not_kept_until_its_label_came_is_found(ledger: Ledger, tmp_path: Path) -> None:
    late, never = drop(ledger, 0, "unlabelled", ("a", ""))
    done = tmp_path / NODE / "inbox" / "done" / "unlabelled"
    done.mkdir(parents=True)
    for name in (late, never):
        next(tmp_path.rglob(name)).rename(done / name)
    ledger.count(NODE)
    ledger.label({late: "a"}, as_list=False)
    faults = ("was put away without having been learned", "was gone before its label came")
    assert ledger.faults == [f"{NODE}: {late} {fault}" for fault in faults] and ledger.unlabelled() == (0, 1)


def test_a_lost_memory_and_a_strange_one_are_found(ledger: Ledger, device: Device) -> None:
    drop(ledger, 0)
    buffer = device.learn()
    device.remember(buffer)
    ledger.count(NODE)
    ledger.recall(NODE)
    assert not ledger.faults
    device.learn()
    device.remember(Samples.none(SampleForm.picture(8)), seen=1)
    ledger.recall(NODE)
    assert len(ledger.faults) == 2 and "had met 2" in ledger.faults[0] and "buffer is empty" in ledger.faults[1]
    device.learn()
    strange = Samples(buffer.content + 1, buffer.labels, buffer.rounds)
    buffer = Samples(buffer.content, buffer.labels.flip(0), buffer.rounds)
    device.remember(strange.followed_by(buffer).followed_by(buffer))
    ledger.recall(NODE)
    assert any("was not given" in fault for fault in ledger.faults)
    assert any("class a, as b" in fault for fault in ledger.faults)
    assert any("2 copies" in fault for fault in ledger.faults)


def test_samples_that_were_trained_on_and_are_filed_under_no_round_are_found(ledger: Ledger, device: Device) -> None:
    drop(ledger, 0)
    device.remember(device.learn(), trained=4)
    ledger.count(NODE)
    ledger.recall(NODE)
    ledger.compare()
    assert ledger.faults == [f"{NODE}: trained on 4 samples in round 1, and has filed 2 under it"]
