"""Labels that come rounds after their images, or never: in simulations and on devices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType
from PIL import Image
from support.common import rounds_of
from support.made.inboxes import RUN, names_in
from support.made.stored import read_state

from fedkace_flwr import client_app, server_app
from fedkace_flwr.clients import late
from fedkace_flwr.clients.round import StreamingClient
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.experiments.running.inline import InlineGrid, run_inline
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import AgreedClasses
from fedkace_flwr.seeding import seed_for
from fedkace_flwr.sources import LateInbox, StreamSource

Make = Callable[..., Config]


def rows(*keys: int) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int64)[:, None]


# What is remembered


def test_a_prediction_counts_if_its_class_was_a_possible_answer() -> None:
    seen = torch.tensor([True, False, True])
    extra = late.predicted({}, rows(5, 6, 7), torch.tensor([0, 2, 2]), seen, 3)
    extra = late.predicted(extra, rows(8), torch.tensor([1]), torch.tensor([True, True, True]), 4)
    keys, labels = rows(7, 6, 8, 5, 9), torch.tensor([2, 1, 1, 0, 0])
    assert late.recalled(extra, keys, labels).tolist() == [2, -1, 1, 0, -1]
    assert late.recalled({}, keys, labels).tolist() == [-1] * 5
    left = late.forgotten(extra, keys[:3])
    assert late.recalled(left, keys, labels).tolist() == [-1, -1, -1, 0, -1]
    assert late.unpredicted(left, keys).flatten().tolist() == [7, 6, 8, 9]


def test_predictions_are_kept_of_what_waits_and_of_the_last_others() -> None:
    extra = late.predicted({}, rows(*range(6)), torch.zeros(6, dtype=torch.int64), torch.tensor([True]), 1)

    def kept(waiting: torch.Tensor, others: int) -> list[int]:
        pruned = late.pruned(extra, waiting, others)
        return [key for key in range(6) if not len(late.unpredicted(pruned, rows(key)))]

    assert (
        kept(rows(1, 4, 9), 2) == [1, 3, 4, 5] and kept(rows(1, 4), 0) == [1, 4] and kept(rows(1, 2), 9) == [*range(6)]
    )


# Simulations


def test_labels_come_with_the_delay_and_to_the_share_that_are_asked_for(small: Make) -> None:
    config = small(rounds=4, label_delay=2, label_share=0.5)
    experiment, source = Experiment(config), StreamSource(Experiment(config), 1)
    drawn = Experiment(small(rounds=4)).stream(1).chunks
    expected = [
        ids[np.random.default_rng(seed_for(config.run.seed, "labels", 1, number)).random(len(ids)) < 0.5].tolist()
        for number, ids in enumerate(drawn, start=1)
    ]
    assert 8 < sum(map(len, expected)) < 56
    assert [source.chunk(number, number - 1).content.tolist() for number in (1, 2, 3, 4)] == [[], [], *expected[:2]]
    assert source.late.waiting(1).flatten().tolist() == expected[0]
    assert source.late.waiting(3).flatten().tolist() == expected[1] + expected[2]
    assert set(source.again(4, 3).rounds.tolist()) == {4}
    assert experiment.learned(1, 4).content.tolist() == expected[0] + expected[1]
    assert experiment.drawn(1, 1).content.tolist() == drawn[0].tolist()


def test_with_open_classes_labelled_samples_wait_for_their_class(small: Make) -> None:
    config = small(rounds=4, label_delay=1, classes="open", max_classes=12)
    names = Experiment(config).dataset.class_names
    first = Experiment(small(rounds=4)).chunk(0, 1)
    assert StreamSource(Experiment(config), 0, AgreedClasses()).new_classes(1) == []
    told = StreamSource(Experiment(config), 0, AgreedClasses()).new_classes(2)
    assert told == sorted({names[label] for label in first.labels.tolist()})
    source = StreamSource(Experiment(config), 0, AgreedClasses(tuple(told), (3,) * len(told)))
    assert first.content.tolist() == source.chunk(3, 0).content.tolist()[-len(first) :]


def test_old_predictions_count_in_the_prequential_accuracy(small: Make, tmp_path: Path) -> None:
    config = small(method="er", rounds=5, label_delay=2, window=10, overlap=10, samples_per_class=2)
    run_inline(config)
    records, experiment = rounds_of(tmp_path / "run"), Experiment(config)
    assert [record.get("sat_out") for record in records[:3]] == [[0, 1, 2], [0, 1, 2], None]
    assert [record["accuracy"] is None for record in records] == [True, True, False, False, False]
    for client in range(3):
        folder = tmp_path / "run" / "clients" / f"client-{client:03d}"
        state, chunk = read_state(folder / "state-000004.npz"), experiment.chunk(client, 5)
        keys, answers, rounds = (state.extra[f"late.{name}"] for name in ("keys", "answers", "rounds"))
        assert rounds.tolist() == [3] * 20 + [4] * 20
        predicted = dict(zip(keys.flatten().tolist(), answers.tolist(), strict=True))
        right = torch.tensor([predicted[key] for key in chunk.content.tolist()]) == chunk.labels
        assert records[4]["prequential_samples"][client] == 20
        assert records[4]["prequential_accuracy"][client] == int(right.sum()) / 20
        assert set(read_state(folder / "state-000005.npz").extra["late.rounds"].tolist()) == {4, 5}


def test_classes_whose_labels_have_not_come_count_as_wrong_answers(small: Make, tmp_path: Path) -> None:
    config = small(method="er", rounds=4, label_delay=1)
    run_inline(config)
    record, experiment = rounds_of(tmp_path / "run")[3], Experiment(config)
    for client in range(3):
        classes = [set(experiment.stream(client).windows[number]) for number in range(4)]
        tests = [len(experiment.dataset.test_ids(label)) for label in set().union(*classes)]
        met = [len(experiment.dataset.test_ids(label)) for label in set().union(*classes[:3])]
        assert sum(met) < sum(tests)
        expected = record["client_accuracy"][client] * sum(met) / sum(tests)
        assert record["arrived_accuracy"][client] == pytest.approx(expected)
    run_inline(small(run_name="usual"))
    assert rounds_of(tmp_path / "usual")[2]["arrived_accuracy"] == [None] * 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label_delay": 3}, "label-delay = 3: must be less than rounds = 3"),
        ({"label_delay": 1, "method": "centralized"}, "label-delay = 1 with method = 'centralized'"),
        ({"label_share": 0.5, "method": "centralized"}, "label-share = 0.5 with method = 'centralized'"),
        ({"label_share": 0.0}, "label-share = 0"),
    ],
)
def test_what_cannot_be_is_refused_before_any_round(small: Make, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(small(**changes))


# Devices


class Device:
    """Client 0 on a device: pictures or series that show their class, ``a`` or ``b``, by their colour or sign."""

    def __init__(self, make: Make, folder: Path, **changes: Any) -> None:
        self.home, self.folder = folder / "inbox", folder
        self.suffix = ".npy" if "inbox_shape" in changes else ".png"
        told: dict[str, Any] = {"dataset": "inbox", "class_names": "a,b", "image_size": 8, "rounds": 9, "method": "er"}
        self.config = make(**{**told, **changes})
        self.weights = as_arrays(Experiment(self.config).initial_weights())

    def send(self, kind: str, number: int) -> dict[str, Any]:
        """Send a message; the metrics of the reply, without its costs."""
        grid = InlineGrid(client_app.app, 3, self.config.flat(), 1, lambda client: {wire.INBOX: str(self.home)})
        content = wire.instruction(wire.array_record(self.weights), {wire.RUN: RUN}, 0, number)
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=2, message_type=kind)])
        assert reply.has_content(), reply
        costs = (wire.CPU_SECONDS, wire.PEAK_MEMORY)
        return {name: value for name, value in reply.content.metric_records[wire.METRICS].items() if name not in costs}

    def round(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """A round's replies."""
        return self.send(MessageType.TRAIN, number), self.send(MessageType.EVALUATE, number)

    def arrive(self, name: str, place: str) -> None:
        path = self.home / "new" / place / f"{name}{self.suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.suffix == ".npy":
            np.save(path, np.full((2, 8), 1 if name[0] == "a" else -1, dtype=np.float32))
            return
        Image.new("RGB", (8, 8), (200, 9, 9) if name[0] == "a" else (9, 9, 200)).save(path)

    def extra(self, number: int) -> dict[str, torch.Tensor]:
        return dict(read_state(self.folder / "run" / "clients" / "client-000" / f"state-{number:06d}.npz").extra)


@pytest.fixture
def device(small: Make, tmp_path: Path) -> Device:
    return Device(small, tmp_path)


SERIES = {"image_size": 0, "inbox_shape": "2, 8", "network": "cnn1d"}


@pytest.mark.parametrize("changes", [{}, SERIES], ids=["pictures", "series"])
def test_samples_are_predicted_when_they_come_and_that_counts_when_their_labels_do(
    small: Make, tmp_path: Path, changes: dict[str, Any]
) -> None:
    device = Device(small, tmp_path, **changes)
    for name in ("a1", "b1", "a2", "b2"):
        device.arrive(name, name[0])
    trained, tested = device.round(1)
    assert trained[wire.EXAMPLES] == 4 and tested[wire.UNLABELLED] == 0 and wire.PREQUENTIAL_ACCURACY not in trained
    for name in ("a3", "b3", "a4"):
        device.arrive(name, "unlabelled")
    trained, tested = device.round(2)
    assert trained[wire.SAT_OUT] == 1 and tested[wire.UNLABELLED] == 3 and tested[wire.WAITING] == 0
    answers = dict(zip(["a3", "b3", "a4"], device.extra(1)["late.answers"].tolist(), strict=True))
    device.round(3)
    assert device.extra(1)["late.rounds"].tolist() == [2, 2, 2], "each is predicted once"
    (device.home / "new" / "labels.csv").write_text(f"a3{device.suffix},a\nb3{device.suffix},b\n")
    device.weights["output.weight"] *= -1  # another model would be asked now
    trained, tested = device.round(4)
    assert trained[wire.EXAMPLES] == trained[wire.PREQUENTIAL_SAMPLES] == 2 and tested[wire.UNLABELLED] == 1
    assert trained[wire.PREQUENTIAL_ACCURACY] == ((answers["a3"] == 0) + (answers["b3"] == 1)) / 2
    (device.home / "new" / "unlabelled" / f"a4{device.suffix}").rename(
        device.home / "new" / "a" / f"moved{device.suffix}"
    )
    trained, tested = device.round(5)
    assert trained[wire.PREQUENTIAL_ACCURACY] == (answers["a4"] == 0) and tested[wire.UNLABELLED] == 0
    assert len(device.extra(5)["late.keys"]) == 0
    learned = [Path(name).stem for name in names_in(device.home) if name.endswith(device.suffix)]
    assert sorted(learned) == ["a1", "a2", "a3", "b1", "b2", "b3", "moved"]


def test_what_was_predicted_before_its_class_was_met_is_asked_for_again(device: Device) -> None:
    for name in ("a1", "a2"):
        device.arrive(name, "a")
    device.arrive("b1", "unlabelled")
    device.round(1)
    assert device.extra(1)["late.answers"].tolist() == [0]
    for name in ("b2", "b3"):
        device.arrive(name, "b")
    device.round(2)
    (device.home / "new" / "unlabelled" / "b1.png").rename(device.home / "new" / "b" / "b1.png")
    device.arrive("b4", "unlabelled")
    trained, _ = device.round(3)
    assert trained[wire.PREQUENTIAL_SAMPLES] == 1


def test_what_is_dropped_is_counted_once_whenever_the_client_is_killed(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(small, tmp_path, unlabelled_bound=2, inbox_after="delete")
    for name in ("a1", "a2", "a3", "a4", "a5"):
        device.arrive(name, "unlabelled")

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    for place, name in ((LateInbox, "drop"), (StreamingClient, "_counts")):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(place, name, killed)
            device.send(MessageType.EVALUATE, 1)
    counts = {wire.EXAMPLES: 0, wire.WAITING: 0, wire.REJECTED: 0}
    assert device.send(MessageType.EVALUATE, 1) == counts | {wire.UNLABELLED: 2, wire.DROPPED: 3}
    assert names_in(device.home) == ["new/unlabelled/a4.png", "new/unlabelled/a5.png"]
    device.arrive("a6", "unlabelled")
    (device.home / "new" / "notes.txt").touch()
    told = device.round(2)[1]
    assert told == counts | {wire.UNLABELLED: 2, wire.DROPPED: 4, wire.REJECTED: 1}
    for name in ("a1", "b1"):
        device.arrive(name, name[0])
    assert device.round(3)[1][wire.DROPPED] == 4


def test_a_run_over_inboxes_records_the_old_predictions_and_no_counts(small: Make, tmp_path: Path) -> None:
    devices = [Device(small, tmp_path / str(client), clients=2, rounds=3, round_samples=0) for client in range(2)]
    for device in devices:
        for name in ("a1", "b1"):
            device.arrive(name, name[0])
            device.arrive(name, "unlabelled")
        (device.home / "new" / "labels.csv.part").write_text("a1.png,a\nb1.png,b\n")

    class Late(InlineGrid):
        def _answer(self, message: Message) -> Message:
            told = message.content.config_records[wire.CONFIG]
            if (message.metadata.message_type, told.get(wire.ROUND)) == (MessageType.TRAIN, 3):
                part = devices[int(str(told[wire.CLIENT]))].home / "new" / "labels.csv.part"
                part.rename(part.with_suffix(""))
            return super()._answer(message)

    config = devices[0].config
    grid = Late(client_app.app, 2, config.flat(), 1, lambda client: {wire.INBOX: str(devices[client].home)})
    server_app.run(grid, config, 1)
    records = rounds_of(Path(config.run.results_dir) / config.run.run_name)
    assert records[2]["prequential_samples"] == [2, 2] and records[1].get("sat_out") == [0, 1]
    assert not {"unlabelled", "dropped", "rejected"} & set(json.dumps(records[2]).split('"'))
