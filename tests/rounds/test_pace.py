"""When rounds over inboxes begin."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MessageType
from PIL import Image
from support.common import FakeTime, rounds_of
from support.doubles.grids import RecordingGrid

from fedkace_flwr import client_app, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.experiments.feed import feed
from fedkace_flwr.messaging import wire
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.rounds.exchange import client_of
from fedkace_flwr.rounds.server_round import EVALUATION, TRAINING, RoundReport
from fedkace_flwr.storage.checkpoint import Checkpoints

Make = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")

ASK = f"{MessageType.QUERY}.{wire.WAITING}"


class Devices(RecordingGrid):
    """Three devices with inboxes; ``happen(seconds)`` is called whenever the server looks at a clock that has moved."""

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__(client_app.app, config.stream.clients)
        for client, context in enumerate(self._contexts.values()):
            context.node_config |= {wire.INBOX: str(folder / f"client-{client}")}
            context.run_config = config.flat()

    def kinds(self) -> list[str]:
        return [message.metadata.message_type for message in self.sent]


@pytest.fixture
def chunks(made: Make, tmp_path: Path) -> Path:
    """Three chunks of each client, kept apart from the inboxes."""
    feed(made("fed"), tmp_path / "source")
    return tmp_path / "source"


def arrive(source: Path, inboxes: Path, number: int, clients: Any = range(3)) -> None:
    for client in clients:
        new = inboxes / f"client-{client}" / "new"
        new.mkdir(parents=True, exist_ok=True)
        name = f"chunk-{number:06d}.npz"
        (new / name).write_bytes((source / f"client-{client}" / "new" / name).read_bytes())


def living(made: Make, **changes: Any) -> Config:
    digits = ",".join("0123456789")
    inbox = {"dataset": "inbox", "class_names": digits, "image_size": 8, "inbox_bound": 16, "normalise": False}
    return made("living", rounds=0, **inbox, **changes)


def at(clock: FakeTime, seconds: float, act: Callable[[], object]) -> None:
    """Do something when the clock of the server reaches a time."""
    sleep, done = clock.sleep, list[bool]()

    def advance(by: float) -> None:
        sleep(by)
        if clock.now >= seconds and not done:
            done.append(True)
            act()

    clock.sleep = advance  # type: ignore[method-assign,assignment]


def test_rounds_follow_the_samples_and_no_model_travels_in_between(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config, inboxes, begun = living(made, round_interval=3600.0), tmp_path / "inboxes", clock.now
    arrive(chunks, inboxes, 1)
    at(clock, begun + 10 * 3600 + 5, lambda: arrive(chunks, inboxes, 2))
    at(clock, begun + 30 * 3600 + 5, Orders(tmp_path / "living").stop)
    grid = Devices(config, inboxes)
    server_app.run(grid, config, run_id=1)
    assert [record["round"] for record in rounds_of(tmp_path / "living")] == [1, 2]
    kinds = [kind for kind in grid.kinds() if kind != MessageType.QUERY]
    first = kinds.index(MessageType.TRAIN)
    second = first + 6 + kinds[first + 6 :].index(MessageType.TRAIN)
    assert kinds[first : first + 6] == [MessageType.TRAIN] * 3 + [MessageType.EVALUATE] * 3
    assert set(kinds[first + 6 : second]) == set(kinds[second + 6 :]) == {ASK}
    assert 85 <= kinds.count(ASK) <= 95, "three devices, once an hour"
    ask = next(message for message in grid.sent if message.metadata.message_type == ASK)
    assert wire.size_in_bytes(ask.content) < 100


def test_a_round_waits_until_the_devices_together_have_enough(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config, inboxes, begun = living(made, round_samples=32), tmp_path / "inboxes", clock.now
    arrive(chunks, inboxes, 1, [0])
    arrive(chunks, inboxes, 2, [0])  # a second chunk, of which a round could not take any more
    at(clock, begun + 100, lambda: arrive(chunks, inboxes, 1, [2]))
    at(clock, begun + 1000, Orders(tmp_path / "living").stop)
    grid = Devices(config, inboxes)
    server_app.run(grid, config, run_id=1)
    (record,) = rounds_of(tmp_path / "living")
    assert record["sat_out"] == [1]


def test_a_round_does_not_wait_for_more_samples_than_it_can_take(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config, inboxes, begun = living(made, clients=1, round_samples=33), tmp_path / "inboxes", clock.now
    for number in (1, 2, 3):
        arrive(chunks, inboxes, number, [0])
    at(clock, begun + 500, Orders(tmp_path / "living").stop)
    server_app.run(Devices(config, inboxes), config, run_id=1)
    assert len(rounds_of(tmp_path / "living")) == 3


def test_a_sample_that_was_left_does_not_count_against_a_full_inbox(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config, inboxes, begun = living(made, round_samples=33), tmp_path / "inboxes", clock.now
    arrive(chunks, inboxes, 1, [1, 2])
    new = inboxes / "client-0" / "new"
    (new / "3").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(new / "3" / "first.png")

    def fill() -> None:
        arrive(chunks, inboxes, 2, [1])
        for number in range(16):
            Image.new("RGB", (8, 8), (9, 9, 9 * number)).save(new / "3" / f"{number}.png")

    at(clock, begun + 100, fill)
    at(clock, begun + 1000, Orders(tmp_path / "living").stop)

    class OneGoes(Devices):
        def get_node_ids(self) -> list[int]:
            nodes = list(super().get_node_ids())
            return nodes[:2] if clock.now > begun + 100 else nodes

    server_app.run(OneGoes(config, inboxes), config, run_id=1)
    assert len(rounds_of(tmp_path / "living")) == 2


def test_a_device_whose_training_fails_starts_rounds_ever_more_rarely(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config, inboxes, begun = living(made), tmp_path / "inboxes", clock.now
    arrive(chunks, inboxes, 1)
    at(clock, begun + 2 * 3600, lambda: arrive(chunks, inboxes, 2, [0]))
    at(clock, begun + 4 * 3600, Orders(tmp_path / "living").stop)

    class Failing(Devices):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            return [
                ""
                if each.metadata.message_type == MessageType.TRAIN and client_of(each) == 2
                else next(iter(super(Failing, self).push_messages([each])))
                for each in messages
            ]

    server_app.run(Failing(config, inboxes), config, run_id=1)
    first, *others = rounds_of(tmp_path / "living")
    assert (first["buffer_size"][2], others[-1]["buffer_size"][2]) == (None, None)
    assert sum(record["sat_out"] == [1] for record in others) == 1, "new samples elsewhere do not wait for it"
    assert 10 <= len(others) <= 14, "after 10 seconds, 20, 40, ..., an hour"


def test_a_device_that_was_away_has_not_failed() -> None:
    """Its samples start a round as soon as it is back."""
    report = RoundReport(1, (0, 1, 2))
    for client, phase, kind in ((0, TRAINING, "absent"), (1, TRAINING, "error"), (2, EVALUATION, "error")):
        report.failures.append({"client": client, "phase": phase, "reason": "", "kind": kind})
    assert report.failed(TRAINING) == {1}


def test_under_secure_aggregation_a_round_waits_for_three_devices(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config, inboxes, begun = living(made, method="fedavg", secagg=True), tmp_path / "inboxes", clock.now
    arrive(chunks, inboxes, 1, [0, 1])
    at(clock, begun + 500, lambda: arrive(chunks, inboxes, 1, [2]))
    at(clock, begun + 1000, Orders(tmp_path / "living").stop)
    server_app.run(Devices(config, inboxes), config, run_id=1)
    (record,) = rounds_of(tmp_path / "living")
    assert "sat_out" not in record and not record["failures"]


def test_the_model_of_two_devices_is_not_looked_at_under_secure_aggregation(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config = living(made, method="fedavg", secagg=True, round_samples=0, round_interval=100.0)
    inboxes, folder, begun = tmp_path / "inboxes", tmp_path / "living", clock.now
    arrive(chunks, inboxes, 1)
    at(clock, begun + 50, lambda: arrive(chunks, inboxes, 2, [0, 1]))
    at(clock, begun + 150, Orders(folder).stop)
    server_app.run(Devices(config, inboxes), config, run_id=1)
    assert rounds_of(folder)[1]["sat_out"] == [2]
    one, two = (Checkpoints(folder / "server").of_round(number).weights for number in (1, 2))
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_samples_of_a_device_that_was_not_drawn_start_the_next_round(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config, inboxes, begun = living(made, fraction_train=0.3), tmp_path / "inboxes", clock.now
    drawn = [config.stream.participants(number, config.run.seed)[0] for number in range(1, 20)]
    last = next(client for client in drawn if client != drawn[0])
    arrive(chunks, inboxes, 1, [last])
    at(clock, begun + 1000, Orders(tmp_path / "living").stop)
    server_app.run(Devices(config, inboxes), config, run_id=1)
    records = rounds_of(tmp_path / "living")
    assert len(records) == drawn.index(last) + 1
    assert [record.get("sat_out", []) for record in records] == [[client] for client in drawn[: len(records) - 1]] + [
        []
    ]


def test_samples_that_arrive_while_others_train_start_the_next_round(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config, inboxes, begun = living(made), tmp_path / "inboxes", clock.now
    arrive(chunks, inboxes, 1, [0])
    at(clock, begun + 1000, Orders(tmp_path / "living").stop)

    class Busy(Devices):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if messages[0].metadata.message_type == MessageType.EVALUATE and not self.of(MessageType.EVALUATE):
                arrive(chunks, inboxes, 1, [1])
            return super().push_messages(messages)

    server_app.run(Busy(config, inboxes), config, run_id=1)
    first, second, *rest = rounds_of(tmp_path / "living")
    assert (first["sat_out"], second["sat_out"]) == ([1, 2], [0, 2]) and not rest


def test_a_round_whose_end_the_server_did_not_live_to_see_goes_on_without_new_samples(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    """All devices have learned what they had, and the server has lost their models."""
    config, inboxes, begun = living(made, resume=True), tmp_path / "inboxes", clock.now
    arrive(chunks, inboxes, 1)

    class Dying(Devices):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if messages[0].metadata.message_type == MessageType.EVALUATE:
                raise KeyboardInterrupt
            return super().push_messages(messages)

    with pytest.raises(KeyboardInterrupt):
        server_app.run(Dying(config, inboxes), config, run_id=1)
    assert not list(inboxes.glob("client-*/new/*"))
    at(clock, begun + 1000, Orders(tmp_path / "living").stop)
    grid = Devices(config, inboxes)
    server_app.run(grid, config, run_id=1)
    (record,) = rounds_of(tmp_path / "living")
    assert "sat_out" not in record and record["accuracy"] is None
    assert len(grid.of(MessageType.TRAIN)) == 3, "and no second round"


def test_samples_that_nobody_can_train_on_start_no_second_round(made: Make, tmp_path: Path, clock: FakeTime) -> None:
    config, inboxes, begun = living(made), tmp_path / "inboxes", clock.now
    new = inboxes / "client-0" / "new"
    new.mkdir(parents=True)
    np.savez(new / "one.npz", images=np.zeros((1, 8, 8, 3), np.uint8), labels=np.array([3]))
    at(
        clock,
        begun + 500,
        lambda: np.savez(new / "two.npz", images=np.zeros((1, 8, 8, 3), np.uint8), labels=np.array([4])),
    )
    at(clock, begun + 1000, Orders(tmp_path / "living").stop)
    server_app.run(Devices(config, inboxes), config, run_id=1)
    first, second = rounds_of(tmp_path / "living")
    assert first["sat_out"] == [0, 1, 2] and second["sat_out"] == [1, 2]


def test_samples_that_come_back_after_all_were_rejected_start_a_round(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config, inboxes, begun = living(made, clients=1, round_samples=2), tmp_path / "inboxes", clock.now
    new = inboxes / "client-0" / "new"
    (new / "tow").mkdir(parents=True)
    for number in range(8):
        Image.new("RGB", (8, 8), (9, 9, 20 * number)).save(new / "tow" / f"{number}.png")
    rejected = inboxes / "client-0" / "rejected"

    def mend() -> None:
        (new / "2").mkdir()
        for path in rejected.glob("*.png"):
            path.rename(new / "2" / path.name)

    at(clock, begun + 500, mend)
    at(clock, begun + 1000, Orders(tmp_path / "living").stop)
    server_app.run(Devices(config, inboxes), config, run_id=1)
    assert [record.get("sat_out") for record in rounds_of(tmp_path / "living")] == [[0], None]


def test_a_round_whose_devices_are_gone_goes_on_with_those_that_are_back(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config = living(made, clients=2, away_after=900.0, join_deadline=30.0)
    inboxes, begun = tmp_path / "inboxes", clock.now
    arrive(chunks, inboxes, 1, [0])
    at(clock, begun + 2000, lambda: arrive(chunks, inboxes, 2, [0]))
    at(clock, begun + 20 * 3600, Orders(tmp_path / "living").stop)

    class Alternating(Devices):
        """The second device is away at first; the first one breaks in the second round, and then the other is back."""

        broke = float("inf")

        def get_node_ids(self) -> Iterable[int]:
            first, second, *_ = super().get_node_ids()
            if clock.now < self.broke:
                return [first]
            if clock.now < self.broke + 600:
                return []
            if not (inboxes / "client-1").exists():
                arrive(chunks, inboxes, 1, [1])
            return [second]

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if clock.now > begun + 2000 and any(each.metadata.message_type == MessageType.TRAIN for each in messages):
                self.broke = min(self.broke, clock.now)
            return super().push_messages(messages) if clock.now != self.broke else ["" for _ in messages]

    server_app.run(Alternating(config, inboxes), config, run_id=1)
    _, second = rounds_of(tmp_path / "living")
    assert [client is None for client in second["buffer_size"]] == [True, False]


def test_inboxes_may_lie_in_the_home_of_the_user(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config, begun = living(made), clock.now
    arrive(chunks, tmp_path / "inboxes", 1)
    at(clock, begun + 500, Orders(tmp_path / "living").stop)
    server_app.run(Devices(config, Path("~/inboxes")), config, run_id=1)
    assert [record.get("sat_out") for record in rounds_of(tmp_path / "living")] == [None]


def test_a_run_that_was_stopped_before_its_first_round_leaves_no_model(
    made: Make, tmp_path: Path, clock: FakeTime
) -> None:
    config, begun = living(made), clock.now
    at(clock, begun + 500, Orders(tmp_path / "living").stop)
    server_app.run(Devices(config, tmp_path / "inboxes"), config, run_id=1)
    assert (tmp_path / "living" / "summary.json").exists() and not (tmp_path / "living" / "model").exists()


def test_labels_alone_start_a_round(made: Make, chunks: Path, tmp_path: Path, clock: FakeTime) -> None:
    config, inboxes, begun = living(made, round_samples=2), tmp_path / "inboxes", clock.now
    arrive(chunks, inboxes, 1)
    new = inboxes / "client-1" / "new"
    (new / "unlabelled").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (8, 8), (9, 9, 200)).save(new / "unlabelled" / f"{name}.png")
    at(clock, begun + 500, lambda: (new / "labels.csv").write_text("a.png,3\nb.png,3\n"))
    at(clock, begun + 1000, Orders(tmp_path / "living").stop)
    server_app.run(Devices(config, inboxes), config, run_id=1)
    records = rounds_of(tmp_path / "living")
    assert [record.get("sat_out") for record in records] == [None, [0, 2]]


def test_a_stopped_run_goes_on_only_when_that_is_taken_back(
    made: Make, chunks: Path, tmp_path: Path, clock: FakeTime
) -> None:
    config, inboxes = living(made, resume=True), tmp_path / "inboxes"
    for number in (1, 2):
        arrive(chunks, inboxes, number)
        at(clock, clock.now + 200, Orders(tmp_path / "living").stop)
        server_app.run(Devices(config, inboxes), config, run_id=number)
        assert len(rounds_of(tmp_path / "living")) == number
        server_app.run(Devices(config, inboxes), config, run_id=number)
        assert len(rounds_of(tmp_path / "living")) == number, "it stays stopped"
        Orders(tmp_path / "living").go_on()


def test_a_rollback_does_not_wait_for_the_next_round(made: Make, chunks: Path, tmp_path: Path, clock: FakeTime) -> None:
    """What waited before it starts a round after it, which trains from the old model."""
    config, inboxes, begun = living(made, round_interval=3600.0, round_samples=32), tmp_path / "inboxes", clock.now
    arrive(chunks, inboxes, 1)
    at(clock, begun + 3600 + 5, lambda: arrive(chunks, inboxes, 2))
    at(clock, begun + 2 * 3600 + 5, lambda: arrive(chunks, inboxes, 3, [0]))
    taken: list[float] = []
    at(clock, begun + 10 * 3600 + 100, lambda: Orders(tmp_path / "living").roll_back(1))
    at(clock, begun + 10 * 3600 + 110, lambda: taken.append(len(rounds_of(tmp_path / "living"))))
    at(clock, begun + 12 * 3600, lambda: arrive(chunks, inboxes, 3, [1, 2]))
    at(clock, begun + 30 * 3600, Orders(tmp_path / "living").stop)
    grid = Devices(config, inboxes)
    server_app.run(grid, config, run_id=1)
    lines = rounds_of(tmp_path / "living")
    assert taken == [3] and [line.get("rolled_back_to") for line in lines] == [None, None, 1, None]
    assert lines[2]["buffer_size"] == [None] * 3 and "sat_out" not in lines[3]


def test_a_device_is_asked_without_importing_pytorch(tmp_path: Path) -> None:
    program = (
        "import sys; from flwr.app import *; from fedkace_flwr import apps; from fedkace_flwr.messaging import wire;"
        "from fedkace_flwr.flower.internals import identify_process; identify_process(1, 1);"
        "ask = Message(RecordDict({wire.CONFIG: ConfigRecord({wire.MOST: 9})}), dst_node_id=1,"
        f" message_type='{ASK}');"
        f"reply = apps.client(ask, Context(1, 1, {{wire.INBOX: {str(tmp_path)!r}}}, RecordDict(), {{}}));"
        "print(reply.content.config_records[wire.CONFIG][wire.WAITING], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", "False"], done.stderr
