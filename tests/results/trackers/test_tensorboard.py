"""TensorBoard events, read back by TensorBoard's own reader."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.common import make_events_earlier
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedkace_flwr.clients.fedkace import CONDITION_NUMBER, GAP, METRICS, REPLAY_WEIGHTS, SINGULAR
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.messaging import wire
from fedkace_flwr.results.run_folder import RunFolder
from fedkace_flwr.results.trackers.tensorboard_events import TensorBoard
from fedkace_flwr.results.trackers.tracker import scalars
from fedkace_flwr.rounds.server_round import RoundReport

Make = Callable[..., Config]


def made(number: int, accuracy: float = 0.5) -> dict[str, Any]:
    """A round of three clients; one is missing, one has neither buffered nor measured a gap."""
    report = RoundReport(
        number,
        (0, 1, 2),
        {
            0: {
                REPLAY_WEIGHTS: [1.0, 4.0, 2.5],
                CONDITION_NUMBER: 30.0,
                wire.BUFFER_SIZE: 4,
                wire.BUFFER_CLASSES: [1, 0, 3],
            },
            2: {REPLAY_WEIGHTS: [1.0], wire.BUFFER_SIZE: 0, wire.BUFFER_CLASSES: [0, 0, 0]},
        },
        {
            0: {wire.ACCURACY: accuracy, wire.SEEN_CLASSES: 2, GAP: 0.0, wire.SWITCHED_AT: 3},
            2: {wire.ACCURACY: accuracy / 2, wire.SEEN_CLASSES: 4},
        },
        drift=0.125,
        failures=[{"client": 1, "phase": "training", "reason": "no reply"}],
        down=Counter({0: 600, 1: 400}),
        up=Counter({0: 900}),
        seconds=7.5,
    )
    return report.record(3, METRICS)


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def points(events: EventAccumulator, tag: str) -> dict[int, float]:
    """Value by step; a step that came twice would show as one too many."""
    found = [(event.step, event.value) for event in events.Scalars(tag)]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_the_scalars_of_a_round_worked_by_hand() -> None:
    found = scalars(made(4), 0.25)
    seconds = {tag for tag in found if tag.startswith("seconds/")}
    assert seconds == {f"seconds/{name}" for name in ("round", "training", "selection", "evaluation", "transport")}
    assert {tag: value for tag, value in found.items() if tag not in seconds} == {
        "accuracy/mean": 0.375,
        "accuracy/chance": 0.375,
        "accuracy/average_so_far": 0.25,
        "client_accuracy/0": 0.5,
        "client_accuracy/2": 0.25,
        "gap/0": 0.0,
        "condition_number/0": 30.0,
        "buffer_size/0": 4,
        "buffer_size/2": 0,
        "replay_weight/0": 2.5,
        "replay_weight/2": 1.0,
        "run/client_drift": 0.125,
        "run/switched": 1,
        "run/failures": 1,
        "run/alarms": 0,
        "bytes/down": 1000,
        "bytes/up": 900,
    }


def test_a_singular_matrix_leaves_no_point() -> None:
    record = {**made(4), "condition_number": [SINGULAR, None, 7.0]}
    assert {tag: value for tag, value in scalars(record, None).items() if tag.startswith("cond")} == {
        "condition_number/2": 7.0
    }


def test_a_round_without_any_client_still_has_a_cost() -> None:
    record = RoundReport(1, (), down=Counter({0: 5}), seconds=1.0).record(2)
    found = scalars(record, None)
    assert found["bytes/down"] == 5
    assert not any(tag.startswith(("accuracy", "client", "gap", "replay")) for tag in found)
    assert "run/client_drift" not in found


@pytest.mark.slow
def test_a_run_leaves_events_that_say_what_its_record_says(small: Make, tmp_path: Path) -> None:
    run_inline(small(tracker="tensorboard", epochs=2))
    folder = tmp_path / "run"
    events = read(folder)
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    assert len(rounds) == 3
    close = pytest.approx
    for tag, name in (
        ("accuracy/mean", "accuracy"),
        ("accuracy/chance", "chance"),
        ("run/client_drift", "client_drift"),
    ):
        assert points(events, tag) == close({record["round"]: record[name] for record in rounds}), tag
    for group in ("bytes", "seconds"):
        for name in rounds[0][group]:
            assert points(events, f"{group}/{name}") == close({r["round"]: r[group][name] for r in rounds}, abs=1e-6)
    for tag in ("client_accuracy", "gap", "condition_number", "buffer_size"):
        for client in range(3):
            known = {r["round"]: r[tag][client] for r in rounds if r[tag][client] not in (None, SINGULAR)}
            assert known, tag
            assert points(events, f"{tag}/{client}") == close(known), tag
    for client in range(3):
        assert points(events, f"replay_weight/{client}") == close(
            {r["round"]: r["replay_weights"][client][-1] for r in rounds}
        )
        for event, record in zip(events.Histograms(f"buffer_classes/{client}"), rounds, strict=True):
            assert list(event.histogram_value.bucket) == record["buffer_classes"][client]
            assert list(event.histogram_value.bucket_limit) == [label + 0.5 for label in range(10)]
    so_far = points(events, "accuracy/average_so_far")
    assert so_far[2] == close((rounds[0]["accuracy"] + rounds[1]["accuracy"]) / 2)
    assert so_far[3] == close(summary["average_accuracy"])
    assert [(event.step, event.histogram_value.num) for event in events.Histograms("replay_weights")] == [
        (number, 3 * 2) for number in (1, 2, 3)
    ]


def test_a_round_can_be_read_while_the_run_goes_on(small: Make, tmp_path: Path) -> None:
    config = small(tracker="tensorboard")
    folder = RunFolder(tmp_path / "run")
    folder.begin(config, torch.device("cpu"), "token")
    for number, accuracy in ((1, 1.0), (2, 0.5)):
        folder.add_round(made(number, accuracy))
    assert points(read(tmp_path / "run"), "accuracy/average_so_far") == {1: 0.75, 2: 0.5625}


def test_who_goes_on_at_a_round_purges_what_was_written_of_it_and_later_ones(tmp_path: Path) -> None:
    stopped = TensorBoard(tmp_path, Config(), first_round=1)
    for number in (1, 2, 3, 4):
        stopped.add(made(number, 0.25), 0.25)
    make_events_earlier(tmp_path)
    resumed = TensorBoard(tmp_path, Config(), first_round=3)
    assert points(read(tmp_path), "accuracy/mean").keys() == {1, 2}
    resumed.add(made(3, 1.0), 0.5)
    resumed.close()
    events = read(tmp_path)
    assert points(events, "client_accuracy/0") == {1: 0.25, 2: 0.25, 3: 1.0}
    assert [event.step for event in events.Histograms("buffer_classes/0")] == [1, 2, 3]


def test_without_the_key_there_are_no_events(small: Make, tmp_path: Path) -> None:
    run_inline(small(rounds=1))
    assert (tmp_path / "run" / "summary.json").exists()
    assert not list(tmp_path.rglob("*tfevents*"))


@pytest.fixture
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)


def test_without_the_package_a_run_that_asks_for_events_ends_before_it_begins(
    without_tensorboard: None, small: Make, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_inline(small(tracker="tensorboard"))
    message = str(caught.value)
    assert message.startswith("tracker = 'tensorboard': ")
    assert message.endswith("pip install 'fedkace-flwr[tensorboard]'")
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_without_the_package_a_run_that_asks_for_none_is_none_the_worse(
    without_tensorboard: None, small: Make, tmp_path: Path
) -> None:
    run_inline(small(rounds=1))
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_a_study_takes_the_key(tmp_path: Path) -> None:
    study = tmp_path / "trial.yaml"
    study.write_text("config: {clients: 2, rounds: 1, epochs: 1, width: 4, tracker: tensorboard}\nengine: inline\n")
    assert main(["run", str(study), "--results", str(tmp_path / "results")]) == 0
    (file,) = (tmp_path / "results").rglob("*tfevents*")
    assert (file.parent / "rounds.jsonl").exists()
