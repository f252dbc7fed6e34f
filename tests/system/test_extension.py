"""A run that goes on with more rounds, or with other values of keys that a living run may change."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, MessageType
from support.common import rounds_of
from support.doubles.crashes import TAILS, Disk, choices, lay_out
from support.doubles.faults import FaultyGrid
from support.systems.cut_off import cut_after_round, finished
from support.systems.runs import last, same
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedkace_flwr
from fedkace_flwr import server_app
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.feed import feed
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.messaging import wire
from fedkace_flwr.results import run_folder
from fedkace_flwr.results.run_folder import RunFolder

Make = Callable[..., Config]
CPU = torch.device("cpu")


def folder_of(config: Config) -> Path:
    return Path(config.run.results_dir) / config.run.run_name


def told(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def notes(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """First round and changed keys of each resumption."""
    return [(note["round"], note["changed"]) for note in told(folder, "environment.json")["resumptions"]]


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def without_seconds(folder: Path) -> dict[str, Any]:
    summary = told(folder, "summary.json")
    del summary["seconds"]
    return summary


def test_a_finished_run_goes_on_as_if_it_had_been_planned_longer(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the server dies on the way; meanwhile the run is not finished, and the record tells who resumed it."""
    whole, folder = finished(small(run_name="whole", rounds=4)), finished(small(rounds=2))
    before = (folder / "model" / "model.safetensors").read_bytes()
    monkeypatch.setattr(fedkace_flwr, "__version__", "99.0")
    cut_after_round(small(rounds=4, resume=True), 3, monkeypatch)
    assert not (folder / "summary.json").exists()
    run_inline(small(rounds=4, resume=True))
    assert rounds_of(folder) == rounds_of(whole)
    assert without_seconds(folder) == without_seconds(whole) and told(folder, "config.json")["rounds"] == 4
    assert [path.name for path in (folder / "server").iterdir()] == ["checkpoint-000004.npz"]
    assert same(last(small()), last(small(run_name="whole")))
    assert (folder / "model" / "model.safetensors").read_bytes() != before
    assert notes(folder) == [(3, {"rounds": [2, 4]}), (4, {})]
    assert {note["fedkace_flwr"] for note in told(folder, "environment.json")["resumptions"]} == {"99.0"}


@pytest.mark.slow
def test_trackers_go_on_with_a_longer_run(small: Make) -> None:
    run_inline(small(rounds=1, tracker="tensorboard"))
    run_inline(small(rounds=2, tracker="tensorboard", resume=True))
    events = EventAccumulator(str(folder_of(small()))).Reload()
    assert [event.step for event in events.Scalars("accuracy/mean")] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        {"fraction_train": 0.4, "predict_with": "mean"},
        {"fraction_train": 0.4, "method": "centralized"},
        {"method": "centralized", "centralized_rounds": "every:2"},
        {"stream": "dirichlet:0.5:0.3"},
        {"stream": "quantity-skew"},
        {"dp": "local", "dp_seeded": True, "method": "fedavg"},
    ],
    ids=lambda own: "-".join(map(str, own.values())),
)
def test_what_a_round_keeps_for_the_next_outlives_the_end(small: Make, own: dict[str, Any]) -> None:
    run_inline(small(**own, rounds=3))
    run_inline(small(**own, rounds=4, resume=True))
    run_inline(small(**own, rounds=4, run_name="whole"))
    assert rounds_of(folder_of(small())) == rounds_of(folder_of(small(run_name="whole")))


@pytest.mark.slow
def test_a_run_over_inboxes_always_goes_on(small: Make, tmp_path: Path) -> None:
    feed(small(), tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "whole")
    own = {"dataset": "inbox", "class_names": ",".join("0123456789"), "image_size": 8, "inbox_bound": 16}

    def run(place: str, **changes: Any) -> None:
        config = small(**own, stream="blurred", run_name=f"of-{place}", **changes)
        run_inline(config, node_config=lambda client: {wire.INBOX: str(tmp_path / place / f"client-{client}")})

    run("whole")
    run("data", rounds=2)
    run("data", resume=True)
    assert rounds_of(tmp_path / "of-data") == rounds_of(tmp_path / "of-whole")
    assert len([size for size in rounds_of(tmp_path / "of-data")[-1]["buffer_size"] if size]) == 3


@pytest.mark.parametrize(
    ("own", "rounds", "reason"),
    [
        ({}, 1, "the run has done 2; must be at least that"),
        ({"stream": "blurred"}, 3, "stream = 'blurred' exchanges samples between all rounds"),
        ({"shared_samples": False}, 3, "shared-samples = false divides the samples"),
        ({"method": "tfcl"}, 3, "method = 'tfcl' gives each round its share"),
        ({"method": "centralized", "centralized_rounds": "every:2"}, 3, "centralized-rounds = 'every:2'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_run_that_cannot_become_so_long_says_why(small: Make, own: dict[str, Any], rounds: int, reason: str) -> None:
    folder = finished(small(**own, rounds=2))
    before = content(folder)
    with pytest.raises(ConfigError, match=rf"^rounds = {rounds}: .*{reason}"):
        run_inline(small(**own, rounds=rounds, resume=True))
    assert content(folder) == before


def test_an_interrupted_run_may_end_earlier_but_not_before_what_it_has_done(
    small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_after_round(small(rounds=4), 2, monkeypatch)
    with pytest.raises(ConfigError, match="rounds = 1: the run has done 2"):
        run_inline(small(rounds=1, resume=True))
    run_inline(small(rounds=2, resume=True))
    assert told(folder, "summary.json")["rounds"] == 2 and len(rounds_of(folder)) == 2


def test_a_finished_run_refuses_other_keys_and_a_change_that_no_round_would_use(small: Make) -> None:
    folder = finished(small(rounds=2))
    before = content(folder)
    for own, words in (
        ({"rounds": 3, "method": "er", "capacity": 30}, r"method = 'er', capacity = 30: .*begun with 'fedkace', 20"),
        ({"rounds": 2, "epochs": 2}, "epochs = 2: the run in .* is finished, and was run with 1; set rounds to more"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_inline(small(**own, resume=True))
    run_inline(small(rounds=2, deadline=9.0, resume=True))
    assert content(folder) == before


@pytest.mark.slow
def test_living_keys_change_in_the_middle_of_a_round(small: Make) -> None:
    """Clients that have trained answer as they did, those that have not train with the new values."""

    def cut(kind: str, number: int, client: int, reply: Message) -> Message:
        if (kind, number, client) == (MessageType.TRAIN, 2, 1):
            raise SystemExit("cut off")
        return reply

    config = small(epochs=3)
    with pytest.raises(SystemExit):
        server_app.run(FaultyGrid(config, cut), config, run_id=1)
    new = {"epochs": 2, "learning_rate": 0.02, "quorum": 1.0, "probe": 5.0, "aggregation": "median", "batch_size": 8}
    run_inline(small(**new, resume=True))
    folder = folder_of(config)
    records = rounds_of(folder)
    assert [record["failures"] for record in records] == [[], [], []]
    assert [[len(each) for each in record["replay_weights"]] for record in records] == [[3] * 3, [3, 3, 2], [2] * 3]
    assert notes(folder)[0][0] == 2
    changed = {key: value for key, (_, value) in notes(folder)[0][1].items()}
    assert changed == {key.replace("_", "-"): value for key, value in new.items()}
    kept = told(folder, "config.json")
    assert changed.items() <= kept.items() and kept["resume"] is False  # as the run was begun


def test_a_note_is_kept_for_each_round_and_only_for_the_latest(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_RESUMPTIONS", 2)
    for number in range(1, 5):
        cut_after_round(small(rounds=5, epochs=number, resume=True), number, monkeypatch)
    assert notes(folder_of(small())) == [(3, {"epochs": [2, 3]}), (4, {"epochs": [3, 4]})]


@pytest.mark.slow
def test_a_crash_between_the_writes_of_a_resumption_loses_none_of_them(small: Make, tmp_path: Path) -> None:
    """Whatever is left, the run is not finished with keys that it never used, and the note tells the change once."""
    folder, longer = finished(small(rounds=2)), small(rounds=3, epochs=2, resume=True)
    disk = Disk(folder)
    opened = RunFolder(folder, resume=True)
    with disk.watched():
        opened.go_on(longer, CPU)
    opened.close()
    for step in range(disk.step + 1):
        for happened in ("all", "none", "some"):
            left = tmp_path / f"crashed-{step}-{happened}"
            lay_out(disk.crashed(step, choices(step)[happened], TAILS["half"]), left)
            was_finished, config = (left / "summary.json").exists(), told(left, "config.json")
            assert not was_finished or (config["rounds"], config["epochs"]) == (2, 1)
            for wanted, change in ((longer, {"rounds": [2, 3], "epochs": [1, 2]}), (small(rounds=2, resume=True), {})):
                again = RunFolder(left, resume=True)
                found = again.go_on(wanted, CPU)
                again.close()
                assert found is not None and found.round == 2
                assert notes(left) == [(3, change)] and not (left / "summary.json").exists()
                assert told(left, "config.json")["epochs"] == wanted.training.epochs
