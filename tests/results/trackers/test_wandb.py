"""Offline runs of Weights & Biases, read back from the file that ``wandb sync`` would send."""

import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from support.systems.cut_off import cut_after_round
from wandb.proto import wandb_internal_pb2

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.results.trackers.catalogue import check_server

Make = Callable[..., Config]
_BLOCK, _HEAD = 2**15, 7


def messages(path: Path) -> Iterator[Any]:
    """The records of a run's file: LevelDB's format of a log, after a head of seven bytes."""
    content, at, whole = path.read_bytes(), _HEAD, b""
    while at + _HEAD <= len(content):
        if _BLOCK - at % _BLOCK < _HEAD:  # too little for a head: the rest of the block is filled up
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + _HEAD])
        whole += content[at + _HEAD : at + _HEAD + size]
        at += _HEAD + size
        if kind in (1, 4):  # a full record, or the last part of one
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(whole)
            yield record
            whole = b""


def files_of(folder: Path) -> list[Path]:
    """The files of a run's parts; they are complete only when the service that writes them has ended."""
    wandb.teardown()
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


def history(path: Path) -> dict[int, dict[str, Any]]:
    """What was logged, by step."""
    shown: dict[int, dict[str, Any]] = {}
    for record in messages(path):
        if record.WhichOneof("record_type") == "history":
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            step = items.pop("_step", record.history.step.num)
            assert step not in shown
            shown[step] = items
    return shown


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_an_offline_run_holds_what_the_record_says(small: Make, tmp_path: Path) -> None:
    run_inline(small(tracker="wandb", epochs=2))
    folder = tmp_path / "run"
    (path,) = files_of(folder)
    shown, records = history(path), records_of(folder)
    assert set(shown) == {1, 2, 3}
    for record in records:
        items = shown[record["round"]]
        assert items["accuracy/mean"] == pytest.approx(record["accuracy"])
        assert items["replay_weight/1"] == pytest.approx(record["replay_weights"][1][-1])
        assert items["buffer_classes/0/values"] == record["buffer_classes"][0]
        assert items["buffer_classes/0/bins"][0] == -0.5
        assert sum(items["replay_weights/values"]) == 3 * 2
    (run,) = [each.run for each in messages(path) if each.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.display_name, run.run_group) == ("fedkace", "run", tmp_path.name)
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["epochs"] == 2 and config["method"] == "fedkace"


@pytest.mark.slow
def test_a_resumed_run_goes_on_under_the_same_name(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_after_round(small(tracker="wandb"), 2, monkeypatch)
    run_inline(small(tracker="wandb", resume=True))
    files = files_of(tmp_path / "run")
    assert len({path.name for path in files}) == 1  # named after the run; `wandb sync` joins its parts
    steps = [step for path in files for step in history(path)]
    assert sorted(steps) == [1, 2, 3]


def test_the_mode_is_the_user_s_where_it_is_set(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run_inline(small(tracker="wandb", rounds=1, clients=1, epochs=1))
    assert files_of(tmp_path / "run") == []
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("MODE", "sometimes"), ("PROJECT", "a/b"), pytest.param("MODE", "online", marks=pytest.mark.slow)],
)
def test_what_cannot_be_used_is_told_before_any_run(
    name: str, value: str, small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with socket.create_server(("127.0.0.1", 0)) as server:  # which is closed again, so that nothing answers
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
    if name == "PROJECT":
        monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(RunError, match=r"^tracker = 'wandb': .* cannot be used \(.*\); WANDB_MODE=offline"):
        check_server(small(tracker="wandb"))
