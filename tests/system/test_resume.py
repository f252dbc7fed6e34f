"""What a resumed run finds in its folder, and what it says when that will not do."""

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.common import make_events_earlier, rounds_of
from support.systems.cut_off import cut_after_round, finished
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedkace_flwr.config import Config, keys_affecting
from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.results.run_folder import RunFolder, differences
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints

Make = Callable[..., Config]


def folder_of(config: Config) -> Path:
    return Path(config.run.results_dir) / config.run.run_name


@pytest.fixture
def whole(small: Make) -> Path:
    return finished(small(run_name="whole"))


@pytest.mark.slow
def test_lines_after_the_checkpoint_are_done_again(small: Make, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may die between a round's line and its checkpoint, and in the middle of a line."""
    folder = cut_after_round(small(), 1, monkeypatch)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write((whole / "rounds.jsonl").read_text().splitlines(keepends=True)[1] + '{"round": 3, "accur')
    run_inline(small(resume=True))
    assert rounds_of(folder) == rounds_of(whole)


@pytest.mark.slow
def test_a_run_that_had_no_checkpoint_yet_starts_anew(small: Make, whole: Path) -> None:
    folder = folder_of(small())
    RunFolder(folder).begin(small(), torch.device("cpu"), f"{7:020d}")
    (folder / "rounds.jsonl").write_text('{"round": 1')
    run_inline(small(resume=True))
    assert rounds_of(folder) == rounds_of(whole)


@pytest.mark.slow
def test_resume_begins_a_run_that_is_not_there_and_leaves_a_finished_one_alone(small: Make, whole: Path) -> None:
    run_inline(small(resume=True))
    assert rounds_of(folder_of(small())) == rounds_of(whole)
    before = {path: path.stat().st_mtime_ns for path in folder_of(small()).rglob("*") if path.name != ".lock"}
    run_inline(small(resume=True))
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_run_is_not_resumed_by_mistake(small: Make, whole: Path) -> None:
    with pytest.raises(RunError, match=r"already holds a run; choose another name, or set resume = true"):
        run_inline(small(run_name="whole"))
    with pytest.raises(ConfigError, match="resume = true: name the run"):
        run_inline(small(run_name="", resume=True))


def test_another_configuration_is_refused_by_key(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cut_after_round(small(), 1, monkeypatch)
    before = (folder / "rounds.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"capacity = 30: the run in .* was begun with 20; resume it with that"):
        run_inline(small(resume=True, capacity=30))
    assert (folder / "rounds.jsonl").read_text() == before
    run_inline(small(resume=True, deadline=500.0))


@pytest.mark.matrix
@pytest.mark.parametrize("key", sorted(keys_affecting("place", "waiting")))
def test_a_key_that_does_not_affect_the_numbers_may_differ(key: str) -> None:
    default = Config().flat()[key]
    assert differences(Config().flat() | {key: "other" if isinstance(default, str) else 9}, Config()) == []


def test_a_key_of_another_method_may_differ_and_one_of_its_own_may_not() -> None:
    for method, expected in (("fedavg", []), ("centralized", ["centralized-rounds"])):
        config = Config.parse({"method": method, "centralized-rounds": "every:5"})
        assert differences(Config.parse({"method": method}).flat(), config) == expected


@pytest.mark.slow
def test_a_run_is_resumed_with_other_waiting_times_and_models_kept(
    small: Make, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_after_round(small(), 1, monkeypatch)
    run_inline(small(resume=True, probe=5.0, keep_models="always"))
    assert [record["round"] for record in rounds_of(folder)] == [1, 2, 3]


@pytest.mark.slow
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    small: Make, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_after_round(small(), 2, monkeypatch)
    newest = folder / "server" / "checkpoint-000002.npz"
    newest.write_bytes(newest.read_bytes()[:-100])
    run_inline(small(resume=True))
    assert rounds_of(folder) == rounds_of(whole)


def test_without_a_readable_checkpoint_nothing_is_lost_and_one_line_says_why(
    small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_after_round(small(), 2, monkeypatch)
    for path in (folder / "server").glob("*.npz"):
        path.write_bytes(b"\0" * 1000)
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    with pytest.raises(
        RunError, match=r"checkpoint-00000\d\.npz: .*checksum.*no checkpoint of the run can be read"
    ) as caught:
        run_inline(small(resume=True))
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("damage", ['{"round": 1, "accu\n', '{"round": 7}\n', "[]\n", ""])
def test_a_damaged_line_before_the_checkpoint_is_named(
    small: Make, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    folder = cut_after_round(small(), 2, monkeypatch)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text(lines[0] + damage)
    with pytest.raises(RunError, match=r"rounds.jsonl, line 2: is not the record of round 2"):
        run_inline(small(resume=True))


def test_a_folder_of_an_older_schema_is_refused(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cut_after_round(small(), 1, monkeypatch)
    content = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**content, "schema": 0}))
    with pytest.raises(RunError, match="is of schema 0, this program writes 1"):
        run_inline(small(resume=True))


def test_keys_that_came_later_stand_at_their_defaults(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cut_after_round(small(), 1, monkeypatch)
    content = json.loads((folder / "config.json").read_text())
    del content["evaluate"]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"evaluate = 'both': .* was begun with 'inference'"):
        run_inline(small(resume=True, evaluate="both"))
    run_inline(small(resume=True))


@pytest.mark.slow
def test_two_servers_do_not_write_one_folder(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkace_flwr.results.run_folder._LOCK_SECONDS", 0)
    first = RunFolder(folder_of(small()))
    with pytest.raises(RunError, match="another process is writing"):
        run_inline(small(resume=True))
    first.close()
    run_inline(small(resume=True))


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_room_lets_it_go_on(small: Make, whole: Path) -> None:
    """A limit on the size of files stands for the full disk: the checkpoint does not fit."""
    small_enough = (whole / "server" / "checkpoint-000003.npz").stat().st_size - 1000  # room for clients' answers
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (small_enough, before[1]))
        with pytest.raises(RunError) as caught:
            run_inline(small(predict_with="global"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(caught.value)
    run_inline(small(predict_with="global", resume=True))
    assert [record["round"] for record in rounds_of(folder_of(small()))] == [1, 2, 3]


def test_a_client_asked_for_a_round_that_it_no_longer_knows_says_so(
    small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server falls back by more rounds than the clients keep: no client may learn from an empty start."""
    config = small(rounds=4)
    folder = cut_after_round(config, 1, monkeypatch)
    kept = (folder / "server" / "checkpoint-000001.npz").read_bytes()
    cut_after_round(small(rounds=4, resume=True), 3, monkeypatch)
    for path in (folder / "server").glob("*.npz"):
        path.unlink()
    (folder / "server" / "checkpoint-000001.npz").write_bytes(kept)
    with pytest.raises(RunError, match="the state before round 2 is gone"):
        run_inline(small(rounds=4, resume=True))


def test_tensorboard_shows_each_round_once(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cut_after_round(small(tracker="tensorboard"), 2, monkeypatch)
    make_events_earlier(folder)
    for path in (folder / "server").glob("*2.npz"):
        path.write_bytes(b"damaged")
    run_inline(small(tracker="tensorboard", resume=True))
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("accuracy/mean")] == [1, 2, 3]


def test_checkpoints_come_back_bit_for_bit_and_two_are_kept(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "server")
    assert store.newest() is None
    for number in (1, 2, 3):
        weights = {"b": np.array([number, np.nan], dtype=np.float32), "a": np.array(7)}
        store.save(Checkpoint(number, "00012", weights, {"0.x": np.arange(number)}, {"partition": [[0, 1]]}))
    found = store.newest()
    assert found is not None
    assert (found.round, found.run, dict(found.record)) == (3, "00012", {"partition": [[0, 1]]})
    assert list(found.weights) == ["b", "a"]
    assert found.weights["b"].tobytes() == np.array([3, np.nan], dtype=np.float32).tobytes()
    assert found.arrays["0.x"].tolist() == [0, 1, 2]
    assert sorted(path.name for path in store.folder.iterdir()) == ["checkpoint-000002.npz", "checkpoint-000003.npz"]
