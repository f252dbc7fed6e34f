"""A run's folder and its numbers."""

import json
import math
import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.messaging import wire
from fedkace_flwr.results.record import summarise
from fedkace_flwr.results.run_folder import RunFolder
from fedkace_flwr.rounds.server_round import RoundReport, busy_seconds


def span(started: float, finished: float) -> dict[str, float]:
    return {wire.STARTED: started, wire.FINISHED: finished}


def made(number: int, clients: int = 3, **changes: Any) -> dict[str, Any]:
    """A round's record of two clients that trained and were tested; the third is missing."""
    at = 100.0 * number
    arguments: dict[str, Any] = {
        "trained": {
            0: span(at, at + 2) | {wire.TRAINING_SECONDS: 1.5, wire.SELECTION_SECONDS: 0.25, wire.BUFFER_SIZE: 4},
            2: span(at + 1, at + 4) | {wire.TRAINING_SECONDS: 2.5, wire.BUFFER_CLASSES: [1, 3], wire.BUFFER_SIZE: 4},
        },
        "evaluated": {
            0: span(at + 5, at + 6) | {wire.ACCURACY: 0.5, wire.SEEN_CLASSES: 2, wire.EVALUATION_SECONDS: 1.0},
            2: span(at + 5, at + 5.5)
            | {wire.ACCURACY: 0.25, wire.SEEN_CLASSES: 4, wire.SWITCHED_AT: 3, wire.EVALUATION_SECONDS: 0.5},
        },
        "drift": 0.125,
        "failures": [{"client": 1, "phase": "training", "reason": "no reply"}],
        "down": Counter({0: 600, 1: 400}),
        "up": Counter({0: 900}),
        "seconds": 7.5,
    }
    return RoundReport(number, tuple(range(clients)), **(arguments | changes)).record(clients)


def nothing(number: int, clients: int = 3) -> dict[str, Any]:
    """A round in which no client could be tested."""
    return made(number, clients, trained={}, evaluated={}, drift=None, failures=[])


def strictly(text: str) -> Any:
    """Read JSON; NaN and Infinity, which are none, are errors."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [strictly(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


# One round


def test_a_round_worked_by_hand() -> None:
    record = made(2)
    assert record["round"] == 2
    assert record["accuracy"] == 0.375
    assert record["chance"] == 0.375  # (1/2 + 1/4) / 2
    assert record["client_drift"] == 0.125
    assert record["bytes"] == {"down": 1000, "up": 900}
    assert record["failures"] == [{"client": 1, "phase": "training", "reason": "no reply"}]
    assert record["seconds"] == {
        "round": 7.5,
        "training": 4.0,
        "selection": 0.25,
        "evaluation": 1.5,
        "transport": 2.5,  # busy from 0 to 4 and from 5 to 6
    }


def test_a_client_that_is_missing_is_null_in_every_column() -> None:
    record = made(1)
    assert record["client_accuracy"] == [0.5, None, 0.25]
    assert record["seen_classes"] == [2, None, 4]
    assert record["switched_at"] == [None, None, 3]
    assert record["buffer_size"] == [4, None, 4]
    assert record["buffer_classes"] == [None, None, [1, 3]]
    columns = [value for name, value in record.items() if isinstance(value, list) and name != "failures"]
    assert columns
    assert all(len(column) == 3 and column[1] is None for column in columns)


def test_a_round_without_any_client_is_all_null() -> None:
    record = strictly(json.dumps(nothing(1), allow_nan=False))
    assert record["accuracy"] is None
    assert record["chance"] is None
    assert record["client_accuracy"] == [None, None, None]
    assert record["seconds"] == {"round": 7.5, "training": 0, "selection": 0, "evaluation": 0, "transport": 7.5}


def test_every_time_stands_under_seconds() -> None:
    """Two runs of one seed differ in nothing else."""

    def at_another_time(phase: dict[int, dict[str, Any]], shift: float) -> dict[int, dict[str, Any]]:
        times = {wire.STARTED, wire.FINISHED} | {key for key in vars(wire).values() if str(key).endswith("-seconds")}
        return {k: {n: v + shift if n in times else v for n, v in m.items()} for k, m in phase.items()}

    phase = {0: span(1, 2) | {wire.ACCURACY: 0.5, wire.SEEN_CLASSES: 2, wire.TRAINING_SECONDS: 1.0}}
    first = made(1, trained=phase, evaluated=phase, seconds=9.0)
    phase = at_another_time(phase, 3.25)
    other = made(1, trained=phase, evaluated=phase, seconds=11.0)
    assert first["seconds"] != other["seconds"]
    assert first | {"seconds": None} == other | {"seconds": None}


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([], 0),
        ([span(1, 9), span(2, 3), span(4, 10)], 9),
        ([span(1, 2), span(4, 7)], 4),
        ([{wire.ACCURACY: 1.0}, span(1, 2)], 1),
    ],
)
def test_busy_seconds_worked_by_hand(spans: list[dict[str, float]], busy: float) -> None:
    assert busy_seconds(spans) == busy
    assert busy_seconds(spans[::-1]) == busy


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=6), st.randoms(use_true_random=False))
def test_busy_seconds_are_the_seconds_in_which_anyone_works(
    spans: list[tuple[int, int]], shuffle: random.Random
) -> None:
    ticks = {second for start, length in spans for second in range(start, start + length)}
    rows = [span(start, start + length) for start, length in spans]
    shuffle.shuffle(rows)
    assert busy_seconds(rows) == len(ticks)


def test_transport_is_never_negative_when_clocks_disagree() -> None:
    assert made(1, seconds=0.5)["seconds"]["transport"] == 0.0


# The folder


@pytest.mark.parametrize("deep", ["", "deeper/still"])
def test_a_folder_below_a_file_is_refused_with_key_and_path(tmp_path: Path, deep: str) -> None:
    (tmp_path / "file").write_text("mine")
    path = tmp_path / "file" / "run" / deep
    with pytest.raises(RunError) as caught:
        RunFolder(path)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert text.startswith("results-dir: ")
    assert str(path) in text
    assert "cannot be written" in text
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_the_system_does_not_let_anyone_write_is_refused() -> None:
    with pytest.raises(RunError, match="results-dir: /proc/fedkace: cannot be written"):
        RunFolder(Path("/proc/fedkace"))


def test_the_rounds_of_another_run_are_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    RunFolder(path).add_round(made(1))
    before = (path / "rounds.jsonl").read_bytes()
    with pytest.raises(RunError) as caught:
        RunFolder(path)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "run-name = 'mine'" in text
    assert str(path) in text
    assert (path / "rounds.jsonl").read_bytes() == before


def test_a_run_that_ended_before_its_first_round_may_be_started_again(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").begin(Config(), torch.device("cpu"), "token")
    RunFolder(tmp_path / "run").begin(Config.parse({"seed": 3}), torch.device("cpu"), "token")
    assert strictly((tmp_path / "run" / "config.json").read_text())["seed"] == 3


def test_config_and_environment_are_there_before_the_first_round(tmp_path: Path) -> None:
    config = Config.parse({"overlap": 0, "learning-rate": 1})
    RunFolder(tmp_path / "run").begin(config, torch.device("cpu"), "token")
    assert Config.parse(strictly((tmp_path / "run" / "config.json").read_text())) == config
    environment = strictly((tmp_path / "run" / "environment.json").read_text())
    assert environment["torch"].startswith(torch.__version__.partition("+")[0])
    assert environment["flwr"].startswith("1.")
    assert environment["cores"] >= 1
    assert environment["gpu"] is None
    names = [".fedkace", ".lock", "config.json", "environment.json"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names


def test_each_round_is_readable_as_soon_as_it_is_added(tmp_path: Path) -> None:
    folder, kept = RunFolder(tmp_path / "run"), []
    for number in (1, 2, 3):
        folder.add_round(made(number))
        kept.append(made(number))
        assert lines(tmp_path / "run") == kept
        assert (tmp_path / "run" / "rounds.jsonl").read_text().endswith("}\n")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_none_is_an_error_and_never_written(tmp_path: Path, number: float) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.add_round(made(1))
    with pytest.raises(ValueError, match="JSON"):
        folder.add_round(made(2, drift=number))
    assert lines(tmp_path / "run") == [made(1)]


# The summary


def test_the_summary_worked_by_hand(tmp_path: Path) -> None:
    config = Config.parse({"clients": 3, "seed": 5})
    folder = RunFolder(tmp_path / "run")
    late = {
        0: span(305, 306) | {wire.ACCURACY: 1.0, wire.SEEN_CLASSES: 5, wire.SWITCHED_AT: 2},
        2: span(305, 306) | {wire.ACCURACY: 0.75, wire.SEEN_CLASSES: 4, wire.SWITCHED_AT: 3},
    }
    for record in (made(1), nothing(2), made(3, evaluated=late, failures=[], up=Counter({0: 1}))):
        folder.add_round(record)
    summary = folder.finish(config)
    assert strictly((tmp_path / "run" / "summary.json").read_text()) == summary
    assert summary["average_accuracy"] == pytest.approx((0.375 + 0.875) / 2, abs=1e-15)
    assert summary["final_accuracy"] == 0.875
    assert summary["average_chance"] == pytest.approx((0.375 + 0.225) / 2, abs=1e-15)
    assert summary["switched_at"] == [2, None, 3]
    assert summary["failures"] == 1
    assert summary["bytes"] == {"down": 3000, "up": 1801}
    assert summary["seconds"] == {"round": 22.5, "training": 8, "selection": 0.5, "evaluation": 1.5, "transport": 12.5}
    assert {key: summary[key] for key in ("method", "dataset", "clients", "rounds", "seed")} == {
        "method": "fedkace",
        "dataset": "digits",
        "clients": 3,
        "rounds": 3,
        "seed": 5,
    }


def test_the_summary_of_a_run_in_which_nobody_answered_holds_null_and_no_nan(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.add_round(nothing(1))
    folder.finish(Config())
    summary = strictly((tmp_path / "run" / "summary.json").read_text())
    assert summary["average_accuracy"] is None
    assert summary["final_accuracy"] is None
    assert summary["average_chance"] is None
    assert summarise(Config(), [])["switched_at"] == []


# The picture


def picture(folder: Path, rounds: list[dict[str, Any]]) -> np.ndarray:
    """Finish a run of these rounds without any warning, and read its picture."""
    run = RunFolder(folder)
    for record in rounds:
        run.add_round(record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.finish(Config())
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    with Image.open(folder / "accuracy.png") as image:
        image.load()
        assert 600 <= image.width <= 2000
        assert 300 <= image.height <= 1500
        return np.asarray(image.convert("RGB"), dtype=np.int16)


def red(image: np.ndarray) -> int:
    """Pixels in the colour of the switches."""
    accent = np.array([0xD1, 0x49, 0x5B])
    return int((np.abs(image - accent).max(axis=2) < 20).sum())


@pytest.mark.slow
def test_the_picture_shows_accuracy_and_switches(tmp_path: Path, pictures: None) -> None:
    rounds = [made(number) for number in (1, 2, 3, 4)]
    shown = picture(tmp_path / "a", rounds)
    assert len(np.unique(shown.reshape(-1, 3), axis=0)) > 20
    assert red(shown) > 20
    still = [record | {"switched_at": [None] * 3} for record in rounds]
    assert red(picture(tmp_path / "b", still)) == 0


def test_the_picture_is_drawn_with_nulls_and_with_one_round(tmp_path: Path, pictures: None) -> None:
    full = picture(tmp_path / "full", [made(n) for n in (1, 2, 3)])
    gap = picture(tmp_path / "gap", [made(1), nothing(2), made(3)])
    assert not np.array_equal(full, gap)
    single = picture(tmp_path / "one", [made(1)])
    without = picture(tmp_path / "none", [nothing(1)])
    assert not np.array_equal(single, without)
